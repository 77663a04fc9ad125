"""Scores of many labels in tiles: rows x labels of bounded size, and what is chosen from them.

Rows are projected once, Z = X U, in pieces, and a piece meets M label tile by label tile: each is one
matrix product of at most `TILE_ENTRIES` entries, so that any number of rows and labels is scored in
bounded memory. How rows and labels are cut depends on their numbers and the rank alone, never on the
machine, and everything that scores, in this process or on a cluster, goes through here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from . import kernels
from .errors import DataError, UsageError
from .features import prepare
from .selection import empty_top_k, labels_of_top_k, merge_top_k, select_at_threshold

__all__ = [
    "MAX_SELECTED",
    "TILE_ENTRIES",
    "Rule",
    "Selected",
    "choose_labels",
    "projected_pieces",
    "rank_labels",
    "score_tiles",
]

Array = npt.NDArray[Any]

#: Most entries of a tile of scores and of a piece of projected rows: 8 MiB each.
TILE_ENTRIES = 2**20
#: Fewest labels of a tile, where there are as many.
TILE_LABELS = 1024
#: Most labels that a threshold may select in one piece of rows; of 1024 rows, 16 384 each.
MAX_SELECTED = 2**24


@dataclass(frozen=True)
class Rule:
    """How labels are chosen from scores: all from a threshold on, or the k best ("rcut").

    Attributes
    ----------
    threshold : float or ndarray (L,), optional
        One for all labels, or one for each; inf for a label that is never to be predicted.
    top_k : int, optional
        Number of labels of every row, instead of a threshold.

    Examples
    --------
    >>> str(Rule(threshold=0.5)), str(Rule(top_k=3))
    ('score >= 0.5', 'the 3 best')
    """

    threshold: float | Array | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.top_k is None):
            raise UsageError("give either a threshold or top_k, the number of best labels of a row")
        if self.top_k is not None and (isinstance(self.top_k, bool) or self.top_k < 1):
            raise UsageError(f"top_k must be at least 1, the best label of every row; got {self.top_k!r}")
        if isinstance(self.threshold, int | float) and math.isnan(self.threshold):
            raise UsageError("the threshold is NaN: give a number")

    def checked(self, n_labels: int) -> Rule:
        """Return the rule, if it suits so many labels."""
        if self.top_k is not None and self.top_k > n_labels:
            raise UsageError(
                f"top_k (--top-k) must be between 1 and the number of labels, {n_labels}; got {self.top_k!r}"
            )
        if isinstance(self.threshold, np.ndarray):
            if self.threshold.shape != (n_labels,):
                raise UsageError(
                    f"the thresholds have shape {self.threshold.shape}, but there are {n_labels} labels: "
                    "give one number, or one for each label"
                )
            if np.isnan(self.threshold).any():
                raise UsageError(
                    f"the threshold of label {int(np.argmax(np.isnan(self.threshold)))} is NaN: "
                    "use inf for a label that is never to be predicted"
                )
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as JSON takes it; the threshold of a label that is never predicted is None.

        Examples
        --------
        >>> Rule(np.array([0.5, math.inf])).as_dict()
        {'threshold': [0.5, None], 'top_k': None}
        """
        threshold: Any = self.threshold
        if isinstance(threshold, np.ndarray):
            threshold = [value if math.isfinite(value) else None for value in threshold.tolist()]
        return {"threshold": threshold, "top_k": self.top_k}

    def __str__(self) -> str:
        if self.top_k is not None:
            return "the best label" if self.top_k == 1 else f"the {self.top_k} best"
        if isinstance(self.threshold, np.ndarray):
            return "score >= the label's own threshold"
        return f"score >= {self.threshold:g}"


