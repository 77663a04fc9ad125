"""F(U M) as a function of M for a fixed basis U, its gradient, and the iterates of its solution.

With Z = X U the objective separates over labels,

    N F(U M) = sum_l m_l^T (p0 G0 + (p1 - p0) C_l) m_l - 2 p1 b_l^T m_l  + p1 nnz(Y),

where G0 = Z^T Z, b_l and C_l sum z_i and z_i z_i^T over the rows in which label l is active.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from . import kernels
from .label_sums import Statistics

__all__ = ["Part", "Quadratic", "cut_labels"]

Array = npt.NDArray[Any]
T = TypeVar("T")

#: Labels and their positives in a part of the small problem, and most parts; threads share the parts.
PART_WORK = 32_768
MAX_PARTS = 16
#: Entries of M that are worked on at a time: a few such arrays fit into a processor's cache.
STEP_ENTRIES = 2**15
#: Largest L r^3 for which the Hessians of all labels are decomposed, and a hundred times the largest L r^2.
DECOMPOSED_WORK = 2e9


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

    def gradient(self, mt: Array, power: bool = True) -> Array:
        """Gradient with respect to M^T, with the part of ||XW||^2 or without."""
        out = np.empty(mt.shape)
        self._all(lambda part: part.gradient(part.of(mt), part.of(out), power))
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

    def gradient(self, mt: Array, out: Array, power: bool = True) -> None:
        """Gradient with respect to M^T of these labels, with the part of ||XW||^2 or without."""
        for labels in self._steps:
            added = mt[labels] @ (self.p0 * self.statistics.g0) if power else 0.0
            self._gradient(labels, mt[labels], added, out[labels])

    def _gradient(self, labels: slice, mt: Array, power: Array | float, out: Array) -> None:
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
        self.x, self._g = mt, np.empty(mt.shape)
        self.gradient(mt, self._g)
        self._spare: tuple[Array, Array] | None = None
        self._left: Array | None = None
        self._start = mt  # the caller's, never written to

    def iterate(self, share: float) -> Array:
        """Make the last step, and return the iterate."""
        self._accept(share)
        self._spare = None
        return self.x

    def residual(self) -> Array:
        """Return what the gradient where the last step led to and a normal of the ball do not cancel."""
        assert self._left is not None
        return self._left

    def numbers(self) -> Array:
        """<x, gradient> and <b, x>."""
        return np.array([np.vdot(self.x, self._g), np.vdot(self.of(self.statistics.positives), self.x)])

    def slope_and_gram(self, share: float) -> Array:
        """Make the last step; return <x, gradient> and the Gram matrix of the gradient."""
        self._accept(share)
        return np.append(np.vdot(self.x, self._g), self.gradient_gram(self.wide))

    def gradient_gram(self, wide: bool = False) -> Array:
        """Gram matrix of the gradient between directions or, where it is wide, labels."""
        return self._gram(lambda labels: self._g[labels], wide)

    def gradient_times(self, columns: Array) -> Array:
        """Product of the gradient (labels x directions) with a few columns."""
        product: Array = self._g @ columns
        return product

    def ahead_gram(self, share: float, curvature: float) -> Array:
        """Make the last step; return the Gram matrix of the point that one along the gradient leads to."""
        self._accept(share)
        return self._gram(lambda labels: self._ahead(labels, curvature), self.wide)

    def _gram(self, rows: Callable[[slice], Array], wide: bool) -> Array:
        side = self.stop - self.first if wide else self.statistics.rank
        out = np.zeros((side, side))
        for labels in self._steps:
            piece = rows(labels)
            out += piece @ piece.T if wide else piece.T @ piece
        return out

    def _ahead(self, labels: slice, curvature: float) -> Array:
        """Where a step along the gradient leads."""
        out = np.empty(self.x[labels].shape)
        kernels.gradient_step(self.x[labels], self._g[labels], curvature, out)
        return out

    def move(self, curvature: float, factors: tuple[Array, Array] | None, inverse: Array | None) -> Array:
        """Find where the projected step leads, d = x' - x and e = g' - g; the step is not made yet.

        Returns <g, d>, <d, d>, <d, e>, <e, e> and, given the inverse of a factor of G0, the square of what
        that makes of e - curvature d, which is g' and a normal of the ball at x' together.
        """
        if self._spare is None:
            self._spare = (np.empty(self.x.shape), np.empty(self.x.shape))
        x_new, g_new = self._spare
        if self._left is None:
            self._left = np.empty(self.x.shape if inverse is not None else 0)
        out = np.zeros(5)
        g0 = self.p0 * self.statistics.g0
        if factors is not None and not self.wide:
            g0 = factors[1] @ g0
        for labels in self._steps:
            ahead = self._ahead(labels, curvature)
            if factors is None:
                x_new[labels] = low = ahead
            elif self.wide:
                x_new[labels] = low = factors[0] @ (factors[1] @ ahead)
            else:
                low = ahead @ factors[0]
                np.matmul(low, factors[1], out=x_new[labels])
            self._gradient(labels, x_new[labels], low @ g0, g_new[labels])
            left = self._left[labels] if inverse is not None else np.empty(ahead.shape)
            points = self.x[labels], self._g[labels], x_new[labels], g_new[labels]
            out[:4] += kernels.step_sums(*points, curvature, left)
            if inverse is not None:
                left = left @ inverse
                out[4] += np.vdot(left, left)
        return out

    def _accept(self, share: float) -> None:
        """Go a share of the way to the point that was found last."""
        if not share:
            return
        assert self._spare is not None
        x_new, g_new = self._spare
        if share < 1:
            kernels.blend(self.x, share, x_new)
            kernels.blend(self._g, share, g_new)
        self._spare = None if self.x is self._start else (self.x, self._g)
        self.x, self._g = x_new, g_new
