"""Cross-validation over folds, radii and weights for the reads of about one fit.

Each fold and weighting has one basis, grown from the fold's training rows only, that follows the radii
from the smallest on; its statistics serve all of them. A read of X serves all folds, all weightings and
several radii of each: it yields the gradient of every point, hence its certified gap and the directions
it lacks. A second read takes up the new directions of all bases. A last one scores the held-out rows.
Where gradients are too large to be assembled, the first of these reads yields products with them (see
`dswml.free_path`), and gaps are estimates.
Where X^T X is small it comes with the first read: uniform weights need no other (see
`dswml.least_squares`), the gaps of all others are those of `dswml.duality`, and their steps those of
`dswml.newton`, few of which reach them.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import RowBlock
from .cache import check_room, forget_run, task_nbytes
from .checkpoints import Checkpoints, Journal, begin, data_request, saving
from .errors import UsageError
from .executor import Executor, one_blas_thread
from .features import BlockSource
from .folds import Fold
from .grid_scores import HeldOut, Scoring, plan_scoring, score_grid
from .newton import Curvature
from .newton_path import NewtonPath
from .path import Path
from .plain_path import PlainPath
from .problem import Problem
from .search_plan import RESULTS_SHARE, SearchPlan, plan_search, planned_path
from .search_table import GridPoint, Tuned
from .solver_state import restore_search, search_state
from .stored import Dataset
from .stratify import stratified_folds
from .sweep import Partial, Sweep, combine, sweep_block_together
from .threads import Threads
from .training import data_facts
from .weights import resolve_p0

__all__ = ["GridPoint", "Tuned", "tune"]

Array = npt.NDArray[Any]

#: Outer iterations after which the points that are left stay as they are.
MAX_ITERATIONS = 60


def tune(
    data: Dataset,
    executor: Executor,
    *,
    radii: Sequence[float],
    weights: Sequence[str | float] = ("sparsity",),
    folds: int = 5,
    seed: int = 0,
    stratify: bool = False,
    score: str = "micro_f1",
    threshold: float | str = 0.5,
    tol: float = 1e-3,
    k: int = 5,
    fit_intercept: float = 0.0,
    normalize: str | None = None,
    dtype: str = "auto",
    cache: str = "auto",
    memory_limit: int = 2**31,
    on_iteration: Callable[[int, int, int, int], Any] | None = None,
    checkpoint: Checkpoints | None = None,
    time_limit: float | None = None,
    stop: Callable[[], bool] | None = None,
    announce: Callable[[str], None] | None = None,
    assemble: bool | None = None,
) -> Tuned:
    """Solve every point of radii x weights on every fold, and score the held-out rows.

    Parameters
    ----------
    data : Dataset
    executor : Executor
        Where the reads run.
    radii, weights : sequence
        The grid; weights as in `dswml.SparseWeightedClassifier`.
    folds : int
        Number of folds; 0 solves the grid on all rows and scores nothing.
    seed : int
        Shuffles the folds.
    stratify : bool
        Give every fold about the same share of every label, from one more read of Y; see `dswml.stratify`.
    score : str
        The metric that chooses, one of `dswml.grid_scores.SCORES` or P, R, nDCG, PSP or PSnDCG at some k,
        "P@1"; losses are minimised. Propensities are those of the training rows of each fold.
    threshold : float or {"tuned", "per-label", "rcut"}
        At which labels are predicted for the scores; or tune one threshold for all labels, one for each
        (for micro-F1 and macro-F1 only), or the number of labels of a row, for the score or, where that does
        not depend on it, for micro-F1. A fold is scored with what is best on the others.
    tol : float
        Relative gap of every point, certified where gradients are assembled.
    k : int
        Largest k of P@k and its kin, if the score has no larger one.
    memory_limit : int
        For factors and statistics, and a tenth for what tasks return. Points whose held-out counts are more
        than that are scored in several reads, and where labels are so many that one point's are, fewer
        thresholds are tried.
    on_iteration : callable, optional
        Called with the iteration, the passes so far, the points solved and their number.
    checkpoint, stop, announce
        As in `dswml.training.train`.
    time_limit : float, optional
        Seconds after which to write a checkpoint and stop, with a `StoppedEarlyError`.
    assemble : bool, optional
        Whether to assemble gradients; by default where they are small. Gaps are estimates elsewhere.

    Returns
    -------
    Tuned
    """
    if time_limit is not None and checkpoint is None:
        raise UsageError(
            f"a search that stops after {time_limit:g} s needs a checkpoint to go on from: say where with "
            "--checkpoint DIR (checkpoint=...)"
        )
    if not isinstance(folds, int | np.integer) or folds == 1 or folds < 0:
        raise UsageError(f"folds must be 0 or a whole number of at least 2; got {folds!r}")
    if not len(radii) or not all(0 < radius < np.inf for radius in radii):
        raise UsageError(f"radii must be positive, finite numbers, at least one; got {list(radii)!r}")
    if not len(weights):
        raise UsageError("weights must have at least one entry, such as 'sparsity'; got none")
    scoring = None
    if folds:
        scoring = plan_scoring(
            data,
            folds,
            len(radii) * len(weights),
            score=score,
            threshold=threshold,
            k=k,
            room=memory_limit * RESULTS_SHARE,
        )
    weightings = [(weight, resolve_p0(weight, data.k_hat, data.n_labels)) for weight in weights]
    data.check(executor)
    features = data.n_features + bool(fit_intercept)
    plan = plan_search(
        data.n_rows,
        features,
        np.asarray(data.label_counts),
        folds=folds,
        weightings=len(weights),
        memory_limit=memory_limit,
        assemble=assemble,
    )
    results = max(plan.result_nbytes, 0 if scoring is None else scoring.nbytes)
    check_room(data.block_nbytes, executor, results)
    if folds and score == "weighted_hamming_loss" and len({p0 for _, p0 in weightings}) > 1:
        raise UsageError(
            f"the weighted Hamming loss is weighted by p0, so that points of the weights {list(weights)!r} "
            "cannot be compared by it: search one weighting, or choose by 'hamming_loss'"
        )
    grid = [(radius, weight, p0) for weight, p0 in weightings for radius in radii]
    if dtype == "auto":
        dtype = "float64" if data.is_sparse else str(data.x_dtype)
    source = BlockSource(
        data,
        uuid.uuid4().hex,
        dtype,
        None if data.normalize == normalize else normalize,
        float(fit_intercept),
        cache,
        reserve=task_nbytes(0, results),
    )
    request = {
        "verb": "tune",
        **data_request(data),
        "radii": [float(radius) for radius in radii],
        "weights": list(weights),
        "folds": folds,
        "seed": seed,
        "stratify": stratify,
        "tol": tol,
        "fit_intercept": float(fit_intercept),
        "normalize": normalize,
        "dtype": dtype,
        "memory_limit": memory_limit,
        "assemble": plan.assemble,
    }
    journal = begin(
        checkpoint,
        request,
        n_rows=data.n_rows,
        limit=memory_limit,
        stop=stop,
        time_limit=time_limit,
        announce=announce,
        about={"info": data_facts(data), "p0": [p0 for _, p0 in weightings]},
    )
    count = max(min(executor.n_slots, len(os.sched_getaffinity(0))), 1)
    try:
        with one_blas_thread(), saving(journal), Threads(count) as threads:
            assigned = stratified_folds(source, executor, folds, seed) if stratify and folds else None
            parts = [Fold(folds, seed, fold, assigned) for fold in range(folds)]
            search = Search(executor, source, data.k_hat, radii, weights, parts, tol, plan, seed, threads)
            search.journal = journal
            iterations = search.solve(on_iteration)
            threads.finish()
            if journal is not None:
                journal.save()
            points = search.evaluated(grid, scoring)
    finally:
        executor.everywhere(forget_run, source.run)
    return Tuned(tuple(points), score, threshold, search.passes, iterations)


class Search:
    """All paths of a grid: one for every fold and weighting, with the reads of X that they share."""

    journal: Journal | None = None

    def __init__(
        self,
        executor: Executor,
        source: BlockSource,
        k_hat: int,
        radii: Sequence[float],
        weights: Sequence[str | float],
        folds: Sequence[Fold],
        tol: float,
        plan: SearchPlan,
        seed: int,
        threads: Threads,
    ) -> None:
        self.executor, self.source, self.plan, self.threads = executor, source, plan, threads
        self.rows_read = 0
        data = source.data
        self.folds: list[Fold | None] = [*folds] or [None]
        sources = [replace(source, fold=fold) for fold in self.folds]
        counted = executor.reduce(_count_labels, combine, data.blocks, (tuple(sources), k_hat))
        #: Of the folds, where X^T X is small.
        self.curvatures: list[Curvature | None] = [None for _ in self.folds]
        self.paths: list[Path] = []
        for number, each in enumerate(sources):
            label_counts, n_rows = counted[f"{number}:labels"], int(counted[f"{number}:rows_there"])
            if each.fold is not None and not 0 < n_rows < data.n_rows:
                raise UsageError(
                    f"fold {number} of {each.fold.n_folds} has {data.n_rows - n_rows} of the {data.n_rows} "
                    "rows, which leaves none to train on or none to score: use fewer folds"
                )
            own = int(np.flatnonzero(counted[f"{number}:rows_of_size"])[-1])
            for place, weight in enumerate(weights):
                p0 = resolve_p0(weight, own, data.n_labels, warn=False)
                problem = Problem(
                    executor, replace(each, basis=str(place)), label_counts, radius=1.0, p0=p0, n_rows=n_rows
                )
                self.paths.append(planned_path(problem, radii, tol, plan, (seed, len(self.paths))))

    @property
    def passes(self) -> int:
        """Reads of all of X so far, counted in rows by whoever read them."""
        return -(-self.rows_read // self.source.data.n_rows)

    def solve(self, on_iteration: Callable[[int, int, int, int], Any] | None) -> int:
        total = sum(len(path.points) for path in self.paths)
        begun = None if self.journal is None else self.journal.restored
        first = 0 if begun is None else restore_search(self, begun)
        for iteration in range(first, MAX_ITERATIONS):
            if self.journal is not None:
                state = begun if iteration == first and begun else search_state(self, iteration)
                self.journal.between(state, over=False)
            if iteration or not self.plan.assemble:
                self.look(iteration)
            else:
                self.begin()
            left = sum(len(path.unsolved) for path in self.paths)
            if on_iteration is not None:
                on_iteration(iteration, self.passes, total - left, total)
            grown = self.unsolved
            if not grown:
                # The folder is to tell of the whole search, unless it did so before or that was but one look,
                # which is made again when the search is resumed.
                if self.journal is not None and iteration and not (iteration == first and begun):
                    self.journal.between(search_state(self, iteration), over=True)
                return iteration
            self.read(grown, [path.problem.request(None) for path in grown])
            self.threads.map(lambda path: path.correct(), grown)
        left = sum(len(path.unsolved) for path in self.unsolved)
        warnings.warn(
            f"{left} of {total} points are not solved to the tolerance after {MAX_ITERATIONS} iterations: "
            "the table has their objectives and gaps at the last look; raise the tolerance or memory limit, "
            "scale the features (normalize='l2'), or compute in float64",
            stacklevel=3,
        )
        return MAX_ITERATIONS

    @property
    def unsolved(self) -> list[Path]:
        """The paths that go on reading X."""
        return [path for path in self.paths if path.unsolved and not isinstance(path, PlainPath)]

    @property
    def by_fold(self) -> list[list[Path]]:
        """The paths of every fold."""
        each = len(self.paths) // len(self.folds)
        return [self.paths[first : first + each] for first in range(0, len(self.paths), each)]

    def begin(self) -> None:
        """One read: Y^T X of every fold, which is the gradient at 0, and X^T X where that is small."""
        firsts = [paths[0] for paths in self.by_fold]
        requests = [path.problem.request(None, square=self.plan.small, cross=True) for path in firsts]
        sums = self.read(firsts, requests)
        self.threads.map(self.begin_fold, range(len(sums)), sums)
        if self.journal is not None:  # whose states have these paths solved
            self.threads.finish()

    def begin_fold(self, number: int, sums: Partial) -> None:
        """Look at W = 0 on all paths of a fold."""
        paths, spectrum = self.by_fold[number], None
        if any(isinstance(path, NewtonPath) for path in paths):
            problem = paths[0].problem
            curvature, spectrum = Curvature.of(sums["square"], problem.n_rows, problem.source.dtype)
            self.give_curvature(number, curvature)
        plain = [path for path in paths if isinstance(path, PlainPath)]
        for path in plain:  # which read no more, and can be solved meanwhile
            path.take(sums["square"], sums["cross"], spectrum)
            self.threads.put_off(path.solve_next)
        for other in paths:
            if other not in plain:
                other.begin(sums["cross"])

    def give_curvature(self, number: int, curvature: Curvature) -> None:
        """Let the paths of a fold know its curvature."""
        self.curvatures[number] = curvature
        for path in self.by_fold[number]:
            if isinstance(path, NewtonPath):
                path.curvature, path.problem.square = curvature, curvature.square

    def look(self, iteration: int) -> None:
        """One read: the gradient at every open point, or its product with a block."""
        paths = self.unsolved
        results = self.read(paths, self.threads.map(lambda path: path.request(iteration), paths))
        self.threads.map(lambda path, own: path.look(own), paths, results)

    def read(self, paths: list[Path], requests: list[Sweep]) -> list[Partial]:
        """Read X once, or once for so many paths as find room together."""
        step = self.plan.together
        return [
            sums
            for first in range(0, len(paths), step)
            for sums in self.read_together(paths[first : first + step], requests[first : first + step])
        ]

    def read_together(self, paths: list[Path], requests: list[Sweep]) -> list[Partial]:
        pieces = [piece for path in paths for piece in path.problem.pieces]

        def made() -> Partial:
            return self.executor.reduce(
                sweep_block_together, combine, self.source.data.blocks, tuple(requests), pieces
            )

        if self.journal is not None:
            sums = self.journal.through(requests, pieces, made)
        else:  # with the workers busy elsewhere, this process has time
            sums = self.threads.beside(made) if self.executor.n_processes > 1 else made()
        self.rows_read += int(sums["rows_read"])
        results: list[Partial] = [{} for _ in paths]
        for name, value in sums.items():
            number, colon, own_name = name.partition(":")
            if colon:
                results[int(number)][own_name] = value
        self.threads.map(lambda path, own: path.problem.absorb(own), paths, results)
        return results

    def evaluated(
        self, grid: list[tuple[float, str | float, float]], scoring: Scoring | None
    ) -> list[GridPoint]:
        """Score the held-out rows of every fold with all its points, if there are folds."""
        for path in self.paths:
            for point in path.unsolved:
                point.settle(path.problem.basis)
        every = [point for path in self.paths for point in path.points]
        per_fold = [every[start : start + len(grid)] for start in range(0, len(every), len(grid))]
        held_out: list[HeldOut | None] = [None for _ in grid]
        if scoring is not None:
            problems = [paths[0].problem for paths in self.by_fold]
            held_out[:], rows_read = score_grid(
                self.executor,
                self.source,
                [fold for fold in self.folds if fold is not None],
                [[(point.u, point.mt) for point in points] for points in per_fold],
                [p0 for _, _, p0 in grid],
                [(problem.label_counts, problem.n_rows) for problem in problems],
                scoring,
            )
            self.rows_read += rows_read
        return [
            GridPoint(
                radius,
                weight,
                p0,
                np.array([points[at].objective for points in per_fold]),
                np.array([points[at].relative_gap for points in per_fold]),
                np.array([points[at].mt.shape[1] for points in per_fold]),
                {} if (own := held_out[at]) is None else own.scores,
                None if own is None else own.rule,
                None if own is None else own.curve,
                self.plan.assemble,
            )
            for at, (radius, weight, p0) in enumerate(grid)
        ]


def _count_labels(block: RowBlock, asked: tuple[tuple[BlockSource, ...], int]) -> Partial:
    """Positives of each label, rows to train on, and rows by their number of labels, of every fold."""
    sources, k_hat = asked
    out: Partial = {}
    for number, source in enumerate(sources):
        labels = source.labels(block)
        out[f"{number}:labels"] = np.bincount(labels.indices, minlength=labels.shape[1])
        out[f"{number}:rows_there"] = np.array(labels.shape[0])
        sizes = np.diff(labels.indptr)
        out[f"{number}:rows_of_size"] = np.bincount(sizes, minlength=k_hat + 1)
    return out
