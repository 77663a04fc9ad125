"""How large gradients, blocks of directions and what tasks return may be; nothing here reads the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BlockLimit", "block_limit", "fitting", "has_square", "is_assembled", "result_nbytes"]

Array = npt.NDArray[Any]

#: Largest gradient (D x L entries) that is assembled and, through its smaller side, decomposed.
ASSEMBLED_ENTRIES = 4_000_000
#: Most features of dense rows for which X^T X is worth its time; for sparse ones it must only be small.
DENSE_SQUARE = 256
#: Directions added per corrective iteration unless asked otherwise: at least and at most.
MIN_BLOCK, MAX_BLOCK = 20, 80
#: Share of the memory limit that the result of a task may take, and the Gram matrices of labels in it; a node
#: of the tree of sums holds nine.
RESULTS_SHARE, GRAMS_SHARE = 1 / 64, 1 / 128


def is_assembled(n_features: int, n_labels: int) -> bool:
    """Tell whether a gradient of this shape is small enough to be assembled.

    Examples
    --------
    >>> is_assembled(1836, 159), is_assembled(50_000, 50_000)
    (True, False)
    """
    return n_features * n_labels <= ASSEMBLED_ENTRIES


def has_square(n_features: int, n_labels: int, sparse: bool) -> bool:
    """Tell whether X^T X, from which the gap follows more tightly, is read along with the first gradient.

    Examples
    --------
    >>> has_square(1836, 159, sparse=True), has_square(1836, 159, sparse=False)
    (True, False)
    """
    small = n_features**2 <= ASSEMBLED_ENTRIES if sparse else n_features <= DENSE_SQUARE
    return small and is_assembled(n_features, n_labels)


def result_nbytes(
    n_features: int,
    n_labels: int,
    memory_limit: int = 2**31,
    *,
    square: bool = False,
    grams: int = 0,
    least: int = 2,
    blocks: int = 1,
) -> int:
    """Bytes of what a task returns at most: gradient and X^T X, or what a block of directions asks for.

    ``grams`` are the entries that a direction has in the Gram matrices that workers sum. ``blocks`` have
    ``least`` directions whatever the limit.

    Examples
    --------
    >>> result_nbytes(1000, 100), result_nbytes(50_000, 50_000) <= RESULTS_SHARE * 2**31
    (1504000, True)
    """
    width, entries = blocks * min(MAX_BLOCK, n_features, n_labels), n_features + n_labels
    summed = min(8 * width * grams, max(GRAMS_SHARE * memory_limit, 8 * least * grams))
    if is_assembled(n_features, n_labels):
        return int(8 * (n_features * (n_labels + square * n_features) + width * entries) + summed)
    return int(min(8 * width * entries, max(RESULTS_SHARE * memory_limit, 8 * least * entries)) + summed)


def fitting(entries: int, memory_limit: int, least: int = 2) -> int:
    """Return how many columns of so many entries a result may have."""
    return max(int(RESULTS_SHARE * memory_limit / (8 * entries)), least)


@dataclass(frozen=True)
class BlockLimit:
    """How many directions may join a basis at once, so that what tasks return of them has room.

    Attributes
    ----------
    columns : int
        Most directions where workers sum no Gram matrices.
    grams : int
        Labels whose Gram matrices they sum.
    memory_limit : int
    least : int
        What a block has whatever the limit.
    """

    columns: int
    grams: int
    memory_limit: int
    least: int

    def at(self, rank: int) -> int:
        """Return the most for a basis of so many directions, which each label's sums have a row for."""
        if not self.grams:
            return self.columns
        per_column = 8 * self.grams * (rank + MIN_BLOCK)
        return min(self.columns, max(int(GRAMS_SHARE * self.memory_limit / per_column), self.least))


def block_limit(
    n_rows: int,
    n_features: int,
    label_counts: Array,
    place: Array,
    p0: float,
    memory_limit: int,
    least: int = 2,
) -> BlockLimit:
    """Return the limit of blocks whose statistics are summed where ``place`` says.

    New directions come with X^T Z', sums over rows of labels and, once in all, light rows of Z'.

    Examples
    --------
    >>> block_limit(1000, 50_000, np.full(50_000, 10), np.arange(50_000), 0.5, 2**31).at(100)
    41
    """
    light_rows = min(n_rows, int(label_counts[place < 0].sum()))
    summed = int(np.count_nonzero(place >= 0)) if p0 != 0.5 else place.size
    columns = fitting(n_features + summed + light_rows // 4, memory_limit, least)
    return BlockLimit(columns, summed if p0 != 0.5 else 0, memory_limit, least)
