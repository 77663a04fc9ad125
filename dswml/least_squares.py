"""Least squares over the nuclear ball, from X^T X and X^T Y alone: what uniform weights come to.

With p0 = 1/2 the objective is

    2 N F(W) = tr(W^T G W) - 2 tr(B^T W) + nnz(Y),    G = X^T X, B = X^T Y,

so where D is small one read of the data serves all radii: what follows here reads nothing, and
takes a few steps of `dswml.splitting`.

What the projection takes away, U, is normal to the ball at the Z that it leaves: <U, V - Z> <= 0 for all V in
the ball. So with E = grad F(Z) + penalty / N * U the bound of `dswml.duality` has no linear term, and

    gap = N / 2 * tr(E^T G^+ E)

is at hand after every step for the price of a sum of squares.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from . import kernels
from .corrective import solve
from .duality import ridge
from .label_sums import Statistics
from .small_problem import Quadratic
from .splitting import Spectrum, Splitting, usual_penalty

__all__ = ["LeastSquares", "step_ahead"]

Array = npt.NDArray[Any]

#: Steps at most.
MAX_STEPS = 200
#: The next solution is expected among so many times as many vectors of labels as the last one used, and so
#: many besides; there it is sought in a few steps, and to this share of the tolerance.
TIMES, BESIDES, FRAME_STEPS, CLOSER = 3, 10, 8, 0.3
#: How far the line through two solutions is followed, and up to where it is better than a ray: in units of
#: the step between them.
FARTHEST, NEAR = 2.0, 4.0


class LeastSquares:
    """Uniform weights on some rows; a radius begins where those before it lead to expect its solution.

    Parameters
    ----------
    square : ndarray (D, D)
        X^T X.
    cross : ndarray (L, D)
        Y^T X.
    n_rows, positives : int
        N and nnz(Y).
    dtype : str
        Type in which the products were made.
    spectrum : Spectrum, optional
        Of X^T X, where it is known.

    Examples
    --------
    One feature with X^T X = 1 and one label with X^T Y = 1: F(w) = (w - 1)^2 / 2.

    >>> one = np.ones((1, 1))
    >>> problem = LeastSquares(one, one, n_rows=1, positives=1)
    >>> objective, gap = problem.solve(radius=0.5, tol=1e-6)
    >>> round(objective, 6), bool(gap <= 1e-6 * objective)
    (0.125, True)
    >>> u, mt = problem.factors()
    >>> (u @ mt.T).round(6)
    array([[0.5]])
    """

    def __init__(
        self,
        square: Array,
        cross: Array,
        n_rows: int,
        positives: int,
        dtype: str = "float64",
        spectrum: Spectrum | None = None,
    ) -> None:
        self.n_rows, self.positives, self.square = n_rows, positives, square
        # No W has right vectors outside the row space of B, so labels are replaced by a basis of that.
        self.frame: Array | None = None
        if len(cross) > len(square):
            self.frame, cross = np.linalg.qr(cross)
        self.cross: Array = cross
        self.ridge = ridge(square, dtype)
        self.spectrum = spectrum
        # None where the last solution is that without the ball.
        self.steps: Splitting | None = None
        self._behind: list[tuple[float, Array]] = []
        free = self.free if spectrum is None else self._free_in(spectrum)
        squares = np.linalg.eigvalsh(free @ free.T)
        #: Nuclear norm of the minimum without the ball.
        self.free_norm = float(np.sqrt(np.maximum(squares, 0)).sum())

    @cached_property
    def turned(self) -> Array:
        """Y^T X in the eigenvectors of G."""
        if self.spectrum is None:
            self.spectrum = Spectrum.of(self.square)
        turned: Array = self.cross @ self.spectrum.vectors
        return turned

    def _free_in(self, spectrum: Spectrum) -> Array:
        """The minimum without the ball in the eigenvectors of G; nothing where G is nothing."""
        if self.ridge <= 0:
            return np.zeros_like(self.cross)
        minimum: Array = self.turned / (spectrum.values + self.ridge)
        return minimum

    @cached_property
    def free(self) -> Array:
        """Transpose of the minimum without the ball."""
        if self.spectrum is not None:
            return self._turned_back(self._free_in(self.spectrum))
        if self.ridge <= 0:
            return np.zeros_like(self.cross)
        ridged = self.square.copy()
        ridged.flat[:: len(ridged) + 1] += self.ridge
        # Columns first, as LAPACK has them: it is the same matrix, without copies.
        factor = scipy.linalg.cho_factor(ridged.T, overwrite_a=True, check_finite=False)
        free: Array = scipy.linalg.cho_solve(factor, self.cross.T, check_finite=False).T
        return free

    def _begin(self) -> Splitting:
        """Go over to the eigenvectors of G, and begin at W = 0."""
        turned, nothing = self.turned, np.zeros_like(self.cross)
        assert self.spectrum is not None
        values = self.spectrum.values
        return Splitting(values, turned, nothing, turned, usual_penalty(values))

    def solve(self, radius: float, tol: float, floor: float = 0.0) -> tuple[float, float]:
        """Minimise to a gap of ``tol`` times F, or ``floor`` where that is more; return F and the gap."""
        if radius >= self.free_norm:  # the ball does not bind
            objective, gap = self._look_free(radius)
            if gap <= tol * max(objective, floor):
                self.steps = None
                return objective, gap
        if self.steps is None:
            self.steps = self._begin()
            self._behind = []
        else:
            self._go_on(self.steps, radius)
        found = self._bound(self.steps, radius, tol, floor)
        self._behind = [*self._behind[-1:], (radius, self.steps.z)]
        return found

    def _go_on(self, steps: Splitting, radius: float) -> None:
        """Begin where the radii so far lead to expect the solution: on the line through two, or on a ray."""
        (before, old), (last, new) = self._behind[0], self._behind[-1]
        if radius - last > NEAR * abs(last - before):
            steps.begin(radius / last * new)
            steps.taken = (steps.turned - steps.values * steps.z) / steps.penalty
        else:
            steps.begin(new + step_ahead(before, last, radius) * (new - old))

    def _look_free(self, radius: float) -> tuple[float, float]:
        """F and the gap at the free minimum: E is the gradient there, which the ridge leaves."""
        change = self.free @ self.square
        change -= self.cross
        slope, overlap = float(np.vdot(self.free, change)), float(np.vdot(self.free, self.cross))
        # It is -ridge times the minimum, so that all terms of the gap are of the size of the ridge.
        size = float(np.linalg.norm(change))
        gap = (size**2 / max(self.ridge, np.finfo(float).tiny) / 2 + 2 * radius * size) / self.n_rows
        return self._objective(slope, overlap), gap

    def _bound(self, steps: Splitting, radius: float, tol: float, floor: float) -> tuple[float, float]:
        """Minimise where the ball binds."""
        self._in_frame(steps, radius, tol, floor)
        for _ in range(MAX_STEPS):
            steps.step(radius)
            objective, gap = self._look(steps, radius)
            if gap <= tol * max(objective, floor):
                return objective, gap
        return self._otherwise(steps, radius, tol * max(objective, floor)) or (objective, gap)

    def _in_frame(self, steps: Splitting, radius: float, tol: float, floor: float) -> None:
        """Make steps among the vectors of labels that the solution is likely to use, where these are few."""
        used = 0 if steps.factors is None else len(steps.factors[1])
        count = TIMES * used + BESIDES
        if not used or 2 * count > len(steps.turned):
            return
        frame, penalty = steps.vectors[:, -count:], steps.penalty
        turned, normal = frame.T @ steps.turned, penalty * (frame.T @ steps.taken)
        few = Splitting(steps.values, turned, frame.T @ steps.z, normal, penalty)
        for _ in range(FRAME_STEPS):
            few.step(radius)
            objective, gap = self._look(few, radius)
            if gap <= CLOSER * tol * max(objective, floor):
                break
        steps.begin(frame @ few.z)
        # W has nothing outside of the frame, so that all that is there of Y^T X is normal to the ball.
        steps.taken = steps.turned / few.penalty + frame @ (few.taken - turned / few.penalty)
        steps.penalty = few.penalty

    def _otherwise(self, steps: Splitting, radius: float, tol: float) -> tuple[float, float] | None:
        """Go on with what does not mind eigenvalues of all sizes; return F and the gap if that was better."""
        labels = len(steps.turned)
        none = np.zeros(labels + 1, dtype=np.int64)
        statistics = Statistics(none[:-1], np.arange(labels), none, none[:0])
        statistics.append(np.diag(steps.values), steps.turned)
        found = solve(Quadratic(statistics, self.n_rows, 0.5), steps.z, radius, tol, tight=True)
        _, gap = self._look(steps, radius)
        if found.gap >= gap:
            return None
        steps.z, steps.taken, steps.factors = found.mt, np.zeros_like(found.mt), None
        return self._look(steps, radius)[0], found.gap

    def _look(self, steps: Splitting, radius: float) -> tuple[float, float]:
        """F at Z, and the gap."""
        sums = np.zeros((3, steps.values.size))
        kernels.splitting_sums(steps.turned, steps.z, steps.taken, steps.values, steps.penalty, sums)
        slope, overlap, squares = float(sums[0].sum()), float(sums[1].sum()), sums[2]  # the last of N E
        inverse = 1 / np.maximum(steps.values + self.ridge, np.finfo(float).tiny)
        # E lacks the ridge's part of it, of which W and the best V meet at most its norm.
        missed = float(np.sqrt(squares @ (self.ridge * inverse) ** 2))
        gap = (float(squares @ inverse) / 2 + 2 * radius * missed) / self.n_rows
        return self._objective(slope, overlap), gap

    def _objective(self, slope: float, overlap: float) -> float:
        """F from <W, G W - B> and <W, B>; where Y is interpolated, rounding could take it below zero."""
        return max((slope + self.positives - overlap) / (2 * self.n_rows), 0.0)

    def solution(self) -> Array:
        """Transpose of the last solution W (L x D)."""
        return (
            self.free_solution() if self.steps is None else self._of_labels(self._turned_back(self.steps.z))
        )

    def free_solution(self) -> Array:
        """Transpose of the minimum without the ball, which is one where that holds it."""
        return self._of_labels(self.free)

    def _turned_back(self, rows: Array) -> Array:
        assert self.spectrum is not None
        turned: Array = rows @ self.spectrum.vectors.T
        return turned

    def _of_labels(self, z: Array) -> Array:
        return z if self.frame is None else self.frame @ z

    def factors(self) -> tuple[Array, Array]:
        """U (D x k) and M^T (L x k) of the last solution W = U M."""
        left, right = (None if self.steps is None else self.steps.factors) or self._singular_factors()
        sizes = np.linalg.norm(right, axis=1)
        mt = left * sizes
        weights = np.linalg.norm(mt, axis=0)
        kept = weights > np.finfo(float).eps * weights.max(initial=0.0)
        u = right[kept] / sizes[kept, None]
        u, mt = u if self.steps is None else self._turned_back(u), mt[:, kept]
        return u.T, self._of_labels(mt)

    def _singular_factors(self) -> tuple[Array, Array]:
        z = self.free if self.steps is None else self.steps.z
        _, left = np.linalg.eigh(z @ z.T)
        return left, left.T @ z


def step_ahead(before: float, last: float, radius: float) -> float:
    """How far to go on from two radii to the next, in units of the step between them, but not too far."""
    return min((radius - last) / (last - before), FARTHEST) if last > before else 0.0
