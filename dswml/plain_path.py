"""The solutions of uniform weights on one fold, radius after radius, from X^T X and X^T Y alone."""

from __future__ import annotations

import warnings
from typing import Any

import numpy.typing as npt

from .least_squares import LeastSquares
from .path import Path

__all__ = ["PlainPath"]

Array = npt.NDArray[Any]


class PlainPath(Path):
    """All radii of uniform weights on one fold, solved once X^T X and X^T Y are there."""

    def solve_all(self, square: Array, cross: Array) -> None:
        """Solve all points, from the smallest radius on, given X^T X and Y^T X."""
        problem = self.problem
        positives = int(problem.label_counts.sum())
        plain = LeastSquares(square, cross, problem.n_rows, positives, problem.source.dtype)
        for point in self.unsolved:
            point.objective, point.gap = plain.solve(point.radius, self.tol, self.floor)
            point.relative_gap = point.gap / max(point.objective, self.floor)
            if point.relative_gap > self.tol:
                warnings.warn(
                    f"radius {point.radius:g} with uniform weights is solved to a relative gap of "
                    f"{point.relative_gap:.1e} only",
                    stacklevel=2,
                )
            point.u, point.mt = plain.factors()
