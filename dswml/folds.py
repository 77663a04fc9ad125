"""Which fold a row belongs to: a hash of its number, with no list of rows to keep or send, or as assigned."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import RowBlock

__all__ = ["Fold", "fold_of_rows"]

Array = npt.NDArray[Any]


def fold_of_rows(start: int, stop: int, n_folds: int, seed: int) -> Array:
    """Return the fold of the rows [start, stop), by SplitMix64 of the row's number and the seed.

    Examples
    --------
    >>> fold_of_rows(0, 8, n_folds=2, seed=0).tolist()
    [1, 0, 1, 0, 1, 0, 1, 0]
    """
    with np.errstate(over="ignore"):
        mixed = np.arange(start, stop, dtype=np.uint64) + np.uint64(seed) * np.uint64(0x632BE59BD9B4E019)
        mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(n_folds)).astype(np.int64)


_folds_of_block = lru_cache(maxsize=16)(fold_of_rows)  # of the blocks at hand, for all folds


@dataclass(frozen=True)
class Fold:
    """The rows outside one fold, to train on; those inside are held out.

    ``assigned``, if it is given, has the fold of every row: a byte each, small next to a read of X.
    """

    n_folds: int
    seed: int
    held_out: int
    assigned: Array | None = field(default=None, compare=False, repr=False)

    def training_rows(self, block: RowBlock) -> Array:
        """Positions in the block of the rows to train on."""
        return np.flatnonzero(self._folds(block) != self.held_out)

    def held_out_rows(self, block: RowBlock) -> Array:
        """Positions in the block of the rows that are held out."""
        return np.flatnonzero(self._folds(block) == self.held_out)

    def _folds(self, block: RowBlock) -> Array:
        if self.assigned is not None:
            return self.assigned[block.start : block.stop]
        return _folds_of_block(block.start, block.stop, self.n_folds, self.seed)
