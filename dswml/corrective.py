"""The corrective step: minimise F(U M) exactly over all M in the nuclear ball, for a fixed basis U.

With Z = X U the objective separates over labels,

    N F(U M) = sum_l m_l^T (p0 G0 + (p1 - p0) C_l) m_l - 2 p1 b_l^T m_l  + p1 nnz(Y),

where G0 = Z^T Z, b_l and C_l sum z_i and z_i z_i^T over the rows in which label l is active.
`Statistics` holds these sums; they depend neither on the radius nor on p0. `solve` is an
accelerated projected gradient method on them. Nothing here reads the data.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .errors import UsageError

__all__ = [
    "Corrected",
    "Quadratic",
    "Statistics",
    "plan_directions",
    "project_nuclear",
    "solve",
    "top_singular_value",
]

Array = npt.NDArray[Any]

#: A label with this many positives per direction is held as its Gram matrix.
GRAM_FROM = 2
#: Work (multiplications) below which threads cost more than they bring.
SERIAL_WORK = 1_000_000
#: Iterations between two looks at the gap of the small problem.
CHECK_EVERY = 8
#: Gradient steps before splitting takes over, and steps of the latter.
GRADIENT_STEPS = 600
SPLITTING_STEPS = 2000
#: Steps with rough gradients at most.
ROUGH_STEPS = 160
#: Largest L r^3 for which the Hessians of all labels are decomposed, and a hundred times the largest L r^2.
DECOMPOSED_WORK = 2e9


def plan_directions(n_rows: int, n_features: int, label_counts: Array, limit: int) -> tuple[int, Array]:
    """Return how many directions fit into ``limit`` bytes, and which labels the workers should sum.

    Counted are U and X^T X U, the iterates of the small problem, and the statistics: the rows of
    Z where they all fit, and otherwise only those of labels with fewer positives than directions.
    The plan depends on these numbers alone, so it is the same on every machine.

    Examples
    --------
    >>> cap, place = plan_directions(1000, 50, np.full(20, 100), limit=2**30)
    >>> cap, int(place.max())
    (50, -1)
    """
    n_labels = label_counts.size
    ascending = np.sort(label_counts)

    def needed(rank: int, heavy: Array) -> int:
        light_rows = min(n_rows, int(label_counts[~heavy].sum()))
        # On the way to this rank labels lose their Gram matrix one by one: the most that there ever are.
        ranks = np.unique(np.append(np.clip((ascending - 1) // GRAM_FROM, 1, rank), rank))
        grams = n_labels - np.searchsorted(ascending, GRAM_FROM * ranks, side="right")
        entries = int((np.maximum(grams, np.count_nonzero(heavy)) * ranks**2).max())
        return 8 * (rank * (3 * n_features + 8 * n_labels + 2 * light_rows) + 3 * entries)

    def fits(rank: int) -> Array | None:
        for heavy in (np.zeros(n_labels, dtype=bool), label_counts > rank):
            if needed(rank, heavy) <= limit:
                return heavy
        return None

    low, high = 1, n_features
    heavy = fits(low)
    if heavy is None:
        raise UsageError(
            f"one direction of {n_features} features and {n_labels} labels needs more than the memory limit "
            f"of {limit / 2**20:.0f} MiB: raise memory_limit"
        )
    while low < high:
        middle = (low + high + 1) // 2
        found = fits(middle)
        if found is None:
            high = middle - 1
        else:
            low, heavy = middle, found
    place = np.full(n_labels, -1, dtype=np.int64)
    place[heavy] = np.arange(np.count_nonzero(heavy))
    return low, place


class Statistics:
    """Sums over the data for a growing basis: G0, b_l, and C_l or the rows it is made of.

    A label with many positives is held as its Gram matrix C_l, one with few as the rows z_i
    themselves, whichever is smaller to multiply with. Gram matrices listed in ``place`` arrive
    as sums from the workers; the others are made here from the rows.

    Parameters
    ----------
    label_counts : ndarray (L,)
        Positives of each label.
    place : ndarray (L,)
        Position of a label among the Gram matrices summed on the workers, or -1.
    indptr, rows : ndarray
        For each label without one, which of the light rows are active (CSC).
    """

    def __init__(self, label_counts: Array, place: Array, indptr: Array, rows: Array) -> None:
        self.counts, self.indptr, self.rows = label_counts, indptr, rows
        self.n_labels, self.nnz = label_counts.size, int(label_counts.sum())
        self._summed = np.flatnonzero(place >= 0)[np.argsort(place[place >= 0])]
        self.place = place.astype(np.int64)
        self.rank = 0
        self.g0 = np.zeros((0, 0))
        self.positives = np.zeros((self.n_labels, 0))
        self.grams = np.zeros((self._summed.size, 0, 0))
        n_light = int(rows.max(initial=-1)) + 1
        self.z = np.zeros((n_light, 0))

    def append(
        self, g0_columns: Array, positives: Array, z: Array | None = None, grams: Array | None = None
    ) -> None:
        """Add new columns: G0's (r x m), b's (L x m), the light rows' and the summed Gram matrices'.

        Without the light rows the C_l are not held, which does for p0 = 1/2.
        """
        old, new = self.rank, g0_columns.shape[1]
        self.rank = rank = old + new
        self.g0 = _bordered(self.g0[None], g0_columns[None])[0]
        self.positives = np.hstack([self.positives, positives])
        if z is None:
            return
        self.z = np.hstack([self.z, z])
        made = np.setdiff1d(np.flatnonzero(self.counts > GRAM_FROM * rank), self._summed)
        grown = np.empty((self._summed.size + made.size, rank, rank))
        if grams is not None:
            grown[: self._summed.size] = _bordered(self.grams[: self._summed.size], grams)
        for position, label in enumerate(made, start=self._summed.size):
            active = self.z[self.rows[self.indptr[label] : self.indptr[label + 1]]]
            before = self.place[label]
            corner = self.grams[before] if before >= 0 else active[:, :old].T @ active[:, :old]
            grown[position] = _bordered(corner[None], (active.T @ active[:, old:])[None])[0]
        self.grams = grown
        self.place = np.full(self.n_labels, -1, dtype=np.int64)
        self.place[np.concatenate([self._summed, made])] = np.arange(len(grown))

    def rotate(self, rotation: Array) -> None:
        """Replace the basis U by ``U @ rotation`` (r x r', orthonormal columns)."""
        self.rank = rotation.shape[1]
        self.g0 = rotation.T @ self.g0 @ rotation
        self.positives = self.positives @ rotation
        if self.z.shape[1]:
            self.z = self.z @ rotation
            self.grams = np.matmul(rotation.T, np.matmul(self.grams, rotation))


def _bordered(corner: Array, columns: Array) -> Array:
    """Symmetric matrices with the given upper left corner and last columns, exactly symmetric."""
    count, rank, new = columns.shape
    old = rank - new
    out = np.empty((count, rank, rank))
    out[:, :old, :old] = corner
    out[:, :, old:] = columns
    out[:, old:, :old] = np.swapaxes(columns[:, :old], 1, 2)
    block = columns[:, old:]
    out[:, old:, old:] = (block + np.swapaxes(block, 1, 2)) / 2
    return out


class Quadratic:
    """F as a function of M for one basis, with its gradient; M is held as M^T (labels x directions).

    Parameters
    ----------
    statistics : Statistics
    n_rows : int
        N, the number of rows the statistics were summed over.
    p0 : float
        Weight of inactive labels.
    pool : ThreadPoolExecutor, optional
        Threads to share the labels between; each label's result is the same with or without.
    """

    def __init__(
        self, statistics: Statistics, n_rows: int, p0: float, pool: ThreadPoolExecutor | None = None
    ) -> None:
        self.statistics, self.n_rows, self.p0, self.pool = statistics, n_rows, p0, pool
        work = np.where(
            statistics.place >= 0,
            statistics.rank**2,
            2 * statistics.rank * np.diff(statistics.indptr),
        )
        total = float(work.sum())
        parts = 1 if pool is None or total < SERIAL_WORK else 4
        ends = np.searchsorted(np.cumsum(work), total * np.arange(1, parts) / parts)
        self._ranges = list(zip([0, *ends], [*ends, statistics.n_labels], strict=True))

    def gradient(self, mt: Array, rough: bool = False) -> Array:
        """Gradient with respect to M^T; a rough one comes of label statistics in single precision."""
        stats = self.statistics
        out: Array = (self.p0 * mt) @ stats.g0
        if self.p0 != 0.5:  # there active and inactive labels weigh the same, and C_l drops out
            out += (1 - 2 * self.p0) * self._label_products(mt, rough)
        out -= (1 - self.p0) * stats.positives
        out *= 2 / self.n_rows
        return out

    def _label_products(self, mt: Array, rough: bool) -> Array:
        """``C_l m_l`` of every label (L x r)."""
        stats = self.statistics
        grams, z = self._rough if rough else (stats.grams, stats.z)
        mt = mt.astype(z.dtype, copy=False)
        out = np.empty_like(mt)

        def share(labels: tuple[int, int]) -> None:
            kernels.add_gram_products(grams, stats.place, *labels, mt, out)
            kernels.add_row_products(stats.indptr, stats.rows, stats.place, *labels, z, mt, out)

        if self.pool is not None and len(self._ranges) > 1:
            list(self.pool.map(share, self._ranges))
        else:
            for labels in self._ranges:
                share(labels)
        return out

    @cached_property
    def _rough(self) -> tuple[Array, Array]:
        """Gram matrices and rows in single precision."""
        return self.statistics.grams.astype(np.float32), self.statistics.z.astype(np.float32)

    def hessians(self) -> Array:
        """Second derivatives with respect to each m_l (L x r x r)."""
        stats = self.statistics
        out = np.zeros((stats.n_labels, stats.rank, stats.rank))
        for label in range(stats.n_labels if self.p0 != 0.5 else 0):
            if stats.place[label] >= 0:
                out[label] = stats.grams[stats.place[label]]
            else:
                active = stats.z[stats.rows[stats.indptr[label] : stats.indptr[label + 1]]]
                out[label] = active.T @ active
        out *= 1 - 2 * self.p0
        out += self.p0 * stats.g0
        out *= 2 / self.n_rows
        return out

    def value(self, mt: Array, gradient: Array) -> float:
        """F at M, given the gradient there."""
        p1 = 1 - self.p0
        linear = p1 / self.n_rows * float(np.vdot(self.statistics.positives, mt))
        return 0.5 * float(np.vdot(mt, gradient)) - linear + p1 * self.statistics.nnz / self.n_rows


def project_nuclear(mt: Array, radius: float) -> Array:
    """Project onto the matrices of nuclear norm at most ``radius``, through the smaller Gram matrix.

    Examples
    --------
    >>> project_nuclear(np.diag([3.0, 1.0]), radius=2.0)
    array([[2., 0.],
           [0., 0.]])
    """
    tall = mt.shape[0] >= mt.shape[1]
    squares, vectors = np.linalg.eigh(mt.T @ mt if tall else mt @ mt.T)
    values = np.sqrt(np.maximum(squares, 0))
    if values.sum() <= radius:
        return mt
    descending = values[::-1]
    counts = np.arange(1, values.size + 1)
    above = np.cumsum(descending) - counts * descending  # exactly 0 for the largest, whatever the scale
    count = counts[np.flatnonzero(above < radius)[-1]]
    vectors, largest = vectors[:, -count:], values[-count:]
    shrunk = (radius - (largest.sum() - count * largest)) / count
    factors = np.clip(shrunk / np.maximum(largest, 1e-300), 0, 1)
    projected: Array = (
        (mt @ (vectors * factors)) @ vectors.T if tall else vectors * factors @ (vectors.T @ mt)
    )
    return projected


def top_singular_value(matrix: Array) -> float:
    """Largest singular value, through the smaller Gram matrix."""
    if not matrix.size:
        return 0.0
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    return float(np.sqrt(max(np.linalg.eigvalsh(gram)[-1], 0.0)))


@dataclass(frozen=True)
class Corrected:
    """Solution of the small problem: M^T, the gradient and F there, its gap, and the curvature met."""

    mt: Array
    gradient: Array
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
    rough: bool = False,
) -> Corrected:
    """Minimise over the nuclear ball to a duality gap of ``tol``.

    Projected gradients need few iterations on data of a sane scale. Where they do not, as with
    features far from the origin, and the problem is small enough, its Hessians are decomposed once
    and splitting, which does not mind their condition, takes over. ``rough`` makes the first steps
    with gradients in single precision; the gap is one in double precision all the same.
    """
    found = _accelerated_gradient(problem, start, radius, tol, curvature, GRADIENT_STEPS, rough)
    if found.gap <= tol:
        return found
    stats = problem.statistics
    if stats.n_labels * stats.rank**2 * max(stats.rank, 100) <= DECOMPOSED_WORK:
        split = _splitting(problem, found, radius, tol)
        return split if split.gap < found.gap else found
    return _accelerated_gradient(problem, found.mt, radius, tol, found.curvature, 4 * GRADIENT_STEPS)


