"""How the arrays of a store are cut into chunks and shards: integer planning, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dswml.blocks import MIB
from dswml.errors import UsageError

__all__ = ["MAX_FILES", "ArrayLayout", "Layout", "index_dtype", "plan_layout"]

#: A dense chunk is read whole by one row block; four of them make a default block.
DENSE_CHUNK_BYTES = 16 * MIB

#: Entries of CSR rows start and end inside chunks, which the neighbouring block reads again: smaller ones.
CSR_CHUNK_BYTES = 4 * MIB

#: Chunks of very large data grow up to four times as large before they are gathered into shards.
CHUNK_GROWTH = 4

#: Small data are cut finer, so that several workers find a chunk each.
SMALL_PARTS = 16
MIN_CHUNK_BYTES = MIB

#: More files than this in one array are gathered into shards.
MAX_FILES = 10_000


def index_dtype(largest: int) -> np.dtype[Any]:
    """Return int32 where it can hold the number, int64 otherwise.

    Examples
    --------
    >>> index_dtype(1000), index_dtype(2**31)
    (dtype('int32'), dtype('int64'))
    """
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


@dataclass(frozen=True)
class ArrayLayout:
    """Length of an array along its first axis, of its chunks, and of the unit that is written whole."""

    length: int
    chunk: int
    unit: int

    @property
    def shard(self) -> int | None:
        """Length of a shard, or None if chunks are files of their own."""
        return self.unit if self.unit != self.chunk else None


@dataclass(frozen=True)
class Layout:
    """Layouts of the arrays by rows (dense X, indptr), by entries of X and by entries of Y."""

    rows: ArrayLayout
    indptr: ArrayLayout
    x: ArrayLayout
    y: ArrayLayout


def plan_layout(
    n_rows: int,
    n_features: int,
    nnz_x: int | None,
    nnz_y: int,
    itemsize: int,
    *,
    chunk_rows: int | None = None,
    chunk_bytes: int | None = None,
    max_files: int = MAX_FILES,
) -> Layout:
    """Choose chunks so that one of each array stands for about the same rows.

    Parameters
    ----------
    n_rows, n_features : int
        Shape of X.
    nnz_x : int or None
        Entries of a sparse X; None for a dense one.
    nnz_y : int
        Entries of Y.
    itemsize : int
        Bytes of a value of X.
    chunk_rows, chunk_bytes : int, optional
        Rows of a chunk, or bytes of X in a chunk, instead of the defaults.
    max_files : int
        Number of files in one array beyond which chunks are gathered into shards.

    Returns
    -------
    Layout

    Examples
    --------
    >>> layout = plan_layout(1_000_000, 1000, None, 5_000_000, 4)
    >>> layout.rows.chunk, layout.y.chunk
    (4185, 20925)
    """
    if n_rows < 1 or n_features < 1:
        raise UsageError(f"a data set needs rows and features, not {n_rows} x {n_features}")
    for name, value in (("chunk_rows", chunk_rows), ("chunk_bytes", chunk_bytes), ("max_files", max_files)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if chunk_rows is None:
        entry_bytes = itemsize + index_dtype(n_features).itemsize
        row_bytes = n_features * itemsize if nnz_x is None else nnz_x / n_rows * entry_bytes + 8
        if chunk_bytes is None:
            usual = DENSE_CHUNK_BYTES if nnz_x is None else CSR_CHUNK_BYTES
            total = n_rows * row_bytes
            chunk_bytes = int(min(usual, max(MIN_CHUNK_BYTES, total / SMALL_PARTS)))
            chunk_bytes = int(min(CHUNK_GROWTH * usual, max(chunk_bytes, total / max_files)))
        most = max(1, int(chunk_bytes // row_bytes))
        chunk_rows = -(-n_rows // -(-n_rows // most))  # all of about the same size, for workers to share
    chunk_rows = max(1, min(n_rows, chunk_rows))

    def cut(length: int, chunk: int) -> ArrayLayout:
        chunk = max(1, min(chunk, length))
        return ArrayLayout(length, chunk, chunk * max(1, -(-length // (chunk * max_files))))

    def entries(nnz: int) -> ArrayLayout:
        return cut(nnz, -(-chunk_rows * nnz // n_rows))

    x = cut(n_rows, chunk_rows) if nnz_x is None else entries(nnz_x)
    return Layout(rows=cut(n_rows, chunk_rows), indptr=cut(n_rows + 1, chunk_rows), x=x, y=entries(nnz_y))
