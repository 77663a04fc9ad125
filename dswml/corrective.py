"""The corrective step: minimise F(U M) exactly over all M in the nuclear ball, for a fixed basis U.

`solve` is an accelerated projected gradient method on the sums of the small problem; it reads no data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .duality import GapBound
from .small_problem import Quadratic

__all__ = ["Corrected", "project_nuclear", "solve"]

Array = npt.NDArray[Any]

#: Iterations between two looks at the gap of the small problem.
CHECK_EVERY = 4
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
    squares, vectors = np.linalg.eigh(gram)
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
    """Solution of the small problem: M^T and F there, its gap, and the curvature met."""

    mt: Array
    objective: float
    gap: float
    curvature: float
    iterations: int


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
    found = _accelerated_gradient(problem, start, radius, tol, curvature, GRADIENT_STEPS, bound)
    if found.gap <= tol:
        return found
    if problem.decomposes:
        split = _splitting(problem, found, radius, tol, bound)
        return split if split.gap < found.gap else found
    return _accelerated_gradient(problem, found.mt, radius, tol, found.curvature, 4 * GRADIENT_STEPS, bound)


def _accelerated_gradient(
    problem: Quadratic,
    start: Array,
    radius: float,
    tol: float,
    curvature: float,
    max_iter: int,
    bound: GapBound | None,
) -> Corrected:
    """Accelerated projected gradient with adaptive restart.

    F is quadratic, so its gradient at an extrapolated point is the extrapolated gradient and an
    iteration costs one multiplication with the statistics. The step follows the largest curvature
    met along the way, which is far below the largest there is.
    """
    problem.begin(start)
    momentum, weight, moved, iteration = 1.0, 0.0, False, 0
    curvature *= 0.3
    while True:
        gap, slope, overlap = _look(problem, moved, radius, bound)
        moved = False
        if gap <= tol or iteration >= max_iter:
            break
        for _ in range(CHECK_EVERY):
            while True:
                gram = problem.total("ahead_gram", moved, weight, curvature)
                moved = False
                factors = shrinking_factors(gram, radius)
                length, met, onward = problem.total("move", weight, curvature, factors)
                if met <= curvature * length * (1 + 1e-10):
                    break
                curvature = max(1.3 * curvature, 1.01 * met / length)
            if onward < 0:
                momentum = 1.0
            following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            weight = float((momentum - 1) / following)
            momentum, moved = following, True
            iteration += 1
    objective = problem.objective(slope, overlap)
    return Corrected(np.concatenate(problem.each("iterate")), objective, gap, float(curvature), iteration)


def _look(
    problem: Quadratic, moved: bool, radius: float, bound: GapBound | None
) -> tuple[float, float, float]:
    """The gap at the iterate, <x, gradient> and <b, x>."""
    sums = problem.total("sums", moved, bound is not None)
    slope, overlap, matrices = sums[0], sums[1], sums[2:]
    side = math.isqrt(matrices.size // (1 if bound is None else 2))
    gram = matrices[: side**2].reshape(side, side)
    if bound is None or not side:
        squares = np.linalg.eigvalsh(gram)
        top = float(np.sqrt(max(squares.max(initial=0.0), 0.0)))
        return float(slope) + radius * top, float(slope), float(overlap)
    squares, vectors = np.linalg.eigh(gram)
    values = np.sqrt(np.maximum(squares, 0))
    inverse = np.divide(1, values, out=np.zeros_like(values), where=values > 1e-13 * values[-1])
    product = matrices[side**2 :].reshape(side, side)
    overlaps = -np.einsum("ij,ij->j", vectors, product @ vectors) * inverse
    wide = problem.statistics.n_labels < problem.statistics.rank
    left = problem.total("gradient_transpose_times", vectors * inverse) if wide else vectors
    gap, _ = bound.gap(left[:, ::-1], values[::-1], overlaps[::-1], float(slope), radius, problem.p0)
    return gap, float(slope), float(overlap)


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
        gap, slope, overlap = _look(problem, False, radius, bound)
        if gap < best.gap:
            value = problem.objective(slope, overlap)
            best = Corrected(feasible, value, gap, start.curvature, start.iterations + iteration)
        if gap <= tol:
            break
        apart = float(np.linalg.norm(free - feasible))
        moved = float(np.linalg.norm(feasible - before))
        factor = float(np.clip(apart / max(moved, 1e-300), 0.2, 5.0))
        penalty, dual = penalty * factor, dual / factor
    return best
