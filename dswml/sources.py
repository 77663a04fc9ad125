"""A user's own arrays as a data set: NumPy, SciPy sparse, dask, Zarr; one entry point decides."""

from __future__ import annotations

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import numpy as np
import scipy.sparse as sp
import zarr
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from dswml.blocks import DEFAULT_BLOCK_BYTES, MIB, RowBlock, plan_row_blocks
from dswml.csr import CsrArray, CsrGroup, csr_rows
from dswml.errors import DataError, UsageError
from dswml.executor import Executor
from dswml.held import compute, embedded_bytes, held_keys, take_out
from dswml.storage import open_node, read_array
from dswml.stored import Dataset, StoredDataset
from dswml.validation import BlockFacts, binary_rows, check_dataset, warn_unused_labels

__all__ = ["ArrayDataset", "as_dataset"]

#: A dask array whose graph carries more data than this is made of arrays of this process's memory.
MAX_EMBEDDED_BYTES = 8 * MIB


class Matrix(ABC):
    """Rows of a matrix that somebody else keeps."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    is_sparse: bool
    bytes_per_row: float
    chunk_rows: int = 1
    #: Whether other processes can read the rows.
    travels: bool = False

    @abstractmethod
    def read(self, start: int, stop: int) -> Any:
        """Return rows [start, stop): a NumPy array or CSR."""

    def plan(self, bytes_per_row: float, block_bytes: int) -> tuple[RowBlock, ...]:
        """Cut the rows into blocks."""
        return plan_row_blocks(self.shape[0], self.chunk_rows, bytes_per_row, block_bytes)

    def needs(self, start: int, stop: int) -> tuple[Hashable, ...]:
        """Return the keys of the results of a Dask cluster that reading these rows takes."""
        return ()


class DenseRows(Matrix):
    """A NumPy array (or memory map)."""

    is_sparse = False

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values
        self.shape = (values.shape[0], values.shape[1])
        self.dtype = values.dtype
        self.bytes_per_row = values.shape[1] * values.itemsize

    def read(self, start: int, stop: int) -> Any:
        return self.values[start:stop]


class SparseRows(Matrix):
    """A SciPy matrix, kept as CSR."""

    is_sparse = True

    def __init__(self, values: CsrArray) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype
        self.bytes_per_row = (values.data.nbytes + values.indices.nbytes) / max(1, values.shape[0]) + 8

    def read(self, start: int, stop: int) -> Any:
        first, last = int(self.values.indptr[start]), int(self.values.indptr[stop])
        return csr_rows(
            self.values.data[first:last],
            self.values.indices[first:last],
            self.values.indptr[start : stop + 1] - first,
            (stop - start, self.shape[1]),
        )


class ZarrRows(Matrix):
    """A dense Zarr array."""

    is_sparse = False

    def __init__(self, array: zarr.Array[Any]) -> None:
        self.array = array
        self.shape = (array.shape[0], array.shape[1])
        self.dtype = array.dtype
        self.bytes_per_row = array.shape[1] * array.dtype.itemsize
        self.chunk_rows = int(array.chunks[0])
        self.travels = not isinstance(array.store, MemoryStore)

    def read(self, start: int, stop: int) -> Any:
        return read_array(self.array, start, stop, store=str(self.array.store))


class ZarrCsrRows(Matrix):
    """A CSR matrix in a Zarr group, in AnnData's encoding."""

    is_sparse = True

    def __init__(self, group: zarr.Group) -> None:
        self.place = f"{group.store}/{group.path}"
        shape: Any = group.attrs.get("shape")
        if not isinstance(shape, list | tuple) or len(shape) != 2:
            raise DataError(f"attribute shape of the CSR group {self.place} is {shape!r}")
        n_rows, n_columns = int(shape[0]), int(shape[1])
        self.csr = CsrGroup.open(group, "", n_rows, n_columns, self.place)
        self.shape = (n_rows, n_columns)
        self.dtype = self.csr.data.dtype
        self.bytes_per_row = float(sum(array.nbytes for array in self.csr.arrays) / max(1, n_rows))
        self.chunk_rows = int(self.csr.indptr.chunks[0])
        self.travels = not isinstance(group.store, MemoryStore)

    def read(self, start: int, stop: int) -> Any:
        return self.csr.read(start, stop, self.place)


