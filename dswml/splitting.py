"""Least squares over the nuclear ball in the eigenvectors of X^T X: alternating steps, each a division and a
projection.

With G = X^T X in its eigenvectors, one step of the alternating direction method on

    minimise  tr(V^T G V) / 2 - tr(T^T V)   over   ||V||_* <= radius

divides, projects onto the ball, and takes down what the projection took away. The condition of G does not
matter to it, and a few steps do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .corrective import shrinking

__all__ = ["Spectrum", "Splitting", "usual_penalty"]

Array = npt.NDArray[Any]

#: After how many steps the penalty is balanced for the first time; then after twice as many.
FIRST_BALANCE = 2
#: What is so small beside Z is rounding.
NOISE = 1e-9
#: A step goes so much beyond the free minimum, which saves up to a third of the steps.
RELAXATION = 1.5


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (D) and eigenvectors (D x D) of X^T X."""

    values: Array
    vectors: Array

    @classmethod
    def of(cls, square: Array) -> Spectrum:
        values, vectors = np.linalg.eigh(square)
        return cls(np.maximum(values, 0), vectors)


class Splitting:
    """Iterates of one problem; V is held as V^T, a row for every column that V is multiplied with.

    Parameters
    ----------
    values : ndarray (D,)
        Eigenvalues of G.
    turned : ndarray (m, D)
        T^T, in the eigenvectors.
    z : ndarray (m, D)
        Where to begin.
    normal : ndarray (m, D)
        What is expected of T - G V at the solution, which is normal to the ball there.
    penalty : float

    Attributes
    ----------
    z, taken : ndarray (m, D)
        In the ball, and what the last projection took away: normal to the ball at Z.
    factors : (ndarray (m, k), ndarray (k, D)), optional
        Two matrices whose product is Z, of orthogonal columns and rows, where the last projection left them.
    vectors : ndarray (m, m) or (D, D)
        Singular vectors on the shorter side of what was projected last, those of the largest values last.
    """

    def __init__(self, values: Array, turned: Array, z: Array, normal: Array, penalty: float) -> None:
        self.values, self.turned, self.penalty = values, turned, penalty
        self.taken = normal / penalty
        self.factors: tuple[Array, Array] | None = None
        self.vectors = np.zeros((0, 0))
        self._free = np.empty_like(turned)
        self.begin(z)

    def begin(self, z: Array) -> None:
        """Go on from another Z, maybe in another ball."""
        self.z, self._before = z, z
        self._steps, self._balance = 0, FIRST_BALANCE

    def aim(self, values: Array, turned: Array) -> None:
        """Go on with another problem of the same size."""
        self.values, self.turned = values, turned

    def step(self, radius: float) -> None:
        """Make one step."""
        if self._steps == self._balance:
            self._balance *= 2
            self._balanced()
        self._steps += 1
        ahead = np.empty_like(self.turned)
        kernels.splitting_step(
            self.turned, self.z, self.taken, self.values, self.penalty, RELAXATION, self._free, ahead
        )
        tall = len(ahead) > ahead.shape[1]
        squares, self.vectors = np.linalg.eigh(ahead.T @ ahead if tall else ahead @ ahead.T)
        factors = shrinking(squares, self.vectors, radius)
        if factors is not None:
            factors = (ahead @ factors[0], factors[1]) if tall else (factors[0], factors[1] @ ahead)
        self._before, self.factors = self.z, factors
        self.z = ahead if factors is None else factors[0] @ factors[1]
        self.taken = ahead - self.z

    def _balanced(self) -> None:
        """Let free minimum and projection come nearer to each other at the pace at which both move."""
        noise = NOISE * float(np.linalg.norm(self.z)) + 1e-300  # below it nothing is to be balanced
        apart, moved = (noise + float(np.linalg.norm(self.z - other)) for other in (self._free, self._before))
        factor = float(np.clip(apart / moved, 0.2, 5.0))
        self.penalty, self.taken = self.penalty * factor, self.taken / factor


def usual_penalty(values: Array) -> float:
    """The penalty to begin with, between the largest eigenvalue and the middle one of those above zero.

    Examples
    --------
    >>> usual_penalty(np.array([0.0, 1.0, 4.0, 16.0]))
    8.0
    """
    curved = values[values > 1e-12 * values.max(initial=0.0)]
    return float(np.sqrt(curved.max() * np.median(curved))) if curved.size else 1.0
