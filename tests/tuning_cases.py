"""What tests of a search have in common, whichever way its points are solved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dswml.folds import fold_of_rows
from dswml.tuning import Tuned


def assert_no_leak(
    tuned: Tuned, search: Callable[[Any, Any], Tuned], data: tuple[Any, Any], folds: int, seed: int
) -> None:
    """Search again with other labels on the rows of the first fold: only what trains on them may change."""
    X, Y = data
    held_out = fold_of_rows(0, len(X), folds, seed) == 0
    changed = Y.copy()
    changed[held_out] = np.roll(Y[held_out], 5, axis=1)
    other = search(X, changed)
    for before, after in zip(tuned.points, other.points, strict=True):
        assert before.objective[0] == after.objective[0]
        assert before.relative_gap[0] == after.relative_gap[0]
        assert before.objective[1] != after.objective[1]
