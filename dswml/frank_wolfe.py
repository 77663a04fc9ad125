"""Frank-Wolfe over the nuclear-norm ball: the paper's Algorithm 1 and its faster relatives.

    W_0 = 0
    repeat
        (u, s, v) = top singular triple of -grad F(W_k)                   the linear oracle
        stop when <W_k, grad F(W_k)> + radius * s <= tol * F(W_k)         Eq. 37, relative
        W_{k+1} = step towards radius * u v^T                             the step rule

The step rules are "open-loop" (2 / (k + 2), the paper's), "line-search" (the best step length)
and "corrective" (the best matrix with its columns in the span of all directions found so far).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import oracle
from .certificate import singular_value_bound
from .corrective import solve
from .duality import GapBound, Residual
from .errors import ClusterError, UsageError
from .executor import HomesLostError
from .label_sums import plan_directions
from .least_squares import LeastSquares
from .oracle import Answer
from .problem import Problem
from .result_sizes import MAX_BLOCK, MIN_BLOCK, block_limit, fitting, has_square, is_assembled
from .shards import shards_nbytes
from .small_problem import Quadratic
from .solution import Certificate, Options, Record, Solution
from .solver_state import restore_run, run_state

__all__ = [
    "Certificate",
    "Options",
    "Record",
    "Solution",
    "frank_wolfe",
]

Array = npt.NDArray[Any]
T = TypeVar("T")

#: The workers hold the label side of the small problem when it is this share of the memory limit.
SHARDED_SHARE = 0.5
#: Share of the workers' memory for tasks that shards may take.
WORKERS_SHARE = 2 / 3
#: Times that an iteration may lose shards of the labels.
SMALL_ATTEMPTS = 5
#: The small problem is solved to this share of the current gap, by Eq. 37 or with the curvature.
INNER_SHARE, TIGHT_SHARE = 0.1, 0.02
#: From this share of the last gap on, an iteration has not brought much.
STALLED = 0.9
#: The gap is relative to F(W), or to this share of F(0) where F(W) is smaller still.
OBJECTIVE_FLOOR = 1e-3
#: Rounds of the matrix-free oracle, when a step rule wants the top pair itself.
MAX_ROUNDS = 200
#: Times that the grid of step lengths is refined for the exponential loss; each may be a read.
REFINEMENTS = 3


def frank_wolfe(
    problem: Problem, options: Options, callbacks: Sequence[Callable[[Record], Any]] = ()
) -> Solution:
    """Run until the certified relative gap is at most ``options.tol``, or a limit is met.

    A callback sees the `Record` of every iteration; one that returns True ends the run.
    """
    with ThreadPoolExecutor(max(problem.executor.n_slots, 1), thread_name_prefix="dswml-label") as pool:
        return Run(problem, options, callbacks, pool).run()


class Run:
    def __init__(
        self,
        problem: Problem,
        options: Options,
        callbacks: Sequence[Callable[[Record], Any]],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.problem, self.options, self.callbacks, self.pool = problem, options, callbacks, pool
        self.started = time.monotonic() - (problem.journal.seconds_before if problem.journal else 0)
        self.most = max(MAX_BLOCK, options.block_size or 0)
        self.mt = np.zeros((problem.n_labels, 0))
        self.iteration = 0
        self.curvature = 1e-6
        self.last_right = np.zeros((problem.n_labels, 0))
        self.history: list[Record] = []
        self.certificate: Certificate | None = None
        self.certify_below = options.tol
        self.floor = self.estimate = 0.0
        small = is_assembled(problem.n_features, problem.n_labels)
        self.assemble = small if options.assemble is None else options.assemble
        self.truncated = False
        sparse = problem.source.data.is_sparse
        self.tight = (
            options.curvature
            and self.assemble
            and options.step == "corrective"
            and problem.loss == "square"
            and has_square(problem.n_features, problem.n_labels, sparse)
        )
        self.bound: GapBound | None = None
        # What the last small problem has left of its gradient, and that as a part of the whole one.
        self.left_over: Array | None = None
        self.residual: Residual | None = None
        self.known_gap = math.inf
        if options.step == "corrective":
            self.cap, place = plan_directions(
                problem.n_rows, problem.n_features, problem.label_counts, options.memory_limit
            )
            problem.keep_statistics(place, self.shards(place))
            summed_for = problem.p0
        else:  # no statistics, so more directions
            no_positives = np.zeros_like(problem.label_counts)
            self.cap, _ = plan_directions(0, problem.n_features, no_positives, options.memory_limit)
            place, summed_for = np.arange(problem.n_labels), 0.5
        # Uniform weights where X^T X is known need no directions, unless there are to be so many at a time.
        self.at_once = (
            self.tight and problem.p0 == 0.5 and options.block_size is None and self.cap >= problem.n_features
        )
        self.limit = block_limit(
            problem.n_rows,
            problem.n_features,
            problem.label_counts,
            place,
            summed_for,
            options.memory_limit,
        )
        if self.assemble:
            self.limit = replace(self.limit, columns=problem.n_features)
        # What the oracle reads at least, and what the step and the next oracle read together.
        oracle_reads = 1 if self.assemble else 2
        step_reads = {"open-loop": 0, "corrective": int(self.assemble), "line-search": 1}[options.step]
        if options.step == "line-search" and problem.loss == "exponential":
            step_reads = REFINEMENTS
        self.passes_ahead = step_reads + oracle_reads
        if self.passes_left() < oracle_reads:
            raise UsageError(
                f"max_passes={options.max_passes}, but with {problem.n_features} features and "
                f"{problem.n_labels} labels the first look at the gap takes {oracle_reads} passes"
            )

    def run(self) -> Solution:
        journal = self.problem.journal
        state = None if journal is None else journal.restored
        stopped = False
        while True:
            if state is None:
                answer = self.linear_oracle()
                gap, certified = self.gap(answer)
                record = self.record(answer, gap, certified)
                self.history.append(record)
                wishes = [callback(record) for callback in self.callbacks]
                stopped = any(wish is True for wish in wishes)
            else:
                answer = restore_run(self, state)
                record = self.history[-1]
            status = self.status(record, stopped)
            if journal is not None:
                journal.between(state or run_state(self, answer, self.most), over=status is not None)
                state = None
            if status is not None:
                return self.solution(record, status)
            self.mt = self.step(answer, record.gap)
            self.iteration += 1

    def record(self, answer: Answer, gap: float, certified: bool) -> Record:
        if not self.history:
            self.floor = OBJECTIVE_FLOOR * answer.objective
        return Record(
            self.iteration,
            self.problem.passes,
            answer.objective,
            gap,
            gap / self.scale(answer),
            certified,
            _rank(self.mt),
            self.problem.rank,
            time.monotonic() - self.started,
        )

    def scale(self, answer: Answer) -> float:
        """What the gap is relative to: F(W), or a share of F(0) where the data can be interpolated."""
        return max(answer.objective, self.floor, np.finfo(float).tiny)

    def status(self, record: Record, stopped: bool) -> str | None:
        options = self.options
        if record.certified and record.relative_gap <= options.tol:
            return "OPTIMAL"
        if stopped:
            return "INTERRUPTED"
        if record.iteration >= options.max_iter:
            return "MAXITER"
        if self.problem.known is None and self.passes_left() < self.passes_ahead:
            return "MAXPASSES"
        limit = options.time_limit if self.problem.journal is None else None  # which stops by itself
        if limit is not None and record.seconds >= limit:
            return "TIMEOUT"
        return None

    def passes_left(self) -> float:
        limit = self.options.max_passes
        return math.inf if limit is None else limit - self.problem.passes

    # The linear oracle

    def linear_oracle(self) -> Answer:
        if self.assemble:
            leading = None if self.options.step == "corrective" else 1
            asks = self.tight and self.bound is None and self.problem.known is None
            problem, left_over, known = self.problem, self.left_over, None
            self.residual = None
            overlap = 0.0
            if self.bound is not None and left_over is not None:
                known, self.residual = self.bound.without(left_over, problem.basis, problem.moment)
                overlap = float(np.vdot(self.mt, left_over))
            answer, square = oracle.assembled(problem, self.mt, leading, self.most, square=asks, known=known)
            answer = replace(answer, slope=answer.slope - overlap)
            if square is not None and not self.at_once:
                self.bound = GapBound(square, self.problem.n_rows, self.problem.source.dtype)
            return answer
        width = self.options.block_size or min(MIN_BLOCK + _rank(self.mt), MAX_BLOCK)
        width = min(max(width, 2), self.widest())
        rng = np.random.default_rng([self.options.seed, self.iteration])
        start = oracle.warm_start(self.mt, self.last_right, width, rng)
        if self.options.step == "corrective":
            answer = self.one_round(start)
        else:
            rounds = int(min(MAX_ROUNDS, self.passes_left() // 2))
            answer = oracle.krylov(self.problem, self.mt, start, rounds)
        self.last_right = answer.right[:, :width]
        return answer

    def one_round(self, start: Array) -> Answer:
        """One round of power iteration whose left vectors join the basis: two reads.

        ``U^T grad F`` is known from the small problem, so the answer is the best that the whole
        basis contains, new directions included.
        """
        problem = self.problem
        self.make_room(start.shape[1])
        sums = problem.sweep(self.mt, right=start)
        value_and_slope = problem.value_and_slope(self.mt, sums)
        problem.append(problem.gradient_times(self.mt, start, sums["right"]))
        fresh = problem.basis[:, self.mt.shape[1] :]
        if fresh.shape[1]:
            problem.sweep(None)
            self.mt = np.pad(self.mt, ((0, 0), (0, fresh.shape[1])))
        if not problem.rank:
            return oracle.nothing_found(problem, start, *value_and_slope)
        coordinates, values, right = self.small(
            lambda small: oracle.leading_on_basis(small, self.mt, start.shape[1])
        )
        return Answer(problem.basis @ coordinates, values, right, *value_and_slope, exact=False)

    def gap(self, answer: Answer) -> tuple[float, bool]:
        """The gap, and whether it is certified; the costly certificate waits until it can succeed."""
        self.estimate = estimate = answer.gap(self.problem.radius)
        known_gap, self.known_gap = self.known_gap, math.inf
        if self.bound is not None:
            self.estimate = gap = min(self.tight_gap(self.bound, answer), known_gap)
            self.certificate = Certificate("curvature", gap, 1.0)
            return gap, True
        if answer.exact:
            gap = min(estimate, known_gap)
            self.certificate = Certificate("assembled" if gap == estimate else "curvature", gap, 1.0)
            return gap, True
        self.certificate = None
        if estimate > self.certify_below * self.scale(answer):
            return estimate, False
        problem, mt = self.problem, self.mt
        step = fitting(max(problem.n_features, problem.n_labels), self.options.memory_limit)

        def parts(block: Array) -> Iterator[Array]:
            for start in range(0, block.shape[1], step):
                yield np.ascontiguousarray(block[:, start : start + step])

        def times(block: Array) -> Array:
            return np.hstack(
                [
                    problem.gradient_times(mt, right, problem.sweep(mt, right=right)["right"])
                    for right in parts(block)
                ]
            )

        def transpose_times(block: Array) -> Array:
            return np.hstack(
                [
                    problem.gradient_transpose_times(mt, left, problem.sweep(mt, left=left)["left"])
                    for left in parts(block)
                ]
            )

        rng = np.random.default_rng([self.options.seed, self.iteration, 1])
        range_of_w = oracle.leading_vectors(mt)
        block = np.hstack([answer.right[:, : range_of_w.shape[1] + MIN_BLOCK], range_of_w])
        bound = singular_value_bound(times, transpose_times, block, rng, self.passes_left())
        if bound is None:
            return estimate, False
        gap = max(answer.slope + problem.radius * bound.sigma, 0.0)
        self.last_right = bound.block
        self.certificate = Certificate("lanczos", gap, bound.confidence)
        if gap > self.options.tol * self.scale(answer):
            self.certify_below = estimate / self.scale(answer) / 2  # not again until it has halved
        return gap, True

    def tight_gap(self, bound: GapBound, answer: Answer) -> float:
        problem = self.problem
        factors = problem.basis[:, : self.mt.shape[1]], self.mt
        triples = answer.left, answer.values, answer.right
        near = bound.near(factors, triples, self.residual)
        return bound.gap(near, answer.slope, problem.radius, problem.p0)[0]

    # The step rules

    def step(self, answer: Answer, gap: float) -> Array:
        if self.options.step == "corrective":
            return self.corrective(answer, gap)
        problem, radius = self.problem, self.problem.radius
        self.make_room(1)
        atom_left, atom_right = -answer.left[:, 0], answer.right[:, 0]
        problem.append(atom_left[:, None])
        mt = np.pad(self.mt, ((0, 0), (0, problem.rank - self.mt.shape[1])))
        vertex = radius * np.outer(atom_right, problem.basis.T @ atom_left)
        if self.options.step == "open-loop":
            length = 2 / (self.iteration + 2)
        else:
            length = self.line_search(mt, vertex - mt, answer)
        return (1 - length) * mt + length * vertex

    def line_search(self, mt: Array, direction: Array, answer: Answer) -> float:
        problem = self.problem
        if problem.loss == "square":
            sums = problem.sweep(mt, direction=direction)
            power = problem.p0 * float(np.vdot(direction @ problem.gram(mt.shape[1]), direction))
            curvature = (power + (1 - 2 * problem.p0) * float(sums["curvature"])) / problem.n_rows
            slope = answer.slope + problem.radius * float(answer.values[0])
            return float(np.clip(slope / (2 * curvature), 0, 1)) if curvature > 0 else 1.0
        low, high = 0.0, 1.0
        for _ in range(REFINEMENTS):  # F is convex along the segment: the best of a grid brackets the minimum
            alphas = np.linspace(low, high, 17)
            curve = problem.sweep(mt, direction=direction, alphas=tuple(alphas))["curve"]
            best = int(np.argmin(curve))
            low, high = alphas[max(best - 1, 0)], alphas[min(best + 1, 16)]
        return float(alphas[best])

    def corrective(self, answer: Answer, gap: float) -> Array:
        problem = self.problem
        if self.at_once and problem.known is not None:
            return self.all_directions(*problem.known)
        if self.assemble:
            multiplier = -answer.slope / problem.radius
            violating = int(np.count_nonzero(answer.values > multiplier))
            width = min(max(violating if self.iteration else 0, MIN_BLOCK), MAX_BLOCK)
            width = min(self.options.block_size or width, answer.left.shape[1], self.widest())
            self.make_room(width)
            if problem.append(-answer.left[:, :width]):
                problem.sweep(None)
                self.mt = np.pad(self.mt, ((0, 0), (0, problem.rank - self.mt.shape[1])))
        share = INNER_SHARE if self.bound is None else TIGHT_SHARE
        if len(self.history) > 1 and gap > STALLED * self.history[-2].gap:
            share *= TIGHT_SHARE  # what held the gap up may be the small problem
        tol = max(share * gap, 1e-14 * self.scale(answer))
        corrected = self.small(
            lambda small: solve(
                small, self.mt, problem.radius, tol, curvature=self.curvature, tight=self.bound is not None
            )
        )
        self.curvature, self.left_over = corrected.curvature, corrected.residual
        return corrected.mt

    def all_directions(self, square: Array, gradient: Array) -> Array:
        """The solution over all directions where the data are known, and its gap."""
        problem, options = self.problem, self.options
        positives, dtype = int(problem.label_counts.sum()), problem.source.dtype
        plain = LeastSquares(square, -2 * gradient, problem.n_rows, positives, dtype)
        if problem.radius >= plain.free_norm and not problem.whole:
            problem.append_all()
            return plain.free_solution()  # the next look finds its gap, which is small but for huge radii
        tol = max(options.tol, 1e-14)
        objective, self.known_gap = plain.solve(problem.radius, tol, self.floor)
        if self.known_gap > tol * max(objective, self.floor):  # not again, but direction by direction
            self.at_once = False
            self.bound = GapBound(square, problem.n_rows, dtype)
        problem.append_all()
        return plain.solution()

    def shards(self, place: Array) -> int:
        """Bytes of the label side if the workers are to hold it, else 0.

        They are if its share of the memory is SHARDED_SHARE, labels are summed nowhere else, and there are
        several processes with room for it. The number of directions, and so the bits, is the same.
        """
        problem, options, executor = self.problem, self.options, self.problem.executor
        nbytes = shards_nbytes(problem.label_counts, self.cap)
        possible = problem.p0 != 0.5 and place.max(initial=-1) < 0 and problem.n_labels > self.cap
        if options.shard_labels is not None:
            if options.shard_labels and not possible:
                raise UsageError(
                    "labels can be sharded only where they are more than directions, p0 is not 1/2, and the "
                    "scores of all rows fit into memory_limit: raise it, or leave shard_labels out"
                )
            return nbytes if options.shard_labels else 0
        large = 8 * 8 * self.cap * problem.n_labels >= SHARDED_SHARE * options.memory_limit
        if not (possible and large and not self.assemble and executor.n_processes > 1):
            return 0
        room = WORKERS_SHARE * executor.memory_per_slot() * executor.n_slots
        return nbytes if nbytes <= room else 0

    def small(self, call: Callable[[Quadratic], T]) -> T:
        """Work on the small problem; from its beginning again when workers that held some of it are lost."""
        for _ in range(SMALL_ATTEMPTS):
            try:
                return call(self.problem.small_problem(self.pool))
            except HomesLostError as error:
                warnings.warn(f"the small problem is begun again: {error or 'a shard is lost'}", stacklevel=2)
        raise ClusterError(
            f"workers that held shards of the labels were lost {SMALL_ATTEMPTS} times in one iteration: look "
            "for workers that run out of memory"
        )

    def widest(self) -> int:
        """Most directions to add at once, so that those of W find room beside them."""
        most = self.limit.at(self.problem.rank)
        if self.cap >= self.problem.n_features:
            return min(self.cap, most)
        return min(max(self.cap - _rank(self.mt), self.cap // 8, 1), most)

    def make_room(self, width: int) -> None:
        """Forget directions when the cap is met: those without weight in W first, oldest first."""
        problem = self.problem
        if self.cap >= problem.n_features or problem.rank + width <= max(self.cap, width):
            return
        values, rotation = oracle.singular_rotation(self.mt)
        keep = max(self.cap - width, 1)
        used = int(np.count_nonzero(values > 1e-12 * max(values[0], 1e-300)))
        if used > keep and not self.truncated:
            self.truncated = True
            warnings.warn(
                f"W needs more than the {self.cap} directions that fit into memory_limit = "
                f"{self.options.memory_limit} bytes: its smallest singular values are dropped from here on, "
                "and the fit may not reach its tolerance; raise memory_limit (--factor-memory)",
                stacklevel=2,
            )
        used = min(used, keep)
        if self.options.step != "corrective":
            keep = used
        rotation = oracle.with_recent(rotation[:used].T, keep)
        problem.rotate(rotation)
        self.mt = self.mt @ rotation

    def solution(self, record: Record, status: str) -> Solution:
        u, m = oracle.singular_form(None if self.problem.whole else self.problem.basis, self.mt)
        return Solution(
            u=u,
            m=m,
            objective=record.objective,
            gap=record.gap,
            gap_estimate=self.estimate,
            certificate=self.certificate,
            status=status,
            iterations=self.iteration,
            passes=self.problem.passes,
            seconds=time.monotonic() - self.started,
            history=tuple(self.history),
        )


def _rank(mt: Array) -> int:
    """Numerical rank of W, through the smaller Gram matrix."""
    if not mt.size:
        return 0
    squares = np.linalg.eigvalsh(mt.T @ mt if mt.shape[0] >= mt.shape[1] else mt @ mt.T)
    return int(np.count_nonzero(squares > 1e-14 * max(squares[-1], 1e-300)))
