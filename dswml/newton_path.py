"""The solutions of one weighting on one fold where X^T X is known, whose curvature foresees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import oracle
from .corrective import Corrected
from .curved import CurvedSteps
from .least_squares import step_ahead
from .newton import Curvature, Place, ahead, frame_of
from .path import FEWEST, INNER, Path, Point, lacked_directions
from .result_sizes import MAX_BLOCK
from .small_problem import Quadratic
from .sweep import Partial

__all__ = ["NewtonPath"]

Array = npt.NDArray[Any]

#: Steps have these shares of the curvature of W itself: a step's own lies between them.
SHARES = (0.6, 2.5)
#: Right singular vectors of the gradient that steps know beyond W's rank.
BEYOND = 20
#: Radii up to so many times the last one are foreseen along with the next.
REACH = 1.5
#: A step that leaves more than this share of a gap was none: then the gradient's own directions are wanted
#: too. After the second one no direction is forgotten, and small problems are solved more and more closely,
#: but for what rounding allows.
SLOW, CLOSEST = 0.3, 1e-4
#: A gap of so many tolerances is expected to be closed by the next step.
CLOSE = 3


@dataclass(frozen=True)
class _Seen:
    """A point W = U M as the last read found it, with directions that it lacks if steps do not get on."""

    point: Point
    u: Array
    mt: Array
    gradient: Array
    right: Array
    curvature: float
    lacked: Array | None


class NewtonPath(Path):
    """All radii of one weighting on one fold whose X^T X is known."""

    curvature: Curvature

    def look(self, sums: Partial) -> None:
        """Take the gradients of the open points: their gaps, and the directions of the next steps."""
        problem = self.problem
        seen = []
        for number, (point, (rotation, mt)) in enumerate(zip(self.open, self.factors, strict=True)):
            gradient = problem.gradient(point.mt, sums[f"gradient {number}"])
            found = {"loss": sums[f"loss {number}"], "slope": sums[f"slope {number}"]}
            objective, slope = problem.value_and_slope(point.mt, found)
            power = (problem.n_rows * objective - float(sums[f"loss {number}"])) / problem.p0  # ||XW||^2
            before = point.slow
            u = problem.basis @ rotation
            lacked, right = self.measure(point, gradient, objective, slope, (rotation, mt))
            if point.slow == before:
                lacked = None
            curvature = self.curvature_of(objective, slope, power)
            seen.append(_Seen(point, u, mt, gradient, right, curvature, lacked))
        self.foresee(seen)

    def curvature_of(self, objective: float, slope: float, power: float) -> float:
        """The c for which c / N ||XW||^2 is <W, H W> / 2, given F(W), <W, G> and ||XW||^2."""
        p0, p1 = self.problem.p0, 1 - self.problem.p0
        curved = self.problem.n_rows * (slope - objective + self.at_zero)
        return float(np.clip(curved / power, min(p0, p1), max(p0, p1))) if power > 0 else max(p0, p1)

    def examine(self, point: Point, gradient: Array, objective: float, slope: float) -> Array | None:
        """Find the gap of a point: settle it, or return the directions that its basis lacks, if any."""
        return self.measure(point, gradient, objective, slope)[0]

    def measure(
        self,
        point: Point,
        gradient: Array,
        objective: float,
        slope: float,
        factors: tuple[Array, Array] | None = None,
    ) -> tuple[Array | None, Array]:
        """The same, and return right singular vectors of the gradient too."""
        problem, bound = self.problem, self.curvature.bound
        residual = None
        if point.residual is not None:
            known, residual = bound.without(point.residual, problem.basis, problem.moment)
            gradient, slope = gradient - known, slope - float(np.vdot(point.mt, point.residual))
        left, _, right = triples = oracle.decompose(gradient, None, FEWEST + BEYOND)
        near = bound.near((problem.basis, point.mt), triples, residual)
        gap, weights = bound.gap(near, slope, point.radius, problem.p0)
        before = point.relative_gap
        self.judge(point, objective, gap, factors)
        point.slow += not point.solved and point.relative_gap > SLOW * before
        return None if point.solved else lacked_directions(left, weights), right

    def minimiser(self, quadratic: Quadratic) -> Callable[..., Corrected]:
        return CurvedSteps(quadratic).solve

    def inner_tol(self, point: Point, scale: float) -> float:
        return super().inner_tol(point, scale) * max(INNER ** (max(point.slow, 1) - 1), CLOSEST)

    def narrow(self) -> None:
        if self.full or not any(point.slow > 1 for point in self.unsolved_open):
            super().narrow()

    def foresee(self, seen: list[_Seen]) -> None:
        """Append the directions that the open points and the next radii are expected to want."""
        problem, steps = self.problem, self.curvature.steps
        targets = self.unsolved[: self.count(seen)]
        if not targets:
            return
        frame = self.frame(seen)
        places = {
            one.point: Place(
                (frame.T @ one.mt).astype(np.float32) @ steps.turned(one.u.T),
                steps.turned(frame.T @ one.gradient),
            )
            for one in seen
        }
        before, last = seen[-2:][0].point, seen[-1].point  # the same where there is one alone
        changes = []
        for point in targets:
            place = places.get(point)
            if place is None:
                by = step_ahead(before.radius, last.radius, point.radius)
                place = ahead(places[before], places[last], by)
            changes += [steps.change(place, point.radius, share * seen[-1].curvature) for share in SHARES]
        self.narrow()
        room = min(max(self.cap - problem.rank, 0), MAX_BLOCK)
        lacked = [one.lacked for one in seen if one.lacked is not None]
        wanted = np.hstack([*lacked, steps.directions(changes, problem.basis)])
        problem.append(wanted[:, :room])
        self.advance(len(targets))

    def count(self, seen: list[_Seen]) -> int:
        """How many radii to work on: those begun, and others that can be foreseen from where they are."""
        begun, last = self.begun, seen[-1].point
        near = sum(point.radius <= REACH * last.radius for point in self.unsolved)
        if all(one.point.solved or one.point.relative_gap <= CLOSE * self.tol for one in seen):
            near = max(near, begun + 1)
        return max(begun, min(near, self.most), 1)

    def frame(self, seen: list[_Seen]) -> Array:
        """Orthonormal vectors of labels that W is expected to have weights in, as columns."""
        vectors = []
        for one in seen:
            # In compact form the columns of M^T are orthogonal.
            own = one.mt / np.linalg.norm(one.mt, axis=0)
            vectors += [own, one.right[:, : own.shape[1] + BEYOND]]
        n_labels = self.problem.n_labels
        if sum(each.shape[1] for each in vectors) >= 2 * n_labels:
            return np.eye(n_labels)
        return frame_of(np.hstack(vectors))
