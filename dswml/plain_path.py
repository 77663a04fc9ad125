"""The solutions of uniform weights on one fold, radius after radius, from X^T X and X^T Y alone."""

from __future__ import annotations

import warnings
from typing import Any

import numpy.typing as npt

from .least_squares import LeastSquares
from .path import Path
from .splitting import Spectrum

__all__ = ["PlainPath"]

Array = npt.NDArray[Any]


class PlainPath(Path):
    """All radii of uniform weights on one fold, solved once X^T X and X^T Y are there."""

    plain: LeastSquares | None = None

    def take(self, square: Array, cross: Array, spectrum: Spectrum | None) -> None:
        """Take X^T X and Y^T X, from which all else follows, and the spectrum where it is known."""
        self.sums = square, cross, spectrum

    def solve_next(self) -> bool:
        """Solve the smallest radius that is not solved, and return whether others are left."""
        problem = self.problem
        if self.plain is None:
            positives = int(problem.label_counts.sum())
            square, cross, spectrum = self.sums
            dtype = problem.source.dtype
            self.plain = LeastSquares(square, cross, problem.n_rows, positives, dtype, spectrum)
        point, *others = self.unsolved
        point.objective, point.gap = self.plain.solve(point.radius, self.tol, self.floor)
        point.relative_gap = point.gap / max(point.objective, self.floor)
        if point.relative_gap > self.tol:
            warnings.warn(
                f"radius {point.radius:g} with uniform weights is solved to a relative gap of "
                f"{point.relative_gap:.1e} only",
                stacklevel=2,
            )
        point.u, point.mt = self.plain.factors()
        if not others:
            del self.plain, self.sums
        return bool(others)
