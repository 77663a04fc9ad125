"""Matrices in files as sources of rows: NumPy's .npy, SciPy's .npz, AnnData's Zarr; some rows at a time."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any

import numpy as np
import scipy.sparse as sp
import zarr
from numpy.typing import NDArray

from dswml.errors import DataError, UsageError, telling
from dswml.executor import available_memory
from dswml.rows import MAX_FEATURES, MAX_LABELS, OnRead, RowBatch, largest_value
from dswml.stored import CsrArray
from dswml.validation import binary_rows, check_block

__all__ = ["MatrixFile", "MatrixRows", "NpyFile", "NpzFile", "ZarrMatrix", "check_room"]

#: Bytes of X that are checked and copied at once.
BATCH_BYTES = 4 * 2**20
#: Tasks that an import is cut into at most: 32 TB at the default size.
MAX_SPANS = 10**6

Rows = NDArray[Any] | CsrArray
ReadRows = Callable[[int, int], Rows]


def check_room(n_bytes: int, what: str, max_bytes: int | None = None) -> None:
    """Refuse what would take more than a quarter of the memory, or more than it may."""
    allowed = available_memory() // 4 if max_bytes is None else max_bytes
    if n_bytes > allowed:
        raise DataError(f"{what} takes {n_bytes} bytes, more than {allowed} allowed")


class MatrixFile(ABC):
    """A matrix in a file, read by rows; it may be sent to any worker."""

    #: Whether rows can only be read from the first to the last.
    sequential = False

    place: str

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def nnz(self) -> int | None:
        """Entries of a sparse matrix; None of a dense one."""

    @abstractmethod
    def open(self) -> Any:
        """Return a context in which ``read(start, stop)`` gives rows, dense or CSR."""

    def _csr(self, data: Any, indices: Any, indptr: Any, first_row: int) -> CsrArray:
        shape = (len(indptr) - 1, self.shape[1])
        try:
            return sp.csr_array((data, indices, indptr - indptr[0]), shape=shape)
        except ValueError as error:
            raise DataError(
                f"the rows from {first_row} on in {self.place} are no CSR matrix: {error}"
            ) from error


@dataclass(frozen=True)
class NoLabelsFile(MatrixFile):
    """The labels of rows that have none: a matrix without columns, of so many rows."""

    place: str
    n_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, 0

    @property
    def nnz(self) -> int | None:
        return 0

    @contextmanager
    def open(self) -> Iterator[ReadRows]:
        yield lambda start, stop: sp.csr_array((stop - start, 0))


@dataclass(frozen=True)
class NpyFile(MatrixFile):
    """A dense matrix in a local .npy file, mapped into memory; objects in it are refused."""

    place: str

    @cached_property
    def _mapped(self) -> NDArray[Any]:
        with telling(f"{self.place} cannot be read as a NumPy array of numbers"):
            array: NDArray[Any] = np.load(self.place, mmap_mode="r", allow_pickle=False)
        if array.ndim != 2 or array.dtype.kind not in "fiub":
            raise DataError(
                f"{self.place} holds {array.dtype} of shape {array.shape}: a matrix of numbers must be there"
            )
        return array

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.place,)

    @property
    def shape(self) -> tuple[int, int]:
        return self._mapped.shape[0], self._mapped.shape[1]

    @property
    def nnz(self) -> int | None:
        return None

    @contextmanager
    def open(self) -> Iterator[ReadRows]:
        yield lambda start, stop: np.array(self._mapped[start:stop])


@dataclass(frozen=True)
class NpzFile(MatrixFile):
    """A SciPy CSR matrix in a local .npz file, read as a stream; only its row starts are kept in memory."""

    place: str
    sequential = True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.place,)

    @cached_property
    def _starts(self) -> tuple[tuple[int, int], NDArray[np.int64]]:
        with self._archive() as archive:
            kind = bytes(self._member(archive, "format", 64)).decode("ascii", "replace").strip("\0")
            if kind != "csr":
                raise DataError(
                    f"{self.place} holds a sparse matrix of format {kind!r}: "
                    "save it again with scipy.sparse.save_npz(file, matrix.tocsr())"
                )
            shape = self._member(archive, "shape", 1024)
            if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape.min() < 0:
                raise DataError(f"the shape in {self.place} is {shape.tolist()}: two counts must be there")
            indptr = self._member(archive, "indptr")
            if indptr.shape != (int(shape[0]) + 1,) or indptr.dtype.kind not in "iu":
                raise DataError(f"{self.place} has {indptr.size} row starts for {shape[0]} rows")
        starts = indptr.astype(np.int64)
        if starts[0] != 0 or (len(starts) > 1 and np.diff(starts).min() < 0):
            raise DataError(f"the row starts in {self.place} do not rise from 0")
        return (int(shape[0]), int(shape[1])), starts

    @property
    def shape(self) -> tuple[int, int]:
        return self._starts[0]

    @property
    def nnz(self) -> int | None:
        return int(self._starts[1][-1])

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        with (
            telling(f"{self.place} cannot be read as a sparse matrix saved by SciPy"),
            zipfile.ZipFile(self.place) as archive,
        ):
            yield archive

    def _header(self, stream: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        try:
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        except ValueError as error:
            raise DataError(f"{name} in {self.place} is not a NumPy array: {error}") from error
        if dtype.hasobject:
            raise DataError(f"{name} in {self.place} holds objects: only numbers are read")
        return shape, dtype

    def _member(self, archive: zipfile.ZipFile, name: str, max_bytes: int | None = None) -> NDArray[Any]:
        with archive.open(f"{name}.npy") as stream:
            shape, dtype = self._header(stream, name)
            n_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
            check_room(n_bytes, f"{name} in {self.place}", max_bytes)
            return np.frombuffer(self._read(stream, n_bytes, name), dtype=dtype).reshape(shape)

    def _read(self, stream: IO[bytes], n_bytes: int, name: str) -> bytes:
        content = stream.read(n_bytes)
        if len(content) < n_bytes:
            raise DataError(f"{name} in {self.place} ends too early: the file is cut off")
        return content

    @contextmanager
    def open(self) -> Iterator[ReadRows]:
        _, starts = self._starts
        with self._archive() as archive, ExitStack() as stack:
            streams = []
            for name in ("data", "indices"):
                stream = stack.enter_context(archive.open(f"{name}.npy"))
                shape, dtype = self._header(stream, name)
                if shape != (int(starts[-1]),):
                    raise DataError(f"{name} in {self.place} has shape {shape}, not {(int(starts[-1]),)}")
                streams.append((name, stream, dtype))
            at = 0

            def read(start: int, stop: int) -> CsrArray:
                nonlocal at
                if start != at:
                    raise UsageError(f"rows of {self.place} are read in order: {at}, not {start}, comes next")
                at = stop
                count = int(starts[stop] - starts[start])
                check_room(16 * count, f"rows [{start}, {stop}) of {self.place}")
                data, indices = (
                    np.frombuffer(self._read(stream, count * dtype.itemsize, name), dtype=dtype)
                    for name, stream, dtype in streams
                )
                return self._csr(data, indices, starts[start : stop + 1], start)

            yield read


@dataclass(frozen=True)
class ZarrMatrix(MatrixFile):
    """A matrix in a Zarr store: a dense array, AnnData's ``csr_matrix``, or its data frame of columns."""

    url: str
    path: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.path, self.storage_options)

    @property
    def place(self) -> str:  # type: ignore[override]
        """The store and the path in it."""
        return f"{self.url}/{self.path}".rstrip("/")

    @cached_property
    def _node(self) -> zarr.Group | zarr.Array[Any]:
        with telling(f"{self.place} cannot be opened as a Zarr array or group"):
            return zarr.open(
                self.url, path=self.path, mode="r", storage_options=dict(self.storage_options) or None
            )

    @property
    def kind(self) -> str:
        """``array``, or AnnData's name of the encoding."""
        if isinstance(self._node, zarr.Array):
            return "array"
        return str(self._node.attrs.get("encoding-type"))

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns of a data frame."""
        if self.kind != "dataframe":
            return None
        return tuple(str(name) for name in np.atleast_1d(np.asarray(self._node.attrs["column-order"])))

    def _part(self, name: str) -> zarr.Array[Any]:
        assert isinstance(self._node, zarr.Group)
        part = self._node.get(name)
        if not isinstance(part, zarr.Array) or part.dtype.kind not in "fiub":
            raise DataError(f"{name} of {self.place} is not an array of numbers")
        return part

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        node = self._node
        if isinstance(node, zarr.Array):
            if node.ndim != 2 or node.dtype.kind not in "fiub":
                raise DataError(
                    f"{self.place} holds {node.dtype} of shape {node.shape}, not a matrix of numbers"
                )
            return int(node.shape[0]), int(node.shape[1])
        if self.kind == "dataframe":
            columns = self.columns or ()
            lengths = {int(self._part(name).shape[0]) for name in columns}
            if len(lengths) != 1:
                raise DataError(f"the columns of {self.place} are not of one length: {sorted(lengths)}")
            return lengths.pop(), len(columns)
        if self.kind != "csr_matrix":
            raise DataError(
                f"{self.place} is encoded as {self.kind!r}: "
                "a dense array, a csr_matrix or a data frame must be there"
            )
        n_rows, n_columns = (int(length) for length in np.asarray(node.attrs["shape"]))
        if self._part("indptr").shape != (n_rows + 1,):
            raise DataError(f"{self.place} has {self._part('indptr').shape[0]} row starts for {n_rows} rows")
        return n_rows, n_columns

    @property
    def nnz(self) -> int | None:
        return int(self._part("data").shape[0]) if self.kind == "csr_matrix" else None

    @contextmanager
    def open(self) -> Iterator[ReadRows]:
        yield self._read

    def _read(self, start: int, stop: int) -> Rows:
        with telling(f"rows [{start}, {stop}) of {self.place} cannot be read"):
            if isinstance(self._node, zarr.Array):
                return np.asarray(self._node[start:stop])
            if self.kind == "dataframe":
                return np.stack(
                    [np.asarray(self._part(name)[start:stop]) for name in self.columns or ()], axis=1
                )
            indptr = np.asarray(self._part("indptr")[start : stop + 1]).astype(np.int64)
            first, last = int(indptr[0]), int(indptr[-1])
            if not 0 <= first <= last <= (self.nnz or 0):
                raise DataError(
                    f"the row starts of {self.place} send rows from {start} on to [{first}, {last})"
                )
            data, indices = (np.asarray(self._part(name)[first:last]) for name in ("data", "indices"))
            return self._csr(data, indices, indptr, start)


@dataclass(frozen=True)
class MatrixRows:
    """The rows of a matrix X with those of a matrix Y; positions are row numbers.

    Parameters
    ----------
    x, y : MatrixFile
        Features, and labels that are 0 or 1.
    dtype : str
        Type in which every feature must be finite.
    """

    x: MatrixFile
    y: MatrixFile
    dtype: str = "float64"

    def __post_init__(self) -> None:
        (n_x, n_features), (n_y, n_labels) = self.x.shape, self.y.shape
        if n_x != n_y:
            raise DataError(
                f"{self.x.place} has {n_x} rows and {self.y.place} has {n_y}: they must have the same"
            )
        if n_features > MAX_FEATURES or n_labels > MAX_LABELS:
            raise DataError(
                f"{self.x.place} has {n_features} features and {self.y.place} {n_labels} labels: "
                f"more than {MAX_FEATURES} or {MAX_LABELS} cannot be imported"
            )
        for file in (self.x, self.y):
            if file.nnz is None:
                check_room(8 * file.shape[1], f"a row of {file.place}")

    @property
    def url(self) -> str:
        """The file of X."""
        return self.x.place

    @property
    def sequential(self) -> bool:
        """Whether the rows can only be read from the first to the last."""
        return self.x.sequential or self.y.sequential

    def positions(self, segment_bytes: int) -> int:
        """Return how many rows make up so many bytes in memory."""
        n_rows, n_columns = self.x.shape
        per_row = 8 * n_columns if self.x.nnz is None else 16 * self.x.nnz / max(1, n_rows)
        per_row += 8 * self.y.shape[1] if self.y.nnz is None else 16 * self.y.nnz / max(1, n_rows)
        return max(1, int(segment_bytes // max(1, per_row)))

    def spans(self, segment_bytes: int) -> tuple[tuple[int, int], ...]:
        """Cut the rows into ranges of positions that can be read on their own."""
        n_rows = self.x.shape[0]
        if self.sequential or n_rows == 0:
            return ((0, n_rows),)
        step = self.positions(segment_bytes)
        if n_rows > MAX_SPANS * step:
            raise DataError(f"{self.x.place} claims {n_rows} rows, more than can be imported at once")
        return tuple((start, min(start + step, n_rows)) for start in range(0, n_rows, step))

    def batches(
        self, start: int, stop: int | None = None, *, on_read: OnRead | None = None
    ) -> Iterator[tuple[int, RowBatch]]:
        """Yield checked rows [start, stop) and the number of the first of each batch."""
        stop = self.x.shape[0] if stop is None else stop
        step = self.positions(BATCH_BYTES)
        with self.x.open() as read_x, self.y.open() as read_y:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                yield first, self._batch(first, read_x(first, last), read_y(first, last))
                if on_read is not None:
                    on_read(last, stop)

    def _batch(self, first: int, x: Rows, y: Rows) -> RowBatch:
        labels = binary_rows(y, first_row=first, place=self.y.place)
        check_block(x, labels, first_row=first, place=self.x.place)
        values = x if isinstance(x, np.ndarray) else x.data
        too_large = np.abs(values.astype(np.float64)) >= largest_value(self.dtype)
        if too_large.any():
            raise DataError(
                f"X in {self.x.place} has the value {values[too_large][0]} in rows from {first} on, which "
                f"{self.dtype} cannot hold: import it as float64"
            )
        y_parts = labels.indptr.astype(np.int64), labels.indices.astype(np.int32)
        if isinstance(x, np.ndarray):
            return RowBatch(None, None, values, *y_parts)
        x = x if x.has_sorted_indices else x.sorted_indices()
        return RowBatch(x.indptr.astype(np.int64), x.indices.astype(np.int32), x.data, *y_parts)
