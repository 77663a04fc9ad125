"""The corrective step: minimise F(U M) exactly over all M in the nuclear ball, for a fixed basis U.

With Z = X U the objective separates over labels,

    N F(U M) = sum_l m_l^T (p0 G0 + (p1 - p0) C_l) m_l - 2 p1 b_l^T m_l  + p1 nnz(Y),

where G0 = Z^T Z, b_l and C_l sum z_i and z_i z_i^T over the rows in which label l is active.
`Statistics` holds these sums; they depend neither on the radius nor on p0. `solve` is an
accelerated projected gradient method on them. Nothing here reads the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import kernels
from .duality import GapBound
from .errors import UsageError

__all__ = [
    "Corrected",
    "Part",
    "Quadratic",
    "Statistics",
    "cut_labels",
    "plan_directions",
    "project_nuclear",
    "solve",
]

Array = npt.NDArray[Any]
T = TypeVar("T")

#: A label with this many positives per direction is held as its Gram matrix.
GRAM_FROM = 2
#: Labels and their positives in a part of the small problem, and most parts; threads share the parts.
PART_WORK = 32_768
MAX_PARTS = 16
#: Entries of M that are worked on at a time: a few such arrays fit into a processor's cache.
STEP_ENTRIES = 2**15
#: Iterations between two looks at the gap of the small problem.
CHECK_EVERY = 4
#: Gradient steps before splitting takes over, and steps of the latter.
GRADIENT_STEPS = 600
SPLITTING_STEPS = 2000
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
    themselves, whichever is smaller to multiply with. What is listed in ``place`` arrives as sums
    from the workers; the rest is made here from the rows.

    Parameters
    ----------
    label_counts : ndarray (L,)
        Positives of each label.
    place : ndarray (L,)
        Position of a label among those summed on the workers, or -1.
    indptr, rows : ndarray
        For each label without one, which of the light rows are active (CSC).
    """

    def __init__(self, label_counts: Array, place: Array, indptr: Array, rows: Array) -> None:
        self.counts, self.indptr, self.rows = label_counts, indptr, rows
        self.n_labels, self.nnz = label_counts.size, int(label_counts.sum())
        self._summed = np.flatnonzero(place >= 0)[np.argsort(place[place >= 0])]
        self._light = np.flatnonzero(place < 0)
        self.z = np.zeros((int(rows.max(initial=-1)) + 1, 0))
        self._empty()

    def _empty(self) -> None:
        self.rank = 0
        #: Columns that came at a time, since the basis was last rotated.
        self.widths: list[int] = []
        self.g0 = np.zeros((0, 0))
        self.positives = np.zeros((self.n_labels, 0))
        self.grams = np.zeros((self._summed.size, 0, 0))
        self.place = np.full(self.n_labels, -1, dtype=np.int64)
        self.place[self._summed] = np.arange(self._summed.size)
        self.z = self.z[:, :0]

    def append(
        self, g0_columns: Array, positives: Array, z: Array | None = None, grams: Array | None = None
    ) -> None:
        """Add new columns: G0's (r x m), the summed labels' b_l, the light rows' and the summed C_l's.

        Without the light rows the C_l are not held, which does for p0 = 1/2.
        """
        old = self.rank
        self._append_g0(g0_columns)
        rank = self.rank
        sums = np.empty((self.n_labels, rank))
        sums[:, :old] = self.positives
        self.positives = sums
        sums[self._summed, old:] = positives
        if z is None:
            return
        kernels.add_up_rows(self.indptr, self.rows, self._light, z, sums[:, old:])
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

    def _append_g0(self, columns: Array) -> None:
        self.rank += columns.shape[1]
        self.widths = [*self.widths, columns.shape[1]]
        self.g0 = _bordered(self.g0[None], columns[None])[0]

    def rotate(self, rotation: Array) -> None:
        """Replace the basis U by ``U @ rotation`` (r x r', orthonormal columns)."""
        summed = slice(self._summed.size)
        g0, positives = rotation.T @ self.g0 @ rotation, self.positives[self._summed] @ rotation
        z = grams = None
        if self.z.shape[1]:
            z = self.z @ rotation
            grams = np.matmul(rotation.T, np.matmul(self.grams[summed], rotation))
        self._empty()
        self.append(g0, positives, z, grams)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: arrays, and the widths of the pieces."""
        return {name: getattr(self, name) for name in ("g0", "positives", "grams", "z", "place", "widths")}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a state, with sums over rows made again if another kind of statistics left them out."""
        for name, value in state.items():
            setattr(self, name, value)
        self.rank = self.g0.shape[1]
        if self.positives.shape[1] < self.rank:
            self._remake()

    def _remake(self) -> None:
        g0, z, widths = self.g0, self.z, self.widths
        self._empty()
        self.extend(g0, z, widths)

    def extend(self, g0: Array, z: Array, widths: Sequence[int]) -> None:
        """Append pieces of the given widths, after which G0 is ``g0``, when no label is summed elsewhere."""
        start = self.rank
        for width in widths:
            old, new = self.rank, self.rank + width
            piece = np.ascontiguousarray(z[:, old - start : new - start])
            self.append(g0[:new, old:new], np.zeros((0, width)), piece)


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
        Threads to share the labels between; the sums have the same bits with or without.
    """

    def __init__(
        self, statistics: Statistics, n_rows: int, p0: float, pool: ThreadPoolExecutor | None = None
    ) -> None:
        self.statistics, self.n_rows, self.p0, self.pool = statistics, n_rows, p0, pool
        #: Where labels are fewer than directions, their Gram matrices are the smaller ones.
        self.wide = statistics.n_labels < statistics.rank
        self._parts = [
            Part(statistics, first, stop, n_rows, p0, wide=self.wide)
            for first, stop in cut_labels(statistics.counts, statistics.rank)
        ]

    @property
    def decomposes(self) -> bool:
        """Whether the problem is small enough for the Hessians of all labels to be decomposed."""
        rank = self.statistics.rank
        return self.statistics.n_labels * rank**2 * max(rank, 100) <= DECOMPOSED_WORK

    def gradient(self, mt: Array) -> Array:
        """Gradient with respect to M^T."""
        out = np.empty(mt.shape)
        self._all(lambda part: part.gradient(part.of(mt), part.of(out)))
        return out

    def begin(self, mt: Array) -> None:
        """Set the iterates of all parts to M^T."""
        self._all(lambda part: part.begin(part.of(mt)))

    def each(self, name: str, *arguments: Any) -> list[Any]:
        """Return what a method of all parts returns, in the order of the labels."""
        return self._all(lambda part: getattr(part, name)(*arguments))

    def total(self, name: str, *arguments: Any) -> Any:
        """Sum what a method of all parts returns, in the order of the labels."""
        first, *rest = self.each(name, *arguments)
        for one in rest:
            first += one
        return first

    def _all(self, call: Callable[[Part], T]) -> list[T]:
        if self.pool is None or len(self._parts) == 1:
            return [call(part) for part in self._parts]
        return list(self.pool.map(call, self._parts))

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
        return self.objective(float(np.vdot(mt, gradient)), float(np.vdot(self.statistics.positives, mt)))

    def objective(self, slope: float, overlap: float) -> float:
        """F at M, given <M, gradient> and <b, M>."""
        p1 = 1 - self.p0
        return 0.5 * slope + p1 / self.n_rows * (self.statistics.nnz - overlap)


def cut_labels(label_counts: Array, rank: int) -> list[tuple[int, int]]:
    """Ranges of labels of about the same work, one where they are no more than directions.

    Examples
    --------
    >>> cut_labels(np.full(100, 10 * PART_WORK // 100), rank=50)[:2]
    [(0, 10), (10, 20)]
    """
    work = np.cumsum(label_counts + 1)
    parts = int(np.clip(work[-1] // PART_WORK, 1, MAX_PARTS)) if work.size > rank else 1
    ends = np.searchsorted(work, work[-1] * np.arange(1, parts) / parts) + 1 if parts > 1 else ()
    cuts = sorted({0, work.size, *(int(end) for end in ends)})
    return list(pairwise(cuts))


class Part:
    """Some of the labels of the small problem, with the iterates of its solution.

    It gives sums over its labels: a few numbers and r x r matrices. All work is done a few labels at a
    time, so that what lies between two products stays in the processor's cache.
    """

    def __init__(
        self, statistics: Statistics, first: int, stop: int, n_rows: int, p0: float, *, wide: bool = False
    ) -> None:
        self.statistics, self.first, self.stop, self.n_rows, self.p0 = statistics, first, stop, n_rows, p0
        self.wide = wide
        step = stop - first if self.wide else max(STEP_ENTRIES // max(statistics.rank, 1), 1)
        self._steps = [slice(a, min(a + step, stop - first)) for a in range(0, stop - first, max(step, 1))]

    def of(self, matrix: Array) -> Array:
        """Return the rows of this part."""
        return matrix[self.first : self.stop]

    def gradient(self, mt: Array, out: Array) -> None:
        """Gradient with respect to M^T of these labels."""
        for labels in self._steps:
            self._gradient(labels, mt[labels], mt[labels] @ (self.p0 * self.statistics.g0), out[labels])

    def _gradient(self, labels: slice, mt: Array, power: Array, out: Array) -> None:
        """The same for a few of them, given p0 M^T G0."""
        stats = self.statistics
        mine = slice(self.first + labels.start, self.first + labels.stop)
        if self.p0 == 0.5:  # active and inactive labels weigh the same, and C_l drops out
            out[:] = power
        else:
            count, place = labels.stop - labels.start, stats.place[mine]
            indptr = stats.indptr[mine.start : mine.stop + 1]
            kernels.add_gram_products(stats.grams, place, 0, count, mt, out)
            kernels.add_row_products(indptr, stats.rows, place, 0, count, stats.z, mt, out)
            out *= 1 - 2 * self.p0
            out += power
        out -= (1 - self.p0) * stats.positives[mine]
        out *= 2 / self.n_rows

    def begin(self, mt: Array) -> None:
        """Set the iterate."""
        self.x = self._x_before = mt
        self._g = np.empty(mt.shape)
        self.gradient(mt, self._g)
        self._g_before = self._g
        self._spare: list[tuple[Array, Array]] = []
        self._start = mt  # the caller's, never written to

    def iterate(self) -> Array:
        """Return the iterate, the last one: what led to it is dropped."""
        self._spare, self._x_before, self._g_before = [], self.x, self._g
        return self.x

    def sums(self, moved: bool, tight: bool) -> Array:
        """<x, gradient>, <b, x>, the Gram matrix of the gradient, and its product with x if asked for."""
        self._accept(moved)
        numbers = [np.vdot(self.x, self._g), np.vdot(self.of(self.statistics.positives), self.x)]
        matrices = [self.gradient_gram(self.wide)]
        if tight:
            matrices.append(self.x @ self._g.T if self.wide else self.x.T @ self._g)
        return np.concatenate([numbers, *(matrix.ravel() for matrix in matrices)])

    def gradient_gram(self, wide: bool = False) -> Array:
        """Gram matrix of the gradient between directions or, where it is wide, labels."""
        return self._gram(lambda labels: self._g[labels], wide)

    def gradient_times(self, columns: Array) -> Array:
        """Product of the gradient (labels x directions) with a few columns."""
        product: Array = self._g @ columns
        return product

    def gradient_transpose_times(self, columns: Array) -> Array:
        """Product of its transpose with a few columns."""
        product: Array = self._g.T @ columns
        return product

    def ahead_gram(self, moved: bool, weight: float, curvature: float) -> Array:
        """Gram matrix of the point that a step from the extrapolated iterate leads to."""
        self._accept(moved)
        return self._gram(lambda labels: self._ahead(labels, weight, curvature)[2], self.wide)

    def _gram(self, rows: Callable[[slice], Array], wide: bool) -> Array:
        side = self.stop - self.first if wide else self.statistics.rank
        out = np.zeros((side, side))
        for labels in self._steps:
            piece = rows(labels)
            out += piece @ piece.T if wide else piece.T @ piece
        return out

    def _ahead(self, labels: slice, weight: float, curvature: float) -> tuple[Array, Array, Array]:
        """Extrapolated iterate y, the gradient there, and where the step from y leads."""
        y, gradient = self.x[labels], self._g[labels]
        if weight:
            y = y + weight * (y - self._x_before[labels])
            gradient = gradient + weight * (gradient - self._g_before[labels])
        return y, gradient, y - gradient / curvature

    def move(self, weight: float, curvature: float, factors: tuple[Array, Array] | None) -> Array:
        """Make the projected step from y to x'; return ||x' - y||^2, <x' - y, g' - g_y>, <x' - y, x' - x>."""
        if not self._spare:
            self._spare.append((np.empty(self.x.shape), np.empty(self.x.shape)))
        x_new, g_new = self._spare[0]
        out = np.zeros(3)
        g0 = self.p0 * self.statistics.g0
        if factors is not None and not self.wide:
            g0 = factors[1] @ g0
        for labels in self._steps:
            y, gradient, ahead = self._ahead(labels, weight, curvature)
            if factors is None:
                x_new[labels] = low = ahead
            elif self.wide:
                x_new[labels] = low = factors[0] @ (factors[1] @ ahead)
            else:
                low = ahead @ factors[0]
                np.matmul(low, factors[1], out=x_new[labels])
            self._gradient(labels, x_new[labels], low @ g0, g_new[labels])
            moved = x_new[labels] - y
            out += (
                np.vdot(moved, moved),
                np.vdot(moved, g_new[labels] - gradient),
                np.vdot(moved, x_new[labels] - self.x[labels]),
            )
        return out

    def _accept(self, moved: bool) -> None:
        """Make the new point the iterate, if all parts together have moved on."""
        if not moved:
            return
        before = (self._x_before, self._g_before)
        self._x_before, self._g_before = self.x, self._g
        self.x, self._g = self._spare.pop()
        if before[0] is not self._start:
            self._spare.append(before)


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