def projected_pieces(
    matrix: Any,
    u: Array,
    n_labels: int,
    normalize: str | None = None,
    intercept: float = 0.0,
    first_row: int = 0,
    place: str = "X",
    k: int = 0,
) -> Iterator[tuple[slice, Array]]:
    """Yield pieces of the rows, in order, with Z = prepare(X) U in float64.

    Parameters
    ----------
    matrix : ndarray or CSR matrix (n, D)
    u : ndarray (D, r), or (D + 1, r) with an intercept
    n_labels : int
        Number of labels that the pieces are going to meet; with the rank it decides their size.
    normalize, intercept
        What is done to the rows first; see `dswml.features.prepare`.
    first_row, place
        Where the rows are from, for the error if one has scores that are not finite.
    k : int
        Length of the rankings that they are to have, which decides their size too.
    """
    n_rows = matrix.shape[0]
    step = max(1, TILE_ENTRIES // max(min(n_labels, TILE_LABELS), u.shape[1], 2 * k, 1))
    left = np.ascontiguousarray(u[:-1] if intercept else u, dtype=np.float64)
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        # The constant column is one more row of U to add, cheaper than one more column of X.
        z = _product(prepare(matrix if step >= n_rows else matrix[rows], normalize, 0.0), left)
        if intercept:
            z += intercept * u[-1]
        if not np.isfinite(z).all():
            row = first_row + start + int(np.flatnonzero(~np.isfinite(z).all(axis=1))[0])
            raise DataError(
                f"row {row} of {place} has features that are NaN or infinite, or so large that its scores "
                "overflow: mend that row or leave it out ('dswml validate STORE' names the entry)"
            )
        yield rows, z


def score_tiles(z: Array, m: Array) -> Iterator[tuple[int, Array]]:
    """Yield the first label of each tile and its scores Z M, in the order of the labels.

    A tile is overwritten by the next one.

    Examples
    --------
    >>> [(first, tile.tolist()) for first, tile in score_tiles(np.eye(2), np.array([[1.0, 2], [3, 4]]))]
    [(0, [[1.0, 2.0], [3.0, 4.0]])]
    """
    n_rows, n_labels = len(z), m.shape[1]
    width = min(n_labels, max(TILE_LABELS, TILE_ENTRIES // max(n_rows, 1)))
    if n_labels == width:
        yield 0, z @ m
        return
    memory = np.empty(n_rows * width)
    for first in range(0, n_labels, width):
        columns = m[:, first : first + width]
        tile = memory[: n_rows * columns.shape[1]].reshape(n_rows, columns.shape[1])
        yield first, np.matmul(z, columns, out=tile)


class Selected:
    """The labels that reach a threshold, gathered from the tiles of the same rows.

    Parameters
    ----------
    threshold : float or ndarray (L,)
    n_rows, n_labels : int
    keep_scores : bool
        Keep the scores of the labels instead of ones.

    Examples
    --------
    >>> selected = Selected(0.5, n_rows=2, n_labels=3)
    >>> selected.add(0, np.array([[0.9, 0.1], [0.2, 0.5]]))
    >>> selected.add(2, np.array([[0.7], [0.0]]))
    >>> selected.rows().toarray().tolist()
    [[1, 0, 1], [0, 1, 0]]
    """

    def __init__(
        self, threshold: float | Array, n_rows: int, n_labels: int, *, keep_scores: bool = False
    ) -> None:
        self.threshold, self.shape, self.keep_scores = threshold, (n_rows, n_labels), keep_scores
        self._tiles: list[tuple[int, Any]] = []
        self._nnz = 0

    def add(self, first_label: int, tile: Array) -> None:
        """Take in the next tile, in the order of the labels."""
        threshold = self.threshold
        if isinstance(threshold, np.ndarray):
            threshold = threshold[first_label : first_label + tile.shape[1]]
        found = select_at_threshold(tile, threshold, keep_scores=self.keep_scores)
        self._nnz += found.nnz
        if self._nnz > MAX_SELECTED:
            raise UsageError(
                f"the rule '{Rule(self.threshold)}' predicts more than {MAX_SELECTED // self.shape[0]} of "
                f"{self.shape[1]} labels a row: raise the threshold, or take the k best"
            )
        if found.nnz:
            self._tiles.append((first_label, found))

    def rows(self) -> Any:
        """Return what was selected as CSR rows with sorted labels."""
        if len(self._tiles) == 1 and self._tiles[0][1].shape == self.shape:
            return self._tiles[0][1]
        dtype = np.float64 if self.keep_scores else np.uint8
        if not self._tiles:
            return sp.csr_array(self.shape, dtype=dtype)
        numbers = np.arange(self.shape[0])
        row = np.concatenate([np.repeat(numbers, np.diff(found.indptr)) for _, found in self._tiles])
        order = np.argsort(row, kind="stable")
        labels = np.concatenate([found.indices + first for first, found in self._tiles])[order]
        values = np.concatenate([found.data for _, found in self._tiles])[order]
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=self.shape[0]))])
        rows = sp.csr_array((values, labels, indptr), shape=self.shape)
        rows.has_canonical_format = True
        return rows


def rank_labels(z: Array, m: Array, k: int) -> tuple[Array, Array]:
    """Return the k best labels of projected rows, best first, equal scores by label, and their scores."""
    best_labels, best_scores = empty_top_k(len(z), k)
    for first, tile in score_tiles(z, m):
        merge_top_k(best_labels, best_scores, tile, first)
    return best_labels, best_scores


def choose_labels(z: Array, m: Array, rule: Rule, *, keep_scores: bool = False) -> Any:
    """Return the labels that the rule chooses for projected rows, as CSR rows of ones or of scores.

    Examples
    --------
    >>> choose_labels(np.eye(2), np.array([[0.1, 0.9], [0.6, 0.2]]), Rule(top_k=1)).toarray().tolist()
    [[0, 1], [1, 0]]
    """
    if rule.top_k is not None:
        labels, scores = rank_labels(z, m, rule.top_k)
        if not keep_scores:
            return labels_of_top_k(labels, m.shape[1])
        indptr = np.arange(len(z) + 1) * rule.top_k
        rows = sp.csr_array((scores.ravel(), labels.ravel(), indptr), shape=(len(z), m.shape[1]))
        rows.sort_indices()
        return rows
    assert rule.threshold is not None
    selected = Selected(rule.threshold, len(z), m.shape[1], keep_scores=keep_scores)
    for first, tile in score_tiles(z, m):
        selected.add(first, tile)
    return selected.rows()


def _product(matrix: Any, right: Array) -> Array:
    """``matrix @ right`` in float64; of sparse rows without the interpreter lock."""
    if not sp.issparse(matrix):
        product: Array = matrix @ right
        return product
    data = matrix.data
    if data.dtype not in (np.float32, np.float64):
        data = data.astype(np.float64)
    out = np.empty((matrix.shape[0], right.shape[1]))
    kernels.csr_times_dense(matrix.indptr[:-1], matrix.indptr[1:], matrix.indices, data, right, out)
    return out
