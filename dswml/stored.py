"""What a data set is to every reader of it, and the data set that lives in a Zarr store."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import NDArray

from dswml.blocks import DEFAULT_BLOCK_BYTES, RowBlock, plan_row_blocks
from dswml.csr import CsrArray, CsrGroup, member_array
from dswml.errors import DataError, UsageError
from dswml.executor import Executor
from dswml.format import check_attributes
from dswml.layout import MAX_FILES
from dswml.storage import (
    absolute_url,
    chunk_checksums,
    open_group,
    options_key,
    parse_options,
    read_array,
    read_names,
)

__all__ = ["CsrArray", "Dataset", "StoredDataset"]

Normalize = Literal["l2"] | None

#: Attributes that are part of the content, and so of its fingerprint.
_FACTS = (
    "format",
    "format_version",
    "n_rows",
    "n_features",
    "n_labels",
    "nnz_x",
    "nnz_y",
    "k_hat",
    "normalize",
)


#: Chunks (or shards) of an array beyond which a store is refused; a hundred times what the writer makes.
MAX_CHUNKS = 100 * MAX_FILES


class Dataset(ABC):
    """N rows of features X and binary labels Y, read by row blocks; immutable.

    Attributes
    ----------
    n_rows, n_features, n_labels : int
        N, D and L.
    x_dtype : dtype
        float32 or float64.
    is_sparse : bool
        Whether `read_x` returns CSR.
    blocks : tuple of RowBlock
        The plan of row blocks.
    attrs : dict
        Everything recorded with the data.
    url : str or None
        Where the data are stored. None where they live in this process, so that an
        executor must ship them to its workers.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, int, int],
        x_dtype: np.dtype[Any],
        is_sparse: bool,
        blocks: tuple[RowBlock, ...],
        attrs: Mapping[str, Any],
        url: str | None = None,
    ) -> None:
        self.n_rows, self.n_features, self.n_labels = shape
        self.x_dtype = x_dtype
        self.is_sparse = is_sparse
        self.blocks = blocks
        self.attrs = dict(attrs)
        self.url = url

    @property
    def normalize(self) -> Normalize:
        """What was done to the rows of X when they were stored."""
        return "l2" if self.attrs.get("normalize") == "l2" else None

    @property
    def block_nbytes(self) -> int:
        """Bytes in memory of the largest row block, were the entries spread evenly over the rows."""
        index_bytes = 4 if self.is_sparse else 0
        total = self.nnz_x * (self.x_dtype.itemsize + index_bytes) + self.nnz_y * 5
        rows = max((block.n_rows for block in self.blocks), default=0)
        return -(-total * rows // max(self.n_rows, 1))

    @property
    @abstractmethod
    def nnz_x(self) -> int:
        """Stored entries of X, N D if dense."""

    @property
    @abstractmethod
    def nnz_y(self) -> int:
        """Ones of Y."""

    @property
    @abstractmethod
    def k_hat(self) -> int:
        """Largest number of labels on a row."""

    @property
    @abstractmethod
    def label_counts(self) -> NDArray[np.int64]:
        """Rows that carry each label, shape (L,)."""

    @property
    @abstractmethod
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the labels in column order."""

    @property
    @abstractmethod
    def feature_names(self) -> tuple[str, ...] | None:
        """Names of the features in column order."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of the content: the same for a copy, another when data change."""

    @abstractmethod
    def read_x(self, start: int, stop: int) -> NDArray[Any] | CsrArray:
        """Return rows [start, stop) of X: a C-ordered array, or CSR."""

    @abstractmethod
    def read_y(self, start: int, stop: int) -> CsrArray:
        """Return rows [start, stop) of Y: CSR with uint8 ones and sorted column indices."""

    @property
    def travels(self) -> bool:
        """Whether other processes can read the data, so that a cluster can work on them."""
        return self.url is not None and not self.url.startswith("memory:")

    def check(self, executor: Executor | None = None) -> Dataset:
        """Check the data where that was not done when they were stored, and return them.

        Parameters
        ----------
        executor : Executor, optional
            Who reads and checks, once; by default this process.
        """
        return self

    @property
    def p0(self) -> float:
        """The paper's weight of a zero, 2 K_hat / L."""
        if not self.n_labels:
            raise UsageError("these data have no labels, so no weight 2 K_hat / L follows from them")
        return 2 * self.k_hat / self.n_labels

    def __repr__(self) -> str:
        kind = "sparse" if self.is_sparse else "dense"
        place = self.url or "memory"
        return (
            f"<{type(self).__name__} {place}: {self.n_rows} rows, {self.n_features} features "
            f"({kind} {self.x_dtype}), {self.n_labels} labels, {len(self.blocks)} row blocks>"
        )


@dataclass(frozen=True)
class _Opened:
    """The arrays and attributes of a store, opened once in each process."""

    url: str
    attrs: dict[str, Any]
    group: zarr.Group
    x: zarr.Array[Any] | CsrGroup
    y: CsrGroup

    @property
    def arrays(self) -> list[zarr.Array[Any]]:
        x = self.x.arrays if isinstance(self.x, CsrGroup) else [self.x]
        return [*x, *self.y.arrays]

    @property
    def x_values(self) -> zarr.Array[Any]:
        return self.x.data if isinstance(self.x, CsrGroup) else self.x

    @property
    def chunk_rows(self) -> int:
        """Rows that are read at least, whether they are a file of their own or part of a shard."""
        array = self.x.indptr if isinstance(self.x, CsrGroup) else self.x
        return int(array.chunks[0])

    @property
    def bytes_per_row(self) -> float:
        """Mean size of a row of X and Y in memory."""
        n_rows = max(1, self.attrs["n_rows"])
        return float(sum(array.nbytes for array in self.arrays) / n_rows)

    @cached_property
    def label_counts(self) -> NDArray[np.int64]:
        array = member_array(self.group, "label_counts", self.url)
        if array.shape != (self.attrs["n_labels"],) or array.dtype != np.int64:
            raise DataError(f"array label_counts in {self.url} holds {array.dtype} of shape {array.shape}")
        counts = read_array(array, 0, array.shape[0], store=self.url)
        counts.flags.writeable = False
        return counts

    @cached_property
    def label_names(self) -> tuple[str, ...] | None:
        return read_names(self.group, "label_names")

    @cached_property
    def feature_names(self) -> tuple[str, ...] | None:
        return read_names(self.group, "feature_names")

    @cached_property
    def fingerprint(self) -> str:
        facts = {name: self.attrs[name] for name in sorted(_FACTS)}
        facts["arrays"] = [(a.name, a.shape, str(a.dtype), a.chunks, a.shards) for a in self.arrays]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(self.label_counts.tobytes())
        for array in self.arrays:
            digest.update(chunk_checksums(array, store=self.url))
        return digest.hexdigest()


class _OpenStores:
    """The stores this process has opened last, so that each is opened once however often it is sent."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._stores: OrderedDict[tuple[str, str, str], _Opened] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, url: str, options: str) -> _Opened:
        """Open the store as it is now."""
        opened = _open_store(url, options)
        with self._lock:
            self._stores[url, options, opened.attrs["store_id"]] = opened
            while len(self._stores) > self._most:
                self._stores.popitem(last=False)
        return opened

    def reopen(self, url: str, options: str, store_id: str) -> _Opened:
        """Return the store that another process has opened, and no other that took its place."""
        with self._lock:
            opened = self._stores.get((url, options, store_id))
        if opened is None:
            opened = self.open(url, options)
        if opened.attrs["store_id"] != store_id:
            raise DataError(f"the store {url} was replaced by another while it was in use: open it again")
        return opened


_open_stores = _OpenStores()


def _open_store(url: str, options: str) -> _Opened:
    group = open_group(url, "r", parse_options(options))
    attrs: dict[str, Any] = dict(group.attrs)
    check_attributes(attrs, url)
    n_rows, n_features, n_labels = attrs["n_rows"], attrs["n_features"], attrs["n_labels"]
    x: zarr.Array[Any] | CsrGroup
    if attrs["sparse"]:
        x = CsrGroup.open(group, "X", n_rows, n_features, url, attrs["nnz_x"])
    else:
        x = member_array(group, "X", url)
        if x.shape != (n_rows, n_features):
            raise DataError(f"array X in {url} has shape {x.shape} where {(n_rows, n_features)} must be")
    y = CsrGroup.open(group, "Y", n_rows, n_labels, url, attrs["nnz_y"])
    opened = _Opened(url, attrs, group, x, y)
    for array in opened.arrays:
        pieces = zip(array.shape, array.shards or array.chunks, strict=True)
        if math.prod(-(-length // piece) for length, piece in pieces) > MAX_CHUNKS:
            raise DataError(f"array {array.name.strip('/')} in {url} claims more than {MAX_CHUNKS} chunks")
    return opened


class StoredDataset(Dataset):
    """A data set in a Zarr store; only its address travels between processes.

    The fingerprint is made, when it is first asked for, from the attributes, the label counts and the
    checksum that ends every chunk: a few bytes of each are read. It is the same for a copy of the
    store, wherever it is, and another after any change through Zarr, in place or by writing the
    data again. Bytes that were damaged under Zarr are found by reading them, not by the fingerprint.
    """

    url: str

    def __init__(
        self,
        url: str | os.PathLike[str],
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        store_id: str | None = None,
    ) -> None:
        place = absolute_url(url)
        self.storage_options = dict(storage_options or {})
        self.block_bytes = block_bytes
        options = options_key(self.storage_options)
        if store_id is None:
            opened = _open_stores.open(place, options)
        else:
            opened = _open_stores.reopen(place, options, store_id)
        self._opened = opened
        attrs = opened.attrs
        super().__init__(
            shape=(attrs["n_rows"], attrs["n_features"], attrs["n_labels"]),
            x_dtype=opened.x_values.dtype,
            is_sparse=isinstance(opened.x, CsrGroup),
            blocks=plan_row_blocks(attrs["n_rows"], opened.chunk_rows, opened.bytes_per_row, block_bytes),
            attrs=attrs,
            url=place,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.url, self.block_bytes, self.storage_options, self.attrs["store_id"])
        return type(self), state

    @property
    def nnz_x(self) -> int:
        return int(self.attrs["nnz_x"])

    @property
    def nnz_y(self) -> int:
        return int(self.attrs["nnz_y"])

    @property
    def k_hat(self) -> int:
        return int(self.attrs["k_hat"])

    @property
    def label_counts(self) -> NDArray[np.int64]:
        return self._opened.label_counts

    @property
    def label_names(self) -> tuple[str, ...] | None:
        return self._opened.label_names

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        return self._opened.feature_names

    @property
    def fingerprint(self) -> str:
        return self._opened.fingerprint

    @property
    def layout(self) -> dict[str, dict[str, Any]]:
        """Shape, chunks, shards and type of every array."""
        return {
            array.name.strip("/"): {
                "shape": array.shape,
                "chunks": array.chunks,
                "shards": array.shards,
                "dtype": str(array.dtype),
            }
            for array in self._opened.arrays
        }

    def read_x(self, start: int, stop: int) -> NDArray[Any] | CsrArray:
        x = self._opened.x
        if isinstance(x, CsrGroup):
            return x.read(start, stop, self.url)
        return read_array(x, start, stop, store=self.url)

    def read_y(self, start: int, stop: int) -> CsrArray:
        rows = self._opened.y.read(start, stop, self.url)
        if not (rows.data == 1).all():
            value = rows.data[rows.data != 1][0]
            raise DataError(
                f"array Y/data in {self.url} holds {value} in rows [{start}, {stop}): it must be 1"
            )
        return rows
