"""The solutions of uniform weights on one fold, radius after radius, from X^T X and X^T Y alone.

With p0 = 1/2 the objective is that of least squares,

    2 N F(W) = tr(W^T G W) - 2 tr(B^T W) + nnz(Y),    G = X^T X, B = X^T Y,

so where D is small one read of the data serves all radii: what follows here reads nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from . import oracle
from .corrective import project_nuclear, solve
from .label_sums import Statistics
from .path import NEGLIGIBLE, Path, Point, compact, lacked, step_ahead
from .small_problem import Quadratic

__all__ = ["PlainPath"]

Array = npt.NDArray[Any]

#: Bases tried for a point at most.
MAX_ROUNDS = 60


class PlainPath(Path):
    """All radii of uniform weights on one fold, solved once X^T X and X^T Y are there."""

    def solve_all(self, square: Array, cross: Array) -> None:
        """Solve all points, from the smallest radius on, given X^T X and Y^T X."""
        # No W has right vectors outside the row space of B, so labels are replaced by a basis of that.
        frame, cross = np.linalg.qr(cross) if cross.shape[0] > cross.shape[1] else (None, cross)
        nothing = np.zeros((len(square), 0)), np.zeros((len(cross), 0))
        behind: list[tuple[float, Array, Array]] = []
        curvature = self.points[0].curvature
        for point in self.unsolved:
            point.curvature = curvature
            start = _expected(point.radius, behind) if behind else nothing
            point.u, mt = self.solve(point, square, cross, *start)
            behind = [*behind[-1:], (point.radius, point.u, mt)]
            point.mt = mt if frame is None else frame @ mt
            curvature = point.curvature

    def solve(self, point: Point, square: Array, cross: Array, u: Array, mt: Array) -> tuple[Array, Array]:
        """Return the factors of a point, found from those given; the labels of M^T are ``cross``'s."""
        assert self.bound is not None
        n_rows, positives = self.problem.n_rows, float(self.problem.label_counts.sum())
        image = square @ u
        for _ in range(MAX_ROUNDS):
            gradient = (mt @ image.T - cross) / n_rows
            left, values, right = oracle.decompose(gradient, None)
            slope = float(np.vdot(mt, gradient @ u))
            point.objective = (slope + (positives - float(np.vdot(mt, cross @ u))) / n_rows) / 2
            triples = (left, values, right)
            point.gap, expected = self.bound.gap_at((u, mt), triples, slope, point.radius, 0.5)
            scale = max(point.objective, self.floor)
            point.relative_gap = point.gap / scale
            if point.relative_gap <= self.tol:
                return u, mt
            point.excess = max(point.gap - point.inner, 0.0)
            fresh = _outside(u, lacked(left, expected))
            basis, image = np.hstack([u, fresh]), np.hstack([image, square @ fresh])
            start = np.pad(mt, ((0, 0), (0, fresh.shape[1])))
            small = _least_squares(basis.T @ image, cross @ basis, n_rows)
            tol = self.inner_tol(point, scale)
            found = solve(small, start, point.radius, tol, curvature=point.curvature, tight=True)
            point.curvature, point.inner = found.curvature, found.gap
            rotation, mt = compact(found.mt)
            u, image = basis @ rotation, image @ rotation
        warnings.warn(
            f"radius {point.radius:g} with uniform weights is solved to a relative gap of "
            f"{point.relative_gap:.1e} only",
            stacklevel=2,
        )
        return u, mt


def _least_squares(gram: Array, cross: Array, n_rows: int) -> Quadratic:
    """F but for its constant, as a function of M^T."""
    labels = len(cross)
    none = np.zeros(labels + 1, dtype=np.int64)
    statistics = Statistics(none[:-1], np.arange(labels), none, none[:0])
    statistics.append(gram, cross)
    return Quadratic(statistics, n_rows, 0.5)


def _outside(u: Array, directions: Array) -> Array:
    """Orthonormal basis of what is outside the span of ``u`` in the directions."""
    for _ in range(2):
        directions, triangle = np.linalg.qr(directions - u @ (u.T @ directions))
        directions = directions[:, np.abs(np.diag(triangle)) > 1e-8]
    return directions[:, : u.shape[0] - u.shape[1]]


def _expected(radius: float, behind: list[tuple[float, Array, Array]]) -> tuple[Array, Array]:
    """What the solutions of the two radii below lead to expect of the next."""
    *before, (last, u, mt) = behind
    if not before:
        return u, mt
    old_radius, old_u, old_mt = before[0]
    ahead = step_ahead(old_radius, last, radius)
    basis = np.hstack([u, _outside(u, old_u)])
    mt = (1 + ahead) * mt @ (u.T @ basis) - ahead * old_mt @ (old_u.T @ basis)
    rotation, mt = compact(project_nuclear(mt, radius), NEGLIGIBLE)
    return basis @ rotation, mt
