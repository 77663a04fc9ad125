"""The solutions of one weighting on one fold, radius after radius, on a basis that follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from . import oracle
from .corrective import Corrected, project_nuclear, solve
from .frank_wolfe import OBJECTIVE_FLOOR
from .least_squares import step_ahead
from .problem import Problem
from .result_sizes import MAX_BLOCK, MIN_BLOCK
from .small_problem import Quadratic
from .sweep import Partial, Sweep

__all__ = ["Path", "Point", "lacked_directions"]

Array = npt.NDArray[Any]

#: A path forgets the directions that its solutions do not use once those that they use are a share of NEEDED:
#: with a weight below NEGLIGIBLE of the largest, a direction is not used; below NOTHING it is rounding.
NEGLIGIBLE, NOTHING = 2e-3, 1e-7
NEEDED = 0.9
#: A small problem is solved to INNER of what its basis lacked at the last look, but to ROUGHEST of F at
#: least and not beyond FINEST of the tolerance.
INNER, ROUGHEST, FINEST = 0.1, 0.0003, 0.3
#: A point asks for so many directions at least.
FEWEST = 10
#: A solved point asks for so many at most, on behalf of a radius that is not begun.
FORESEEN = 30
#: With more directions than this small problems take their time, and fewer radii are worked on at once.
MANY, FEWER = 64, 2


class Point:
    """A grid point on one fold: W = U M, on the basis of its path until it is solved."""

    def __init__(self, radius: float, n_labels: int) -> None:
        self.radius = radius
        self.mt = np.zeros((n_labels, 0))
        self.u: Array | None = None
        self.objective = self.gap = self.relative_gap = np.inf
        #: The largest bound of F from below that a look has certified.
        self.lower = -np.inf
        self.curvature = 1e-6
        # Right singular vectors of the gradient at the last look, where they are found from the last ones.
        self.last_right = np.zeros((n_labels, 0))
        #: What the gradient of the small problem and a normal of the ball do not cancel, since it was solved.
        self.residual: Array | None = None
        #: How many looks found that what was done since the one before had not got the point on.
        self.slow = 0
        # Gap of the small problem, and what the gap has beyond it: that is what the basis lacks.
        self.inner, self.excess = 0.0, np.inf

    @property
    def solved(self) -> bool:
        return self.u is not None

    def compact(self) -> tuple[Array, Array]:
        """Rotation of the basis (r x k) and M^T (L x k) of the point's own rank k."""
        squares, vectors = np.linalg.eigh(self.mt.T @ self.mt)
        rotation = vectors[:, squares > NOTHING**2 * squares.max(initial=0.0)]
        return rotation, self.mt @ rotation

    def widen(self, rank: int) -> None:
        """Give directions that came to the basis since a weight of zero."""
        self.mt = np.pad(self.mt, ((0, 0), (0, rank - self.mt.shape[1])))

    def settle(self, basis: Array, factors: tuple[Array, Array] | None = None) -> None:
        """Hold the factors, which may be known, apart from the basis, which goes on changing."""
        self.widen(basis.shape[1])
        rotation, self.mt = factors or self.compact()
        self.u, self.last_right, self.residual = basis @ rotation, self.last_right[:, :0], None