class DaskRows(Matrix):
    """A dask array, computed by the reading task itself."""

    def __init__(self, array: Any, name: str) -> None:
        if any(np.isnan(length) for axis in array.chunks for length in axis):
            raise UsageError(
                f"the dask array {name} has chunks of unknown size: call {name}.compute_chunk_sizes()"
            )
        self.array, self._futures = take_out(array)
        self._is_held = bool(held_keys(self.array))
        self.travels = embedded_bytes(self.array) <= MAX_EMBEDDED_BYTES
        self._needs: dict[tuple[int, int], tuple[Hashable, ...]] = {}
        self.shape = (int(array.shape[0]), int(array.shape[1]))
        self.dtype = np.dtype(array.dtype)
        self.is_sparse = bool(sp.issparse(array._meta))
        self.chunk_rows = max(self.array.chunks[0])
        self.bytes_per_row = self.shape[1] * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Any:
        rows = self.array[start:stop]
        rows = compute(rows, self._futures) if self._is_held else rows.compute(scheduler="synchronous")
        return sp.csr_array(rows) if sp.issparse(rows) else np.asarray(rows)

    def needs(self, start: int, stop: int) -> tuple[Hashable, ...]:
        if not self._is_held:
            return ()
        if (start, stop) not in self._needs:
            self._needs[start, stop] = held_keys(self.array[start:stop])
        return self._needs[start, stop]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_futures": {}, "_needs": {}}

    def plan(self, bytes_per_row: float, block_bytes: int) -> tuple[RowBlock, ...]:
        """Follow the row chunks; small dense ones are taken together."""
        most = (
            0 if self.is_sparse else plan_row_blocks(self.shape[0], 1, bytes_per_row, block_bytes)[0].n_rows
        )
        blocks: list[RowBlock] = []
        start = stop = 0
        for length in (int(length) for length in self.array.chunks[0] if length):
            if stop > start and stop + length - start > most:
                blocks.append(RowBlock(len(blocks), start, stop))
                start = stop
            stop += length
        blocks.append(RowBlock(len(blocks), start, stop))
        return tuple(blocks)


class NoLabels(Matrix):
    """The labels of rows that have none: a matrix without columns."""

    is_sparse = True
    dtype = np.dtype(np.uint8)
    bytes_per_row = 0.0
    travels = True

    def __init__(self, n_rows: int) -> None:
        self.shape = (n_rows, 0)

    def read(self, start: int, stop: int) -> Any:
        return sp.csr_array((stop - start, 0), dtype=np.uint8)


class ArrayDataset(Dataset):
    """A data set over somebody else's arrays, checked when its counts are first asked for."""

    def __init__(self, x: Matrix, y: Matrix, block_bytes: int = DEFAULT_BLOCK_BYTES) -> None:
        if x.shape[0] != y.shape[0]:
            raise DataError(
                f"X has {x.shape[0]} rows and Y has {y.shape[0]} rows: they must have the same number"
            )
        if 0 in x.shape:
            raise DataError(f"X is empty: its shape is {x.shape}")
        self._x, self._y = x, y
        self._block_bytes = block_bytes
        self._facts: BlockFacts | None = None
        super().__init__(
            shape=(*x.shape, y.shape[1]),
            x_dtype=_feature_dtype(x.dtype),
            is_sparse=x.is_sparse,
            blocks=x.plan(x.bytes_per_row + y.bytes_per_row, block_bytes),
            attrs={},
        )

    def aligned(self, chunk_rows: int) -> ArrayDataset:
        """Return the same data in blocks of whole chunks, unless the data have chunks of their own."""
        if self._x.chunk_rows > 1:
            return self
        other = copy.copy(self)
        bytes_per_row = self._x.bytes_per_row + self._y.bytes_per_row
        other.blocks = plan_row_blocks(self.n_rows, chunk_rows, bytes_per_row, self._block_bytes)
        return other

    @property
    def travels(self) -> bool:
        return self._x.travels and self._y.travels

    def needs(self, item: Any) -> tuple[Hashable, ...]:
        """Return the keys of the results of a Dask cluster that a row block, or an item with one, takes."""
        block: RowBlock = getattr(item, "block", item)
        return (*self._x.needs(block.start, block.stop), *self._y.needs(block.start, block.stop))

    def check(self, executor: Executor | None = None) -> ArrayDataset:
        if self._facts is None:
            self._facts = check_dataset(self, executor)
            warn_unused_labels(self._facts.label_counts, "Y")
        return self

    @property
    def facts(self) -> BlockFacts:
        """What the check has counted; made now, in this process, if it was not before."""
        self.check()
        assert self._facts is not None
        return self._facts

    @property
    def nnz_x(self) -> int:
        return sum(self.facts.nnz_x)

    @property
    def nnz_y(self) -> int:
        return sum(self.facts.nnz_y)

    @property
    def k_hat(self) -> int:
        return self.facts.k_hat

    @property
    def label_counts(self) -> NDArray[np.int64]:
        return self.facts.label_counts

    @property
    def label_names(self) -> tuple[str, ...] | None:
        return None

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return None

    @property
    def fingerprint(self) -> str:
        shape = f"{self.n_rows} {self.n_features} {self.n_labels} {self.x_dtype} {self.is_sparse}"
        return hashlib.sha256((shape + self.facts.digest).encode()).hexdigest()

    def read_x(self, start: int, stop: int) -> NDArray[Any] | CsrArray:
        rows = self._x.read(start, stop)
        if isinstance(rows, np.ndarray):
            return np.ascontiguousarray(rows, dtype=self.x_dtype)
        return rows if rows.dtype == self.x_dtype else rows.astype(self.x_dtype)

    def read_y(self, start: int, stop: int) -> CsrArray:
        return binary_rows(self._y.read(start, stop), first_row=start)


