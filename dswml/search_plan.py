"""What a search of a grid works on at once, so that what its tasks return finds room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import curved, label_sums
from .errors import UsageError
from .free_path import FreePath
from .label_sums import plan_directions, summed_entries
from .newton_path import NewtonPath
from .path import Path
from .plain_path import PlainPath
from .problem import Problem
from .result_sizes import ASSEMBLED_ENTRIES, MIN_BLOCK, block_limit, is_assembled, result_nbytes

__all__ = ["SearchPlan", "plan_search", "planned_path"]

Array = npt.NDArray[Any]

#: Radii of a weighting that are worked on at once, at most: fewer if their gradients, for all folds and
#: weightings, are more than this share of the memory limit.
WINDOW = 3
RESULTS_SHARE = 0.1


@dataclass(frozen=True)
class SearchPlan:
    """How the points of a grid are solved.

    Attributes
    ----------
    assemble : bool
        Whether gradients are assembled; their gaps are certified then.
    small : bool
        Whether X^T X of every fold is read along with the first of them.
    window : int
        Radii of a path that are worked on at once, at most.
    together : int
        Paths that share a read.
    path_limit : int
        Bytes of memory for one path: a fold and weighting.
    result_nbytes : int
        What a task returns at most.
    """

    assemble: bool
    small: bool
    window: int
    together: int
    path_limit: int
    result_nbytes: int


def plan_search(
    n_rows: int,
    n_features: int,
    label_counts: Array,
    *,
    folds: int,
    weightings: int,
    memory_limit: int,
    assemble: bool | None = None,
) -> SearchPlan:
    """Plan a search from the numbers of the data alone, so that it is the same on every machine.

    Gradients are assembled where they are small, or as ``assemble`` says. Elsewhere each path may ask for
    as many directions at a time as a fit with its share of the memory limit, but for MIN_BLOCK at least, with
    fewer of which gaps cannot be estimated; all paths share their reads while these find room.

    Examples
    --------
    >>> plan_search(1000, 500, np.full(100, 9), folds=5, weightings=2, memory_limit=2**31).window
    3
    >>> plan_search(1000, 10**5, np.full(10**5, 9), folds=5, weightings=2, memory_limit=2**31).assemble
    False
    """
    n_labels, n_folds = label_counts.size, max(folds, 1)
    paths = n_folds * weightings
    limit = memory_limit // paths
    if assemble is None:
        assemble = is_assembled(n_features, n_labels)
    if not assemble:
        grams = summed_entries(n_rows, n_features, label_counts, limit)
        each = result_nbytes(n_features, n_labels, limit, grams=grams, least=MIN_BLOCK, blocks=WINDOW)
        together = int(np.clip(memory_limit * RESULTS_SHARE / each, 1, paths))
        return SearchPlan(assemble, False, WINDOW, together, limit, together * each)
    gradients = paths * result_nbytes(n_features, n_labels)
    window = int(np.clip(memory_limit * RESULTS_SHARE / gradients, 1, WINDOW))
    products = n_folds * 8 * n_features * (n_features + n_labels)
    small = n_features**2 <= ASSEMBLED_ENTRIES and products <= memory_limit * RESULTS_SHARE
    # X^T X and what is made of it: a factor, eigenvectors in both precisions.
    limit -= small * n_folds * 8 * 4 * n_features**2 // paths
    return SearchPlan(assemble, small, window, paths, limit, window * gradients + small * products)


def planned_path(
    problem: Problem, radii: Sequence[float], tol: float, plan: SearchPlan, seed: Sequence[int]
) -> Path:
    """Return the path of one fold and weighting, with the statistics that there is room for."""
    counts, share = problem.label_counts, plan.path_limit
    iterates = curved.ITERATES if plan.small else label_sums.ITERATES
    cap, place = plan_directions(problem.n_rows, problem.n_features, counts, share, iterates)
    if problem.p0 == 0.5:  # no statistics of labels, so more directions
        cap, _ = plan_directions(0, problem.n_features, np.zeros_like(counts), share)
    if not plan.assemble and cap < min(2 * MIN_BLOCK, problem.n_features):
        raise UsageError(
            f"each fold and weighting has {share / 2**20:.0f} MiB of the memory limit, room for {cap} "
            f"directions, and a search needs {2 * MIN_BLOCK}: raise memory_limit (--factor-memory), or "
            "search with fewer folds or weights at a time"
        )
    problem.keep_statistics(place)
    if plan.assemble:
        kind = Path if not plan.small else PlainPath if problem.p0 == 0.5 else NewtonPath
        return kind(problem, radii, cap, plan.window, tol)
    limit = block_limit(problem.n_rows, problem.n_features, counts, place, problem.p0, share, least=MIN_BLOCK)
    return FreePath(problem, radii, cap, plan.window, tol, limit=limit, seed=seed)