class Path:
    """All radii of one weighting on one fold, from the smallest on, on a basis that follows them."""

    #: Directions that an iteration must find room for.
    ahead = MIN_BLOCK
    #: Whether gaps hold.
    certified = True

    def __init__(self, problem: Problem, radii: Sequence[float], cap: int, window: int, tol: float) -> None:
        self.problem, self.cap, self.window, self.tol = problem, cap, window, tol
        self.points = [Point(radius, problem.n_labels) for radius in radii]
        self.open: list[Point] = []
        #: The open points in compact form, as they were asked for last.
        self.factors: list[tuple[Array, Array]] = []
        #: F(0).
        self.at_zero = (1 - problem.p0) * float(problem.label_counts.sum()) / problem.n_rows
        self.floor = max(OBJECTIVE_FLOOR * self.at_zero, np.finfo(float).tiny)

    @property
    def unsolved(self) -> list[Point]:
        return sorted((point for point in self.points if not point.solved), key=lambda point: point.radius)

    @property
    def begun(self) -> int:
        """How many radii are not solved but on the basis, and go on with it."""
        return sum(point.mt.shape[1] > 0 for point in self.unsolved)

    @property
    def most(self) -> int:
        """How many radii to work on at once."""
        return min(self.window, FEWER) if self.problem.rank > MANY else self.window

    def advance(self, count: int | None = None) -> None:
        """Choose the points to work on: so many of the smallest radii that are not solved.

        They need the fewest directions, and their solutions are where the next radii start from.
        """
        rank, left = self.problem.rank, self.unsolved
        if count is None:
            # At W = 0 all gradients are the same.
            count = max(self.most, self.begun) if rank else 1
        self.open = left[:count]
        for point in self.open:
            point.widen(rank)

    def request(self, iteration: int) -> Sweep:
        """Ask for what this iteration must know of the open points: their gradients."""
        self.advance(max(self.begun, 1))
        self.factors = [point.compact() for point in self.open]
        points = tuple((*factors, self.problem.p0) for factors in self.factors)
        return self.problem.request(None, points=points)

    def begin(self, cross: Array) -> None:
        """Look at W = 0, whose gradient follows from Y^T X."""
        gradient = -self.problem.scale * (1 - self.problem.p0) * cross
        wanted: list[tuple[float, Array]] = []
        for point in self.unsolved:
            lacked = self.examine(point, gradient, self.at_zero, 0.0)
            if not point.solved:
                wanted = [] if lacked is None else [(point.relative_gap, lacked)]
                break
        self.grow(wanted)

    def look(self, sums: Partial) -> None:
        """Take the gradients of the open points: their gaps, and the directions they lack."""
        problem = self.problem
        wanted: list[tuple[float, Array]] = []
        for number, point in enumerate(self.open):
            gradient = problem.gradient(point.mt, sums[f"gradient {number}"])
            found = {"loss": sums[f"loss {number}"], "slope": sums[f"slope {number}"]}
            lacked = self.examine(point, gradient, *problem.value_and_slope(point.mt, found))
            if lacked is not None:
                wanted.append((point.relative_gap, lacked))
        self.grow(wanted)

    def examine(self, point: Point, gradient: Array, objective: float, slope: float) -> Array | None:
        """Find the gap of a point: settle it, or return the directions that its basis lacks, if any."""
        left, values, _ = oracle.decompose(gradient, None, MAX_BLOCK)

        def violating(radius: float) -> Array:
            """The vectors with which a ball has more than W."""
            return values[: left.shape[1]] > -slope / radius if self.problem.rank else np.zeros(0)

        self.judge(point, objective, max(slope + point.radius * float(values[0]), 0.0))
        if point.solved:  # the next radius will want directions too
            following = [each.radius for each in self.unsolved if not each.mt.any()]
            return lacked_directions(left, violating(following[0]))[:, :FORESEEN] if following else None
        if point.excess <= FINEST * self.tol * self.scale(point.objective):
            return None
        return lacked_directions(left, violating(point.radius))

    def judge(
        self, point: Point, objective: float, gap: float, factors: tuple[Array, Array] | None = None
    ) -> None:
        """Take F and the gap that a look has found, and settle the point if that is small enough."""
        point.objective, point.gap = objective, gap
        point.relative_gap = gap / self.scale(objective)
        point.excess = max(gap - point.inner, 0.0)
        if self.certified:
            point.lower = max(point.lower, objective - gap)
        if point.relative_gap <= self.tol:
            point.settle(self.problem.basis, factors)

    def scale(self, objective: float) -> float:
        """What the gap is relative to where F has this value."""
        return max(objective, self.floor)

    def grow(self, wanted: list[tuple[float, Array]]) -> None:
        """Append what is new in the directions that points want, each with its relative gap."""
        problem = self.problem
        if problem.rank:
            self.narrow()
        room = max(self.cap - problem.rank, 0)
        if wanted and room:
            # The points nearest to their solution first, so that they are done with.
            wanted.sort(key=lambda pair: pair[0])
            kept, taken = np.zeros((problem.n_features, 0)), min(room, MAX_BLOCK)
            for least in (0.3, 1e-8):  # what is mostly new, or else whatever is new at all
                for _, left in wanted:
                    rest = left - problem.basis @ (problem.basis.T @ left)
                    rest = rest - kept @ (kept.T @ rest)
                    basis, sizes, _ = oracle.svd(rest)
                    kept = np.hstack([kept, basis[:, sizes > least]])
                if kept.shape[1] >= MIN_BLOCK:
                    break
            problem.append(-kept[:, :taken])
        self.advance()

    def narrow(self) -> None:
        """Forget the directions that no solution at hand uses, once they are many or there is no more room.

        Where even these leave no room, the smallest radius that is not solved keeps its own.
        """
        near, left = self.near, self.unsolved_open
        for points in (near, left[:1]):
            full = self.full
            if not points or (points is not near and not full):
                return
            used, room = self.used(points, NEGLIGIBLE), self.problem.rank - MIN_BLOCK
            if full and points is not near:
                used = used[:, : max(room, 1)]
            elif used.shape[1] >= NEEDED * room:
                continue
            if used.shape[1]:
                self.rotate(used)

    @property
    def unsolved_open(self) -> list[Point]:
        """The open points whose W is on the basis."""
        return [point for point in self.open if not point.solved]

    @property
    def near(self) -> list[Point]:
        """These, and the last solved ones, from which the next radii start."""
        solved = [point for point in self.points if point.solved]
        return [*self.unsolved_open, *sorted(solved, key=lambda point: point.radius)[-2:]]

    def used(self, points: list[Point], negligible: float) -> Array:
        """Directions of the basis (r x k) that points use, the most used first."""
        grams = [mt.T @ mt / max(float(np.vdot(mt, mt)), 1e-300) for mt in map(self.on_basis, points)]
        squares, directions = np.linalg.eigh(np.sum(grams, axis=0))
        needed = int(np.count_nonzero(squares > negligible**2 * squares.max(initial=0.0)))
        return directions[:, ::-1][:, :needed]

    def rotate(self, rotation: Array) -> None:
        """Replace the basis by ``U @ rotation``."""
        self.problem.rotate(rotation)
        for point in self.unsolved_open:
            point.mt = point.mt @ rotation

    @property
    def full(self) -> bool:
        """Whether the basis has no room for the directions of another iteration."""
        return self.cap < self.problem.n_features and self.problem.rank + self.ahead > self.cap

    def on_basis(self, point: Point) -> Array:
        """M^T of a point on the basis of the path."""
        if point.u is None:
            return point.mt
        mt: Array = point.mt @ (self.problem.basis.T @ point.u).T
        return mt

    def correct(self) -> None:
        """Solve the small problem of every open point.

        F only falls: where it comes close enough to what a look has bounded it by, no other look is needed.
        """
        problem = self.problem
        assert problem.statistics is not None
        minimise = self.minimiser(Quadratic(problem.statistics, problem.n_rows, problem.p0))
        least = min((point.objective for point in self.points if np.isfinite(point.objective)), default=0.0)
        for point in self.open:
            scale = self.scale(point.objective if np.isfinite(point.objective) else least)
            start, tol = self.start(point), self.inner_tol(point, scale)
            found = minimise(start, point.radius, tol, curvature=point.curvature)
            point.mt, point.curvature, point.inner = found.mt, found.curvature, found.gap
            point.residual = found.residual
            if found.objective - point.lower <= self.tol * self.scale(found.objective):
                self.judge(point, found.objective, max(found.objective - point.lower, 0.0))
        if self.unsolved and all(point.solved for point in self.open):
            self.advance(1)
            self.correct()

    def minimiser(self, quadratic: Quadratic) -> Callable[..., Corrected]:
        """What solves the small problems of the basis at hand."""
        return partial(solve, quadratic)

    def inner_tol(self, point: Point, scale: float) -> float:
        """Gap to which the small problem of a point is worth solving, where F is ``scale``."""
        return max(FINEST * self.tol * scale, min(INNER * point.excess, ROUGHEST * scale))

    def start(self, point: Point) -> Array:
        """M^T to begin with: the point's own, or else what the two radii below lead to expect."""
        below = [each for each in self.points if each.radius < point.radius and each.mt.any()]
        if point.mt.any() or not below:
            return point.mt
        *others, last = sorted(below, key=lambda each: each.radius)
        point.curvature = last.curvature
        mt = self.on_basis(last)
        if not others:
            return mt
        ahead = step_ahead(others[-1].radius, last.radius, point.radius)
        return project_nuclear(mt + ahead * (mt - self.on_basis(others[-1])), point.radius)


def lacked_directions(left: Array, expected: Array) -> Array:
    """Columns that the solution is expected to have a weight in, or the leading ones where these are few."""
    wanted = np.flatnonzero(expected > 0)
    if wanted.size < FEWEST:
        wanted = np.arange(min(FEWEST, left.shape[1]))
    return left[:, wanted]
