"""From tiles of scores to labels: the running k best of every row, and all labels over a threshold.

A tile holds the scores of consecutive labels for the rows of one block, so that a caller can go
through any number of labels in bounded memory. Wherever labels are ranked, equal scores are put
in the order of the labels: **of two equal scores the lower label index is the better one**,
whatever the tiles and the order in which they come. Scores are equal where all their bits are: two labels
with the same weights may differ in the last one, which depends on where in a matrix product they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from .errors import DataError, UsageError

__all__ = [
    "empty_top_k",
    "label_rows",
    "labels_of_top_k",
    "merge_top_k",
    "select_at_threshold",
    "top_k",
]

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

#: From so many places of a ranking on, what a tile has for it is sorted, not inserted one by one.
SORTED = 128
#: Marks a place of a ranking that no label has taken.
NO_LABEL = -1


def compiled(function: F) -> F:
    # No reassociation here: comparisons must see the scores as they are.
    kernel: Any = numba.njit(nogil=True, cache=True)(function)
    return cast(F, kernel)


def label_rows(labels: Any, name: str = "y_true") -> Any:
    """Return a 0/1 matrix, dense or sparse, as CSR rows with sorted indices and nothing but ones.

    Parameters
    ----------
    labels : csr_array, sparse matrix or array-like (n, L)
        Zeros, stored or not, are inactive labels and ones active labels.
    name : str
        What the matrix is called in an error.

    Examples
    --------
    >>> label_rows([[0, 1, 1], [0, 0, 0]]).indices.tolist()
    [1, 2]
    """
    rows = labels if sp.issparse(labels) else np.asarray(labels)
    if rows.ndim != 2:
        raise UsageError(f"{name} has {rows.ndim} dimension(s): give a matrix, rows x labels")
    rows = rows if isinstance(rows, sp.csr_array) else sp.csr_array(rows)
    if not rows.has_canonical_format or not rows.data.all():
        rows = rows.copy()
        rows.sum_duplicates()
        rows.eliminate_zeros()
    wrong = np.flatnonzero(rows.data != 1)
    if wrong.size:
        row = int(np.searchsorted(rows.indptr, wrong[0], side="right")) - 1
        raise DataError(
            f"{name} is {rows.data[wrong[0]]} at row {row}, label {rows.indices[wrong[0]]}: "
            "every label must be 0 or 1, and scores are given as scores"
        )
    return rows


def empty_top_k(n_rows: int, k: int, dtype: npt.DTypeLike = np.float64) -> tuple[Array, Array]:
    """Return the labels (-1) and scores (-inf) of rankings that have seen no tile yet.

    Examples
    --------
    >>> empty_top_k(1, 2)
    (array([[-1, -1]]), array([[-inf, -inf]]))
    """
    if k < 1:
        raise UsageError(f"k is {k!r}: the number of best labels must be at least 1")
    return np.full((n_rows, k), NO_LABEL, dtype=np.int64), np.full((n_rows, k), -np.inf, dtype=dtype)


def merge_top_k(best_labels: Array, best_scores: Array, tile: Array, first_label: int = 0) -> None:
    """Let the scores of one tile compete with the k best so far, in place.

    Rows are sorted best first; of two equal scores the lower label is the better one. The
    result does not depend on the order of the tiles.

    Parameters
    ----------
    best_labels, best_scores : ndarray (n, k)
        The running best, from `empty_top_k` or an earlier call; unused places are (-1, -inf).
    tile : ndarray (n, t)
        Scores of the labels ``first_label``, ..., ``first_label + t - 1``, each in one tile only.

    Examples
    --------
    >>> labels, scores = empty_top_k(1, 2)
    >>> merge_top_k(labels, scores, np.array([[0.5, 0.9]]), first_label=2)
    >>> merge_top_k(labels, scores, np.array([[0.1, 0.5]]), first_label=0)
    >>> labels, scores
    (array([[3, 1]]), array([[0.9, 0.5]]))
    """
    if best_scores.shape != best_labels.shape or tile.ndim != 2 or tile.shape[0] != best_scores.shape[0]:
        raise UsageError(
            f"the best labels {best_labels.shape}, best scores {best_scores.shape} and the tile "
            f"{tile.shape} do not belong together: they must be n x k, n x k and n x t"
        )
    if best_scores.dtype != tile.dtype:
        raise UsageError(
            f"the tile is {tile.dtype} and the best scores are {best_scores.dtype}, so that rounding would "
            "make or break ties: give empty_top_k the dtype of the tiles"
        )
    merge = _merge if best_scores.shape[1] < SORTED else _merge_sorted
    refuse_nan(merge(best_labels, best_scores, tile, first_label), tile, first_label)


def top_k(scores: Array, k: int) -> tuple[Array, Array]:
    """Return the k best labels of every row, best first, and their scores; equal ones by label index.

    Places beyond the number of labels stay (-1, -inf).

    Examples
    --------
    >>> top_k(np.array([[0.2, 0.7, 0.7]]), 2)
    (array([[1, 2]]), array([[0.7, 0.7]]))
    """
    scores = score_tile(scores)
    best_labels, best_scores = empty_top_k(scores.shape[0], k, scores.dtype)
    merge_top_k(best_labels, best_scores, scores)
    return best_labels, best_scores


def labels_of_top_k(best_labels: Array, n_labels: int) -> Any:
    """Return rankings as label rows (CSR): the prediction that takes the k best ("rcut").

    Examples
    --------
    >>> labels_of_top_k(np.array([[2, 0], [1, -1]]), 3).toarray().tolist()
    [[1, 0, 1], [0, 1, 0]]
    """
    taken = best_labels >= 0
    indptr = np.concatenate([[0], np.cumsum(taken.sum(axis=1))])
    indices = best_labels[taken]
    if indices.max(initial=-1) >= n_labels:
        raise DataError(
            f"a ranking names label {indices.max()}, but there are {n_labels} labels: "
            "give the ranking of the same label set"
        )
    rows = sp.csr_array((np.ones(indices.size, np.uint8), indices, indptr), shape=(len(taken), n_labels))
    rows.sort_indices()
    return rows


def select_at_threshold(scores: Array, threshold: float | Array, *, keep_scores: bool = False) -> Any:
    """Return the labels with score >= threshold as CSR rows over the labels of the tile.

    Scores are compared with the threshold in float64. Tiles of the same rows are put side by side
    with ``scipy.sparse.hstack(tiles, format="csr")``.

    Parameters
    ----------
    scores : ndarray (n, t)
        One tile of scores.
    threshold : float or ndarray (t,)
        One for all labels, or one for each label of the tile; inf never selects a finite score.
    keep_scores : bool
        Store the scores of the selected labels instead of ones.

    Examples
    --------
    >>> select_at_threshold(np.array([[0.5, 0.1], [0.4, 0.9]]), 0.5).toarray().tolist()
    [[1, 0], [0, 1]]
    """
    scores = score_tile(scores)
    n_rows, width = scores.shape
    thresholds = np.asarray(threshold, dtype=np.float64)
    if thresholds.ndim and thresholds.shape != (width,):
        raise UsageError(
            f"the thresholds have shape {thresholds.shape}, but the tile has {width} labels: "
            "give one number, or one for each label of the tile"
        )
    if np.isnan(thresholds).any():
        raise UsageError("a threshold is NaN: use inf for a label that is never to be predicted")
    thresholds = np.ascontiguousarray(np.broadcast_to(thresholds, (width,)))
    indptr = np.zeros(n_rows + 1, dtype=np.int64)
    refuse_nan(_count_selected(scores, thresholds, indptr), scores, 0)
    nnz = int(indptr[-1])
    index_dtype = np.int32 if max(nnz, width) <= np.iinfo(np.int32).max else np.int64
    indices = np.empty(nnz, dtype=index_dtype)
    values = np.empty(nnz, dtype=scores.dtype) if keep_scores else np.ones(nnz, dtype=np.uint8)
    _fill_selected(scores, thresholds, indptr, indices, values, keep_scores)
    selected = sp.csr_array((values, indices, indptr.astype(index_dtype)), shape=(n_rows, width))
    selected.has_canonical_format = True
    return selected


def score_tile(scores: Any) -> Array:
    """Return scores as a matrix of float32 or float64."""
    tile = np.asarray(scores)
    if tile.ndim != 2:
        raise UsageError(f"the scores have shape {tile.shape}: give a matrix, rows x labels")
    return tile if tile.dtype in (np.float32, np.float64) else tile.astype(np.float64)


def refuse_nan(place: int, tile: Array, first_label: int) -> None:
    if place >= 0:
        row, column = divmod(place, tile.shape[1])
        raise DataError(
            f"the score of row {row} of the block, label {first_label + column}, is NaN: "
            "check the features and the model for NaN"
        )


@compiled
def _merge(best_labels: Array, best_scores: Array, tile: Array, first_label: int) -> int:
    """Merge a tile; return the flat place of a NaN, or -1."""
    k = best_scores.shape[1]
    for i in range(tile.shape[0]):
        for j in range(tile.shape[1]):
            score = tile[i, j]
            if score < best_scores[i, k - 1]:
                continue
            if np.isnan(score):
                return int(i * tile.shape[1] + j)
            label = first_label + j
            p = k
            while p > 0:
                other = best_labels[i, p - 1]
                if other >= 0 and (
                    score < best_scores[i, p - 1] or (score == best_scores[i, p - 1] and label > other)
                ):
                    break
                p -= 1
            for q in range(k - 1, p, -1):
                best_scores[i, q] = best_scores[i, q - 1]
                best_labels[i, q] = best_labels[i, q - 1]
            if p < k:
                best_scores[i, p] = score
                best_labels[i, p] = label
    return -1


@compiled
def _merge_sorted(best_labels: Array, best_scores: Array, tile: Array, first_label: int) -> int:
    """The same for many places."""
    k = best_scores.shape[1]
    labels, scores = np.empty_like(best_labels[0]), np.empty_like(best_scores[0])
    for i in range(tile.shape[0]):
        row = tile[i]
        found = np.flatnonzero(~(row < best_scores[i, k - 1]))
        for j in found:
            if np.isnan(row[j]):
                return int(i * tile.shape[1] + j)
        found = found[np.argsort(-row[found], kind="mergesort")]
        if not found.size:
            continue
        labels[:], scores[:] = best_labels[i], best_scores[i]
        old = new = 0
        for p in range(k):
            take = new < found.size and (
                labels[old] < 0
                or row[found[new]] > scores[old]
                or (row[found[new]] == scores[old] and first_label + found[new] < labels[old])
            )
            if take:
                best_labels[i, p], best_scores[i, p] = first_label + found[new], row[found[new]]
                new += 1
            else:
                best_labels[i, p], best_scores[i, p] = labels[old], scores[old]
                old += 1
    return -1


@compiled
def _count_selected(scores: Array, thresholds: Array, indptr: Array) -> int:
    """Fill indptr; return the flat place of a NaN, or -1."""
    for i in range(scores.shape[0]):
        count = 0
        for j in range(scores.shape[1]):
            if scores[i, j] >= thresholds[j]:
                count += 1
            elif np.isnan(scores[i, j]):
                return int(i * scores.shape[1] + j)
        indptr[i + 1] = indptr[i] + count
    return -1


@compiled
def _fill_selected(
    scores: Array, thresholds: Array, indptr: Array, indices: Array, values: Array, keep_scores: bool
) -> None:
    for i in range(scores.shape[0]):
        place = indptr[i]
        for j in range(scores.shape[1]):
            if scores[i, j] >= thresholds[j]:
                indices[place] = j
                if keep_scores:
                    values[place] = scores[i, j]
                place += 1
