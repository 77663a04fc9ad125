"""The solutions of uniform weights on one fold, radius after radius, from X^T X and X^T Y alone.

With p0 = 1/2 the objective is that of least squares,

    2 N F(W) = tr(W^T G W) - 2 tr(B^T W) + nnz(Y),    G = X^T X, B = X^T Y,

so where D is small one read of the data serves all radii: what follows here reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import oracle
from .corrective import Ball, Quadratic, Statistics, solve_together
from .frank_wolfe import MAX_BLOCK, MIN_BLOCK
from .path import Path, Point
from .problem import Problem
from .sweep import Partial, Sweep

__all__ = ["PlainPath"]

Array = npt.NDArray[Any]

INNER = 0.2
FIRST = 0.005
ROUNDS = 60
FINE = 0.3


class PlainPath(Path):
    """All radii of uniform weights on one fold, solved once X^T X and X^T Y are there."""

    def request(self) -> Sweep:
        """Ask for X^T X and X^T Y."""
        return self.problem.request(None, products=True)

    def look(self, sums: Partial) -> None:
        """Solve all points, from the smallest radius on."""
        # No W has right vectors outside the row space of B, so labels are replaced by a basis of that.
        cross = sums["cross"]
        frame, cross = np.linalg.qr(cross) if cross.shape[0] > cross.shape[1] else (None, cross)
        behind: list[tuple[float, Array, Array]] = []
        for point in self.unsolved:
            solution = self.solve(point, sums["square"], cross, behind)
            behind = [*behind[-1:], (point.radius, *solution)]
            point.u, point.mt = solution
            if frame is not None:
                point.mt = frame @ point.mt

    def solve(
        self, point: Point, square: Array, cross: Array, behind: list[tuple[float, Array, Array]]
    ) -> tuple[Array, Array]:
        """Solve one point; return its left factor and M^T, whose labels are those of ``cross``."""
        n_rows = self.problem.n_rows
        u, mt = _expected(point.radius, behind, square.shape[0], cross.shape[0])
        inner = 0.0
        for _ in range(ROUNDS):
            gradient = (mt @ (u.T @ square) - cross) / n_rows
            left, values, _ = oracle.decompose(gradient, None)
            slope = float(np.vdot(mt, gradient @ u))
            positive = self.problem.label_counts.sum()
            point.objective = slope / 2 + float(positive - np.vdot(mt, cross @ u)) / (2 * n_rows)
            point.gap = max(slope + point.radius * float(values[0]), 0.0)
            scale = max(point.objective, self.floor)
            point.relative_gap = point.gap / scale
            if point.relative_gap <= self.tol:
                break
            width = int(np.clip(np.count_nonzero(values > -slope / point.radius), MIN_BLOCK, MAX_BLOCK))
            excess = max(point.gap - inner, 0.0) / scale
            fresh = left[:, :width] - u @ (u.T @ left[:, :width])
            basis = np.linalg.qr(np.hstack([u, fresh]))[0]
            statistics = Statistics(
                np.zeros(len(cross), dtype=np.int64), np.full(len(cross), -1), np.zeros(len(cross) + 1, int), np.zeros(0, int)
            )
            statistics.append(basis.T @ (square @ basis), cross @ basis)
            statistics.nnz = int(positive)
            start = mt @ (basis.T @ u).T
            tol = max(FINE * self.tol, min(INNER * excess, FIRST)) * scale
            quadratic = Quadratic(statistics, n_rows, 0.5)
            found = solve_together(quadratic, [Ball(start, point.radius, tol, point.curvature)])[0]
            point.curvature, inner = found.curvature, found.gap
            rights, weights, lefts = np.linalg.svd(found.mt, full_matrices=False)
            rank = int(np.count_nonzero(weights > 1e-12 * max(weights.max(initial=0.0), 1e-300)))
            u, mt = basis @ lefts[:rank].T, rights[:, :rank] * weights[:rank]
        return u, mt


def _expected(
    radius: float, behind: list[tuple[float, Array, Array]], n_features: int, n_labels: int
) -> tuple[Array, Array]:
    """Factors to start from: what the solutions of the two radii below lead to expect."""
    if not behind:
        return np.zeros((n_features, 0)), np.zeros((n_labels, 0))
    if len(behind) == 1:
        return behind[0][1:]
    (before, u, mt), (last, other_u, other_mt) = behind
    ahead = min((radius - last) / (last - before), 1.0)
    basis = np.linalg.qr(np.hstack([other_u, u - other_u @ (other_u.T @ u)]))[0]
    mt = (1 + ahead) * other_mt @ (basis.T @ other_u).T - ahead * mt @ (basis.T @ u).T
    return basis, mt
