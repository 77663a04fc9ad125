"""The small problem by steps that know about its curvature.

As in `dswml.newton` all labels are given one matrix, 2 c / N G0, in place of their own Hessians. An
alternating step (see `dswml.splitting`) on that model leads somewhere; F is minimised on the way there, and c
is what was met on it. Directions that the rows have little of, which take gradients tens of steps, take few.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .corrective import Corrected, solve
from .duality import GapBound
from .small_problem import Quadratic
from .splitting import Spectrum, Splitting, usual_penalty

__all__ = ["ITERATES", "CurvedSteps"]

Array = npt.NDArray[Any]

#: Matrices of labels x directions that these steps take, with those of the points beside.
ITERATES = 15
#: Steps after which projected gradients take over.
MOST_STEPS = 60
#: The penalty is this share of the usual one: a step is to come close to the minimum of its model.
PENALTY = 0.2


class CurvedSteps:
    """Solves the small problems of one basis, whatever the radius.

    Parameters
    ----------
    problem : Quadratic

    Examples
    --------
    One direction with G0 = 1 and one label with b = 1: F(m) = (m - 1)^2 / 2.

    >>> from dswml.label_sums import Statistics
    >>> none = np.zeros(2, dtype=np.int64)
    >>> statistics = Statistics(np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64), none, none[:0])
    >>> statistics.append(np.ones((1, 1)), np.ones((1, 1)))
    >>> steps = CurvedSteps(Quadratic(statistics, n_rows=1, p0=0.5))
    >>> steps.solve(np.zeros((1, 1)), radius=0.5, tol=1e-9).mt.round(6)
    array([[0.5]])
    """

    def __init__(self, problem: Quadratic) -> None:
        self.problem = problem
        self.bound = GapBound(problem.statistics.g0, problem.n_rows)
        self.lowest, self.highest = sorted((problem.p0, 1 - problem.p0))
        if not self.bound.holds(problem.p0):
            return
        spectrum = Spectrum.of(problem.statistics.g0)
        self.vectors = spectrum.vectors
        #: Eigenvalues of 2 / N G0.
        self.values = 2 / problem.n_rows * spectrum.values
        self.inverse = 1 / (spectrum.values + self.bound.ridge)

    def solve(self, start: Array, radius: float, tol: float, *, curvature: float = 0.0) -> Corrected:
        """Minimise over the nuclear ball to a gap of ``tol``, from M^T and a c that was met before."""
        problem, bound = self.problem, self.bound
        if not bound.holds(problem.p0):
            return solve(problem, start, radius, tol, tight=True)
        if not self.lowest <= curvature <= self.highest:
            curvature = math.sqrt(self.lowest * self.highest)
        x = start @ self.vectors
        g = self.gradient(x)
        values = curvature * self.values
        steps = Splitting(values, values * x - g, x, -g, PENALTY * usual_penalty(values))
        gap = math.inf
        for iteration in range(1, MOST_STEPS + 1):
            steps.step(radius)
            change, ahead = steps.z - x, self.gradient(steps.z)
            left = steps.penalty * steps.taken
            left += ahead
            square = float(np.einsum("la,la,a", left, left, self.inverse))
            slope = float(np.vdot(g, change))
            met = float(np.vdot(ahead, change)) - slope
            share = float(np.clip(-slope / met, 0.0, 1.0)) if met > 0 else 1.0
            gap = bound.gap_after(gap, (share, slope, met), square, radius, problem.p0)
            # Where the step ends there is a gap of its own, however far it is worth going.
            end = min(bound.gap_of_normal(square, radius, problem.p0), gap if share == 1 else math.inf)
            if end <= tol:
                mt = steps.z @ self.vectors.T
                overlap = float(np.vdot(problem.statistics.positives, mt))
                objective = problem.objective(float(np.vdot(steps.z, ahead)), overlap)
                return Corrected(mt, objective, end, curvature, iteration, left @ self.vectors.T)
            if share:  # or else another step comes closer to the minimum of the same model
                size = float(np.einsum("la,la,a", change, change, self.values))
                if size > 0:
                    curvature = float(np.clip(met / size, self.lowest, self.highest))
                x += share * change
                g += share * (ahead - g)
                steps.aim(curvature * self.values, curvature * self.values * x - g)
                steps.begin(x)
            del change, ahead, left  # the next step needs the room
        steepest = curvature * float(self.values.max())
        found = solve(problem, x @ self.vectors.T, radius, tol, curvature=steepest, tight=True)
        return replace(found, curvature=curvature)

    def gradient(self, x: Array) -> Array:
        """Gradient of F, both in the eigenvectors of G0."""
        active = self.problem.gradient(x @ self.vectors.T, power=False)
        gradient: Array = active @ self.vectors
        gradient += self.problem.p0 * self.values * x
        return gradient
