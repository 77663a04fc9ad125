"""Duality gaps of the size of the error: what the curvature of F adds to its gradient.

The gradient G at W bounds F on the ball from below by a linear function, which lies the gap of Eq. 37 under
F(W). Close to the solution that is hundreds of times the error, which shrinks with the square of the gap: the
top singular values of G are only about equal. But F is quadratic, and all weights are at least
p = min(p0, p1): for every matrix E in the range of X^T X, with a = N / 4p,

    F(V) >= F(W) + <G - E, V - W> - a tr(E^T (X^T X)^+ E)    for all V.

With G = sum_i sigma_i u_i v_i^T and E = sum_i e_i u_i v_i^T, the minimum over the ball of radius r leaves

    gap = <W, G> + sum_i e_i s_i + r max_i |sigma_i - e_i| + sum_i a_i e_i^2,
    s_i = -u_i^T W v_i,   a_i = a u_i^T (X^T X)^+ u_i,

which holds for any e, is the gap of Eq. 37 for e = 0, and has its minimum in closed form.

Where W is the projection of something onto the ball, what the projection took away is normal to the ball at
W, and so is any multiple n of it: <n, V - W> <= 0 for all V of the ball. Then E = G + n leaves

    gap = a tr(E^T (X^T X)^+ E),

without a decomposition. Where W = U M is such a projection among the matrices of that form, E0 = G + n on the
basis U: then the first formula is used for G - E0 in place of G, with what E and E0 cost together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NEAR", "GapBound", "Near", "Residual", "ridge"]

Array = npt.NDArray[Any]

#: Singular values from this share of the largest on are changed; the others stay below them.
NEAR = 0.5
#: Added to the diagonal of X^T X, as a share of its mean; what that changes is counted in the gap. It is at
#: least so many roundings of the sum of the diagonal, so that what they did to X^T X is small beside it.
RIDGE, ROUNDINGS = 1e-9, 100
#: Rows of a triangular system that are solved at a time.
SOLVED_ROWS = 64


@dataclass(frozen=True)
class Near:
    """What gaps need to know of a gradient: its singular values near the largest, which are changed.

    Attributes
    ----------
    values, overlaps, inverses : ndarray (k,)
        sigma_i, s_i and u_i^T (X^T X)^+ u_i.
    rest : float
        The largest of the other singular values.
    crossed : ndarray (k,)
        u_i^T (X^T X)^+ E0 v_i, of a part E0 of E that the gradient is without.
    square : float
        tr(E0^T (X^T X)^+ E0).
    """

    values: Array
    overlaps: Array
    inverses: Array
    rest: float
    crossed: Array
    square: float


@dataclass(frozen=True)
class Residual:
    """A part E0 of E, X^T X U C^T: C (L x r) and tr(E0^T (X^T X)^+ E0)."""

    solved: Array
    square: float


class GapBound:
    """Gaps of problems with the same X.

    Parameters
    ----------
    square : ndarray (D, D)
        X^T X, in any orthonormal basis of the features or a part of them.
    n_rows : int
    dtype : str
        Type in which the products were made.

    Examples
    --------
    One feature with X^T X = 1 and one label: F(w) = (w - 1)^2 / 2 + constant, and the ball is [-2, 2]. At
    w = 1.1 the gradient bounds the error by 0.31, and with the curvature the error itself is found.

    >>> bound = GapBound(np.eye(1), n_rows=1)
    >>> one = np.ones((1, 1))
    >>> near = bound.near((one, np.array([[1.1]])), (one, np.array([0.1]), one))
    >>> round(bound.gap(near, 0.11, radius=2.0, p0=0.5)[0], 4)
    0.005
    """

    def __init__(self, square: Array, n_rows: int, dtype: str = "float64") -> None:
        self.n_rows = n_rows
        self.ridge = ridge(square, dtype)
        self.factor: Array = np.zeros((0, 0))
        if self.ridge > 0:
            self.factor = np.linalg.cholesky(square + self.ridge * np.eye(len(square)))

    @classmethod
    def restored(cls, n_rows: int, factor: Array, ridge: float) -> GapBound:
        """Make one from what another held."""
        bound = cls(np.zeros((0, 0)), n_rows)
        bound.factor, bound.ridge = factor, float(ridge)
        return bound

    def holds(self, p0: float) -> bool:
        """Whether there is any curvature to count on."""
        return min(p0, 1 - p0) > 0 and self.factor.size > 0

    @property
    def inverse(self) -> Array:
        """Transposed inverse of the factor: the square of ``E^T @ inverse`` is <E, (X^T X + R)^-1 E>."""
        return np.linalg.inv(self.factor).T

    def gap_of_normal(self, square: float, radius: float, p0: float) -> float:
        """Return the gap at W for G - E normal to the ball there, up to its sign, given that square."""
        missed = float(np.sqrt(self.ridge * square))
        return self.n_rows / (4 * min(p0, 1 - p0)) * square + 2 * radius * missed

    def gap_after(
        self, gap: float, step: tuple[float, float, float], square: float, radius: float, p0: float
    ) -> float:
        """Return the gap after a share of a step d of a quadratic F, given the gap before.

        Parameters
        ----------
        gap : float
        step : (share, <g, d>, <d, e>)
            With the gradient g before and its change e on all of the way.
        square, radius, p0 : float
            As in `gap_of_normal`, at the end of all of the way.
        """
        share, slope, met = step
        gained = gap + share * slope + share**2 * met / 2
        beside = (1 - share) * slope + (1 - share**2) * met / 2  # what F at that end lacks
        return max(min(gained, self.gap_of_normal(square, radius, p0) - beside), 0.0)

    def without(self, residual: Array, basis: Array, moment: Array) -> tuple[Array, Residual]:
        """Find E0^T whose product with a basis is ``residual`` (L x r), and whose cost is the least.

        Parameters
        ----------
        residual : ndarray (L, r)
            What the gradient and a normal of the ball do not cancel there.
        basis, moment : ndarray (D, r)
            U, orthonormal, and X^T X U.
        """
        moment = moment + self.ridge * basis
        gram = basis.T @ moment
        solved = np.linalg.solve((gram + gram.T) / 2, residual.T).T
        return solved @ moment.T, Residual(solved, max(float(np.vdot(solved, residual)), 0.0))

    def near(
        self,
        factors: tuple[Array, Array],
        triples: tuple[Array, Array, Array],
        residual: Residual | None = None,
    ) -> Near:
        """Measure what the gaps at W = U M need to know of the gradient there.

        Parameters
        ----------
        factors : (U, M^T)
        triples : (left, values, right)
            All singular values of the gradient, largest first, and the vectors of those above NEAR at least.
        residual : Residual, optional
            Of an E0 that the gradient is without, on the same basis U.
        """
        (u, mt), (left, values, right) = factors, triples
        count = int(np.count_nonzero(values > NEAR * values.max(initial=0.0)))
        left, right = left[:, :count], right[:, :count]
        lefts = u.T @ left
        overlaps = -np.einsum("ij,ij->j", lefts, mt.T @ right)
        solved = self._solve_lower(left) if self.factor.size else left[:0]
        inverses = np.einsum("ij,ij->j", solved, solved)
        rest = float(values[count:].max(initial=0.0))
        if residual is None:
            return Near(values[:count], overlaps, inverses, rest, np.zeros(count), 0.0)
        crossed = np.einsum("ij,ij->j", lefts, residual.solved.T @ right)
        return Near(values[:count], overlaps, inverses, rest, crossed, residual.square)

    def gap(self, near: Near, slope: float, radius: float, p0: float) -> tuple[float, Array]:
        """Return the least gap that the formula gives, and the s_i that the solution can be expected to have.

        Parameters
        ----------
        near : Near
        slope : float
            <W, G>, of the gradient that was measured.
        radius, p0 : float
        """
        values = near.values
        plain = slope + radius * float(values.max(initial=0.0))
        if not self.holds(p0):
            return max(plain, 0.0), np.zeros(values.size)
        plain += self.gap_of_normal(near.square, radius, p0)
        if not values.size:
            return max(plain, 0.0), np.zeros(0)
        scale = self.n_rows / (4 * min(p0, 1 - p0))
        costs, overlaps = scale * near.inverses, near.overlaps + 2 * scale * near.crossed
        # Down to the level where as much is gained from the largest value as is lost: a sum over those whose
        # reach is above it, so that level and sum follow from sorted reaches.
        slack = -overlaps / (2 * costs)
        reaches = values - slack
        order = np.argsort(-reaches)
        weights = np.cumsum(2 * costs[order])
        levels = (np.cumsum(2 * (costs * reaches)[order]) - radius) / weights
        above = np.flatnonzero(reaches[order] > levels)
        level = max(float(levels[above[-1]]), near.rest)
        changes = np.maximum(values - level, np.minimum(slack, 0.0))
        # E lacks the ridge's part of it, whose square is |R (X^T X + R)^-1 u|^2 <= R u^T (X^T X + R)^-1 u.
        square = near.square + float(near.inverses @ changes**2 + 2 * near.crossed @ changes)
        missed = float(np.sqrt(self.ridge * max(square, 0.0)))
        tight = slope + float(near.overlaps @ changes) + radius * (level + 2 * missed) + scale * square
        expected = np.maximum(overlaps + 2 * costs * (values - level), 0.0)
        return max(min(plain, tight), 0.0), expected

    @cached_property
    def _corners(self) -> list[Array]:
        """Inverses of the blocks on the diagonal of the factor."""
        starts = range(0, len(self.factor), SOLVED_ROWS)
        return [np.linalg.inv(self.factor[a : a + SOLVED_ROWS, a : a + SOLVED_ROWS]) for a in starts]

    def _solve_lower(self, right: Array) -> Array:
        """Solve with the factor by blocks: SciPy's solver would keep other threads from running."""
        out = np.empty(right.shape)
        for number, corner in enumerate(self._corners):
            first = number * SOLVED_ROWS
            rows = slice(first, first + SOLVED_ROWS)
            out[rows] = corner @ (right[rows] - self.factor[rows, :first] @ out[:first])
        return out


def ridge(square: Array, dtype: str) -> float:
    """What is added to the diagonal of X^T X before its inverse is used."""
    share = max(RIDGE / max(len(square), 1), ROUNDINGS * float(np.finfo(dtype).eps))
    return share * float(np.trace(square))