def _feature_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the float type that X is read in: its own, or the smallest that holds its integers."""
    if dtype.kind not in "fiub":
        raise UsageError(f"X has type {dtype}: features must be real numbers")
    return np.dtype(np.float32) if np.can_cast(dtype, np.float32) else np.dtype(np.float64)


def _matrix(values: Any, name: str) -> Matrix:
    """Decide what somebody's array is."""
    if isinstance(values, str | os.PathLike):
        values = open_node(values)
    if isinstance(values, zarr.Group):
        if values.attrs.get("encoding-type") != "csr_matrix":
            raise UsageError(
                f"the Zarr group given as {name} has encoding-type {values.attrs.get('encoding-type')!r}: "
                "a sparse matrix must be a csr_matrix in AnnData's encoding"
            )
        return ZarrCsrRows(values)
    if not hasattr(values, "ndim") or not hasattr(values, "dtype"):
        values = np.asarray(values)
    if values.ndim != 2:
        raise UsageError(f"{name} has {values.ndim} dimensions: it must be a matrix, rows by columns")
    if sp.issparse(values):
        return SparseRows(sp.csr_array(values))
    if isinstance(values, zarr.Array):
        return ZarrRows(values)
    if hasattr(values, "dask") and hasattr(values, "chunks"):
        return DaskRows(values, name)
    return DenseRows(np.asarray(values))


def as_dataset(X: Any, Y: Any = None, *, block_bytes: int = DEFAULT_BLOCK_BYTES) -> Dataset:
    """Take data as they are.

    Parameters
    ----------
    X : Dataset, str, path, array or sparse matrix
        A data set or the place of one; or features: NumPy array, SciPy sparse matrix, dask
        array (of either), dense Zarr array, Zarr group in AnnData's ``csr_matrix`` encoding,
        or the place of one of the last two.
    Y : array or sparse matrix, optional
        Labels, in any of the same forms. None with a data set, which has its own, or where
        only features are wanted.
    block_bytes : int
        Largest size of a row block in memory. A `Dataset` keeps its own plan.

    Returns
    -------
    Dataset

    Examples
    --------
    >>> data = as_dataset([[1.0, 2.0], [3.0, 4.0]], [[0, 1], [1, 1]])
    >>> data.k_hat, data.label_counts.tolist(), data.url
    (2, [1, 2], None)
    """
    if isinstance(X, Dataset):
        if Y is not None:
            raise UsageError("a data set has its own labels: give either a data set or X and Y")
        return X
    if Y is None and isinstance(X, str | os.PathLike):
        return StoredDataset(X, block_bytes)
    x = _matrix(X, "X")
    y = NoLabels(x.shape[0]) if Y is None else _matrix(Y, "Y")
    if Y is not None and y.shape[1] == 0:
        raise DataError(f"Y is empty: its shape is {y.shape}")
    return ArrayDataset(x, y, block_bytes)
