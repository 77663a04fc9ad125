"""The corrective step: minimise F(U M) exactly over all M in the nuclear ball, for a fixed basis U.

`solve` is a projected gradient method on the sums of the small problem; it reads no data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .duality import GapBound
from .small_problem import Quadratic

__all__ = ["Corrected", "project_nuclear", "shrinking", "solve"]

Array = npt.NDArray[Any]

#: Iterations between two looks at the gap of the small problem, where these are costly.
CHECK_EVERY = 4
#: Most that the curvature which steps follow changes by at a time.
MOST = 1e3
#: Gradient steps before splitting takes over, and steps of the latter.
GRADIENT_STEPS = 600
SPLITTING_STEPS = 2000


def project_nuclear(mt: Array, radius: float) -> Array:
    """Project onto the matrices of nuclear norm at most ``radius``, through the smaller Gram matrix.

    Examples
    --------
    >>> project_nuclear(np.diag([3.0, 1.0]), radius=2.0)
    array([[2., 0.],
           [0., 0.]])
    """
    tall = mt.shape[0] >= mt.shape[1]
    factors = shrinking_factors(mt.T @ mt if tall else mt @ mt.T, radius)
    if factors is None:
        return mt
    projected: Array = (mt @ factors[0]) @ factors[1] if tall else factors[0] @ (factors[1] @ mt)
    return projected


def shrinking_factors(gram: Array, radius: float) -> tuple[Array, Array] | None:
    """Factors of the matrix that projects onto the nuclear ball whatever has this Gram matrix.

    They are None where it is in the ball already.
    """
    return shrinking(*np.linalg.eigh(gram), radius)


def shrinking(squares: Array, vectors: Array, radius: float) -> tuple[Array, Array] | None:
    """The same, given the eigenvalues and eigenvectors of the Gram matrix."""
    values = np.sqrt(np.maximum(squares, 0))
    if values.sum() <= radius:
        return None
    descending = values[::-1]
    counts = np.arange(1, values.size + 1)
    above = np.cumsum(descending) - counts * descending  # exactly 0 for the largest, whatever the scale
    count = counts[np.flatnonzero(above < radius)[-1]]
    vectors, largest = vectors[:, -count:], values[-count:]
    shrunk = (radius - (largest.sum() - count * largest)) / count
    factors = np.clip(shrunk / np.maximum(largest, 1e-300), 0, 1)
    return vectors * factors, np.ascontiguousarray(vectors.T)


@dataclass(frozen=True)
class Corrected:
    """Solution of the small problem: M^T and F there, its gap, and the curvature met.

    Where the gap is tight, ``residual`` is what the gradient and a normal of the ball do not cancel.
    """

    mt: Array
    objective: float
    gap: float
    curvature: float
    iterations: int
    residual: Array | None = None


def solve(
    problem: Quadratic,
    start: Array,
    radius: float,
    tol: float,
    *,
    curvature: float = 1e-6,
    tight: bool = False,
) -> Corrected:
    """Minimise over the nuclear ball to a duality gap of ``tol``: that of Eq. 37 or the ``tight`` one.

    Projected gradients need few iterations on data of a sane scale. Where they do not, as with
    features far from the origin, and the problem is small enough, its Hessians are decomposed once
    and splitting, which does not mind their condition, takes over.
    """
    bound = GapBound(problem.statistics.g0, problem.n_rows) if tight else None
    if bound is not None and not bound.holds(problem.p0):
        bound = None
    found = _projected_gradient(problem, start, radius, tol, curvature, GRADIENT_STEPS, bound)
    if found.gap <= tol:
        return found
    if problem.decomposes:
        split = _splitting(problem, found, radius, tol, bound)
        return split if split.gap < found.gap else found
    return _projected_gradient(problem, found.mt, radius, tol, found.curvature, 4 * GRADIENT_STEPS, bound)


def _projected_gradient(
    problem: Quadratic,
    start: Array,
    radius: float,
    tol: float,
    curvature: float,
    max_iter: int,
    bound: GapBound | None,
) -> Corrected:
    """Projected gradient whose steps follow the curvature of the last one (Barzilai and Borwein).

    Of the two curvatures that they propose, the smaller, which a long step follows, and the larger take
    turns. F is quadratic, so the best point between the iterate and the projection, and the gradient there,
    are known: an iteration costs one multiplication with the statistics, and F never rises. The last step is
    a short one, all the way to the projection: so the solution has no more rank than it needs, and nothing is
    left of what long steps do to steep directions.
    """
    problem.begin(start)
    inverse = None if bound is None else bound.inverse
    gap, share, largest, iteration = math.inf, 0.0, 0.0, 0
    ready = bound is None
    while True:
        if ready and bound is None:
            gap, share = _plain_gap(problem, share, radius), 0.0
        if (ready and gap <= tol) or iteration >= max_iter:
            break
        short = gap <= tol if bound is not None else iteration % CHECK_EVERY == CHECK_EVERY - 1
        curvature = largest if short and largest else curvature
        factors = shrinking_factors(problem.total("ahead_gram", share, curvature), radius)
        slope, length, met, turned, left = problem.total("move", curvature, factors, inverse)
        share = float(np.clip(-slope / met, 0.0, 1.0)) if met > 0 else 1.0
        if bound is not None:
            gap = bound.gap_after(gap, (share, slope, met), left, radius, problem.p0)
        iteration += 1
        if not share:  # as far as rounding lets it come
            break
        ready = short and share == 1
        if met > 0:
            largest = max(largest, turned / met)
            wanted = met / length if iteration % 2 else turned / met
            curvature = float(np.clip(wanted, curvature / MOST, curvature * MOST))
    residual = None
    if bound is not None and share == 1:
        residual = np.concatenate(problem.each("residual"))
    mt = np.concatenate(problem.each("iterate", share))
    objective = problem.objective(*problem.total("numbers"))
    return Corrected(mt, objective, gap, largest or curvature, iteration, residual)


def _plain_gap(problem: Quadratic, share: float, radius: float) -> float:
    """The gap of Eq. 37 at the iterate, after the last step is made."""
    slope, *gram = problem.total("slope_and_gram", share)
    side = math.isqrt(len(gram))
    squares = np.linalg.eigvalsh(np.reshape(gram, (side, side)))
    return float(slope) + radius * float(np.sqrt(max(squares.max(initial=0.0), 0.0)))


def _splitting(
    problem: Quadratic, start: Corrected, radius: float, tol: float, bound: GapBound | None
) -> Corrected:
    """Alternate exact minimisation per label with the projection (ADMM), balancing the two."""
    values, vectors = np.linalg.eigh(problem.hessians())
    values = np.maximum(values, 0)
    linear = 2 * (1 - problem.p0) / problem.n_rows * problem.statistics.positives
    rotated = np.matmul(linear[:, None, :], vectors)[:, 0]
    penalty = float(np.sqrt(values.max() * max(values.max(axis=1).min(), values.max() * 1e-12)))
    feasible, dual = start.mt, np.zeros_like(start.mt)
    best = start
    for iteration in range(1, SPLITTING_STEPS + 1):
        target = np.matmul((feasible - dual)[:, None, :], vectors)[:, 0]
        free = (rotated + penalty * target) / (values + penalty)
        free = np.matmul(vectors, free[:, :, None])[:, :, 0]
        before, feasible = feasible, project_nuclear(free + dual, radius)
        dual = dual + free - feasible
        if iteration % CHECK_EVERY:
            continue
        problem.begin(feasible)
        if bound is None:
            gap = _plain_gap(problem, 0.0, radius)
        else:  # what a projection takes away is normal to the ball
            left = (problem.gradient(feasible) + penalty * dual) @ bound.inverse
            gap = bound.gap_of_normal(float(np.vdot(left, left)), radius, problem.p0)
        if gap < best.gap:
            value = problem.objective(*problem.total("numbers"))
            best = Corrected(feasible, value, gap, start.curvature, start.iterations + iteration)
        if gap <= tol:
            break
        apart = float(np.linalg.norm(free - feasible))
        moved = float(np.linalg.norm(feasible - before))
        factor = float(np.clip(apart / max(moved, 1e-300), 0.2, 5.0))
        penalty, dual = penalty * factor, dual / factor
    return best
