"""Folds with the same share of every label: iterative stratification (Sechidis et al., 2011).

The label with the fewest rows left comes first: each of its rows goes to the fold that has the fewest rows
of the label, of equal ones to that with the fewest rows at all, of equal ones by a hash of the row. Labels
with few rows are so spread while there is a choice. Only Y is read, once, and its active entries are kept
in this process; the result depends on Y, the number of folds and the seed alone.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from .blocks import RowBlock
from .errors import UsageError
from .executor import Executor
from .features import BlockSource
from .folds import fold_of_rows
from .selection import compiled

__all__ = ["assign_folds", "stratified_folds"]

Array = npt.NDArray[Any]


def stratified_folds(source: BlockSource, executor: Executor, n_folds: int, seed: int) -> Array:
    """Return the fold of every row of a data set, a byte each."""
    if n_folds > 255:
        raise UsageError(f"stratified folds are numbered in a byte: use at most 255; got {n_folds}")
    return assign_folds(
        sp.vstack(executor.map(_labels, source.data.blocks, source), format="csr"), n_folds, seed
    )


def assign_folds(labels: Any, n_folds: int, seed: int) -> Array:
    """Return the fold of every row of a CSR matrix of labels.

    Examples
    --------
    >>> labels = sp.csr_array([[1, 0], [1, 0], [1, 1], [1, 1], [0, 0], [0, 0]])
    >>> folds = assign_folds(labels, 2, seed=0)
    >>> [int(labels[folds == fold].sum()) for fold in range(2)], np.bincount(folds).tolist()
    ([3, 3], [3, 3])
    """
    by_label = labels.tocsc()
    preferred = fold_of_rows(0, labels.shape[0], n_folds, seed)
    folds = np.full(labels.shape[0], 255, dtype=np.uint8)
    # One type of index, so that the loop is compiled once.
    row_ends, columns, label_ends, rows = (
        index.astype(np.int64, copy=False)
        for index in (labels.indptr, labels.indices, by_label.indptr, by_label.indices)
    )
    _assign(row_ends, columns, label_ends, rows, preferred, n_folds, folds)
    return folds


def _labels(block: RowBlock, source: BlockSource) -> Any:
    return source.labels(block)


@compiled
def _assign(
    indptr: Array,
    labels: Array,
    label_indptr: Array,
    rows: Array,
    preferred: Array,
    n_folds: int,
    folds: Array,
) -> None:
    n_labels = label_indptr.size - 1
    left = np.diff(label_indptr).astype(np.int64)
    taken = np.zeros((n_folds, n_labels + 1), dtype=np.int64)  # the last column counts all rows
    # Pairs of the rows left and the label as one number; one that is out of date is skipped.
    queue = [left[label] * n_labels + label for label in range(n_labels) if left[label] > 0]
    heapq.heapify(queue)
    while len(queue) > 0:
        fewest = heapq.heappop(queue)
        label = fewest % n_labels
        if left[label] == 0 or left[label] != fewest // n_labels:
            continue
        for place in range(label_indptr[label], label_indptr[label + 1]):
            row = rows[place]
            if folds[row] != 255:
                continue
            fold = _wanting(taken, label, preferred[row], n_folds)
            folds[row] = fold
            taken[fold, n_labels] += 1
            for entry in range(indptr[row], indptr[row + 1]):
                other = labels[entry]
                taken[fold, other] += 1
                left[other] -= 1
                if other != label and left[other] > 0:
                    heapq.heappush(queue, left[other] * n_labels + other)
    for row in range(folds.size):
        if folds[row] == 255:
            fold = _wanting(taken, n_labels, preferred[row], n_folds)
            folds[row] = fold
            taken[fold, n_labels] += 1


@compiled
def _wanting(taken: Array, label: int, first: int, n_folds: int) -> int:
    """Return the fold with the fewest rows of the label; of equals the emptiest; of equals the next."""
    best = first
    for step in range(1, n_folds):
        fold = (first + step) % n_folds
        if taken[fold, label] < taken[best, label] or (
            taken[fold, label] == taken[best, label] and taken[fold, -1] < taken[best, -1]
        ):
            best = fold
    return best