def _accelerated_gradient(
    problem: Quadratic,
    start: Array,
    radius: float,
    tol: float,
    curvature: float,
    max_iter: int,
    rough: bool = False,
) -> Corrected:
    """Accelerated projected gradient with adaptive restart.

    F is quadratic, so its gradient at an extrapolated point is the extrapolated gradient and an
    iteration costs one multiplication with the statistics. The step follows the largest curvature
    met along the way, which is far below the largest there is.
    """
    x = start
    gradient_x = problem.gradient(x, rough)
    y, gradient_y = x, gradient_x
    momentum, iteration = 1.0, 0
    curvature *= 0.3
    while True:
        gap = _gap(x, gradient_x, radius)
        done = gap <= tol or iteration >= max_iter
        if rough and (done or iteration >= ROUGH_STEPS):
            rough = False
            gradient_x = problem.gradient(x)
            y, gradient_y, momentum = x, gradient_x, 1.0
            continue
        if done:
            break
        for _ in range(CHECK_EVERY):
            while True:
                x_new = project_nuclear(y - gradient_y / curvature, radius)
                gradient_new = problem.gradient(x_new, rough)
                move = x_new - y
                length = float(np.vdot(move, move))
                met = float(np.vdot(move, gradient_new - gradient_y))
                if met <= curvature * length * (1 + 1e-10):
                    break
                curvature = max(1.3 * curvature, 1.01 * met / length)
            if float(np.vdot(y - x_new, x_new - x)) > 0:
                momentum = 1.0
            following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            weight = (momentum - 1) / following
            y = x_new + weight * (x_new - x)
            gradient_y = gradient_new + weight * (gradient_new - gradient_x)
            x, gradient_x, momentum = x_new, gradient_new, following
            iteration += 1
    return Corrected(x, gradient_x, problem.value(x, gradient_x), gap, curvature, iteration)


def _splitting(problem: Quadratic, start: Corrected, radius: float, tol: float) -> Corrected:
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
        gradient = problem.gradient(feasible)
        gap = _gap(feasible, gradient, radius)
        if gap < best.gap:
            value = problem.value(feasible, gradient)
            best = Corrected(feasible, gradient, value, gap, start.curvature, start.iterations + iteration)
        if gap <= tol:
            break
        apart = float(np.linalg.norm(free - feasible))
        moved = float(np.linalg.norm(feasible - before))
        factor = float(np.clip(apart / max(moved, 1e-300), 0.2, 5.0))
        penalty, dual = penalty * factor, dual / factor
    return best


def _gap(mt: Array, gradient: Array, radius: float) -> float:
    return float(np.vdot(mt, gradient)) + radius * top_singular_value(gradient)
