"""One row block of X as the sweeps see it: preprocessed, dense or CSR, with the products they need."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from . import kernels
from .blocks import RowBlock
from .cache import process_cache, read_ahead
from .errors import DataError
from .executor import following_item
from .folds import Fold

__all__ = ["BlockSource", "Features", "RowReader", "prepare", "some_rows"]

Array = npt.NDArray[Any]

#: Rows of a float32 product that are summed before they are added in float64.
PIECE_ROWS = 4096


class RowReader(Protocol):
    """What training needs of a data set."""

    @property
    def n_rows(self) -> int: ...
    @property
    def n_features(self) -> int: ...
    @property
    def n_labels(self) -> int: ...
    @property
    def is_sparse(self) -> bool: ...
    @property
    def blocks(self) -> tuple[RowBlock, ...]: ...
    def read_x(self, start: int, stop: int) -> Any: ...
    def read_y(self, start: int, stop: int) -> Any: ...


class Features:
    """Products of one row block of X with matrices of a few columns.

    Parameters
    ----------
    matrix : ndarray or CSR array
        The rows, already preprocessed.
    dtype : dtype
        Type the products are computed in; sums over rows are kept in float64.
    """

    def __init__(self, matrix: Any, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.n_rows, self.n_features = matrix.shape
        self.sparse = sp.issparse(matrix)
        if self.sparse:
            self.starts, self.ends = matrix.indptr[:-1], matrix.indptr[1:]
            self.indices, self.data = matrix.indices, matrix.data
            self.nbytes = matrix.indptr.nbytes + self.indices.nbytes + self.data.nbytes
        else:
            self.dense = np.ascontiguousarray(matrix, dtype=dtype)
            self.nbytes = self.dense.nbytes

    def subset(self, rows: Array) -> Features:
        """Return some of the rows; sparse ones share their entries."""
        if not self.sparse:
            return Features(self.dense[rows], self.dtype)
        some = copy(self)
        some.starts, some.ends, some.n_rows = self.starts[rows], self.ends[rows], rows.size
        return some

    def times(self, right: Array) -> Array:
        """``X_b @ right``."""
        right = np.ascontiguousarray(right, dtype=self.dtype)
        if not self.sparse:
            product: Array = self.dense @ right
            return product
        out = np.empty((self.n_rows, right.shape[1]), dtype=self.dtype)
        kernels.csr_times_dense(self.starts, self.ends, self.indices, self.data, right, out)
        return out

    def transpose_times(self, left: Array, start: int = 0) -> Array:
        """``X_b[start:start + len(left)].T @ left`` in float64."""
        out = np.zeros((self.n_features, left.shape[1]))
        if self.sparse:
            starts, ends = (each[start : start + len(left)] for each in (self.starts, self.ends))
            left = np.ascontiguousarray(left, dtype=np.float64)
            kernels.csr_transpose_times_dense(starts, ends, self.indices, self.data, left, out)
            return out
        left = left.astype(self.dtype, copy=False)
        for first in range(0, len(left), PIECE_ROWS):
            piece = left[first : first + PIECE_ROWS]
            # In this order BLAS takes two thirds of the time.
            out += (piece.T @ self.dense[start + first : start + first + len(piece)]).T
        return out

    def square(self) -> Array:
        """``X_b.T @ X_b`` in float64."""
        out = np.zeros((self.n_features, self.n_features))
        if self.sparse:
            kernels.csr_square(self.starts, self.ends, self.indices, self.data, out)
            return out
        for first in range(0, self.n_rows, PIECE_ROWS):
            piece = self.dense[first : first + PIECE_ROWS]
            out += piece.T @ piece
        return out

    def transpose_times_labels(self, labels: Any, *values: Array) -> list[Array]:
        """``(X_b.T @ E).T``, labels x features, for each E with the pattern of ``labels`` and such values."""
        if self.sparse:
            out = np.zeros((len(values), labels.shape[1], self.n_features))
            rows = self.starts, self.ends, self.indices, self.data
            kernels.csr_transpose_times_labels(*rows, labels.indptr, labels.indices, np.stack(values), out)
            return list(out)
        return [self._dense_transpose_times_labels(labels, each) for each in values]

    def _dense_transpose_times_labels(self, labels: Any, values: Array) -> Array:
        out = np.zeros((labels.shape[1], self.n_features))
        if self.dtype == np.float64:
            kernels.dense_transpose_times_labels(self.dense, labels.indptr, labels.indices, values, out)
            return out
        values = values.astype(self.dtype)
        for first in range(0, self.n_rows, PIECE_ROWS):
            piece = np.zeros(out.shape, dtype=self.dtype)
            indptr = labels.indptr[first : first + PIECE_ROWS + 1]
            kernels.dense_transpose_times_labels(self.dense[first:], indptr, labels.indices, values, piece)
            out += piece
        return out


def some_rows(matrix: Any, rows: Array) -> Any:
    """Return some rows of a CSR matrix, without the interpreter lock.

    Examples
    --------
    >>> some_rows(sp.csr_array([[1, 0], [0, 2], [3, 4]]), np.array([0, 2])).toarray()
    array([[1, 0],
           [3, 4]])
    """
    ends = np.zeros(rows.size + 1, dtype=matrix.indptr.dtype)
    np.cumsum(np.diff(matrix.indptr)[rows], out=ends[1:])
    indices, data = (np.empty(ends[-1], dtype=each.dtype) for each in (matrix.indices, matrix.data))
    kernels.take_rows(matrix.indptr, matrix.indices, matrix.data, rows, ends, indices, data)
    return sp.csr_array((data, indices, ends), shape=(rows.size, matrix.shape[1]))


def prepare(matrix: Any, normalize: str | None, intercept: float) -> Any:
    """Scale rows to unit norm and append a constant column, as training and prediction both must.

    A row whose norm overflows comes out as NaN, not as zeros.
    """
    if normalize == "l2":
        if sp.issparse(matrix):
            norms = np.empty(matrix.shape[0])
            kernels.row_norms(matrix.indptr, matrix.data, norms)
            norms[norms == 0], norms[np.isinf(norms)] = 1.0, np.nan
            data = (matrix.data / np.repeat(norms, np.diff(matrix.indptr))).astype(
                np.result_type(matrix.data.dtype, np.float32), copy=False
            )
            matrix = sp.csr_array((data, matrix.indices, matrix.indptr), shape=matrix.shape)
        else:
            matrix = np.asarray(matrix)
            norms = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
            norms[norms == 0], norms[np.isinf(norms)] = 1.0, np.nan
            matrix = matrix / norms[:, None].astype(np.result_type(matrix.dtype, np.float32))
    if intercept:
        column = np.full((matrix.shape[0], 1), intercept, dtype=np.result_type(matrix.dtype, np.float32))
        if sp.issparse(matrix):
            matrix = sp.hstack([matrix, sp.csr_array(column)], format="csr")
        else:
            matrix = np.hstack([matrix, column])
    return matrix


@dataclass(frozen=True)
class BlockSource:
    """How to get a row block, on any worker: the data set, what is done to its rows, what is kept.

    Attributes
    ----------
    run : str
        Names the fit in the caches of the workers.
    cache : {"auto", "memory", "none"}
        "auto" keeps what finds room, "memory" insists on keeping X, "none" keeps nothing.
    fold : Fold, optional
        Train on the rows outside this fold only.
    basis : str
        Names the basis in the caches where several grow on the same rows.
    reserve : int
        Bytes of a worker's memory that the cache leaves to the results of tasks.
    """

    data: RowReader
    run: str
    dtype: str = "float64"
    normalize: str | None = None
    intercept: float = 0.0
    cache: str = "auto"
    fold: Fold | None = None
    basis: str = ""
    reserve: int = 0

    @property
    def n_features(self) -> int:
        """Number of columns of X with the intercept's."""
        return self.data.n_features + bool(self.intercept)

    def needs(self, block: RowBlock) -> tuple[Hashable, ...]:
        """Return the keys of the results of a Dask cluster that the block is read from."""
        needs = getattr(self.data, "needs", None)
        return () if needs is None else tuple(needs(block))

    def features(self, block: RowBlock) -> Features:
        """Read and preprocess all rows of X in the block, or take them from the cache."""
        kept = self.kept(block, "x")
        if kept is not None:
            features: Features = kept
            return features
        features = read_ahead().take((self.run, block.index), lambda: self._read(block))
        following = following_item()
        if isinstance(following, RowBlock) and self._takes_time(following):
            read_ahead().start((self.run, following.index), lambda: self._read(following))
        if not self.keep(block, "x", features, features.nbytes) and self.cache == "memory":
            limit = process_cache().limit
            raise DataError(
                f"cache='memory' keeps all of X in memory, but the cache of {limit / 2**20:.0f} MiB is full "
                f"at rows {block.start} to {block.stop}: use cache='auto' or workers with more memory"
            )
        return features

    def _read(self, block: RowBlock) -> Features:
        matrix = prepare(self.data.read_x(block.start, block.stop), self.normalize, self.intercept)
        return Features(matrix, np.dtype(self.dtype))

    def _takes_time(self, block: RowBlock) -> bool:
        """Whether the block must be read from a store, so that others can work meanwhile."""
        travels = getattr(self.data, "travels", False)
        return travels and not self.needs(block) and self.kept(block, "x") is None

    def labels(self, block: RowBlock) -> Any:
        """Read the rows of Y to train on, or take them from the cache."""
        labels = self.kept(block, "y")
        if labels is None:
            labels = self.data.read_y(block.start, block.stop)
            self.keep(block, "y", labels, labels.indptr.nbytes + labels.indices.nbytes + labels.data.nbytes)
        return labels if self.fold is None else some_rows(labels, self.fold.training_rows(block))

    def kept(self, block: RowBlock, kind: str) -> Any:
        """Return what this process keeps of the block, or None."""
        return None if self.cache == "none" else process_cache().get(self.run, block.index, kind)

    def keep(self, block: RowBlock, kind: str, value: Any, nbytes: int) -> bool:
        """Keep a value if the cache is on and has room."""
        return self.cache != "none" and process_cache().put(
            self.run, block.index, kind, value, nbytes, self.reserve
        )
