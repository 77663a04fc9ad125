"""Where solutions are to be expected: steps that know the curvature of F.

Near W the objective is F(W) + <G, V - W> + <V - W, H (V - W)> / 2, and H has a matrix of its own for every
label. With 2 c / N X^T X in place of all of them the minimum over a ball is a problem of least squares, which
a few alternating steps solve without a read (see `dswml.splitting`). F itself is then minimised on the
directions that this minimum uses: of the gradient's own singular vectors it takes several times as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .duality import GapBound
from .splitting import Spectrum, Splitting, usual_penalty

__all__ = ["Curvature", "NewtonSteps", "Place", "ahead", "frame_of"]

Array = npt.NDArray[Any]

#: Alternating steps; more of them do not improve the directions.
STEPS = 2
#: Vectors span what a frame of theirs spans but for parts shorter than this.
COMMON = 0.1
#: Directions are left out that hold no more than this share of all changes, as a sum of squares.
TAIL = 0.003


@dataclass(frozen=True)
class Place:
    """A matrix W and the gradient there, multiplied by a frame of vectors of the labels.

    Attributes
    ----------
    w, gradient : ndarray (m, D)
        In the eigenvectors of X^T X, a row for every vector of the frame.
    """

    w: Array
    gradient: Array


def ahead(before: Place, last: Place, by: float) -> Place:
    """Go on in a line from two places; F is quadratic, so the gradient there is known."""
    return Place(last.w + by * (last.w - before.w), last.gradient + by * (last.gradient - before.gradient))


def frame_of(vectors: Array) -> Array:
    """Orthonormal columns that span unit vectors, but for what these have nearly in common.

    Examples
    --------
    >>> frame_of(np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])).shape
    (3, 2)
    """
    squares, rotation = np.linalg.eigh(vectors.T @ vectors)
    kept = squares > COMMON**2
    frame: Array = vectors @ (rotation[:, kept] / np.sqrt(squares[kept]))
    return frame


class NewtonSteps:
    """Steps on problems with the same X, in single precision: what they find are directions.

    Parameters
    ----------
    values : ndarray (D,)
        Eigenvalues of X^T X.
    vectors : ndarray (D, D)
        Its eigenvectors.
    n_rows : int
    """

    def __init__(self, values: Array, vectors: Array, n_rows: int) -> None:
        self.n_rows, self.values = n_rows, values
        self.vectors = vectors.astype(np.float32, copy=False)
        self.penalty = usual_penalty(values)

    def turned(self, rows: Array) -> Array:
        """Rows of features in the eigenvectors."""
        product: Array = rows.astype(np.float32) @ self.vectors
        return product

    def change(self, place: Place, radius: float, curvature: float) -> Array:
        """Return about how W changes to where F is least in a ball, with the ``curvature`` c."""
        values, normal = curvature * self.values, (-self.n_rows / 2) * place.gradient
        target = (values * place.w + normal).astype(np.float32)
        steps = Splitting(values, target, place.w, normal, curvature * self.penalty)
        for _ in range(STEPS):
            steps.step(radius)
        return np.asarray(steps.z - place.w, dtype=np.float32)

    def directions(self, changes: Sequence[Array], basis: Array) -> Array:
        """Return directions (D x k) outside a basis that changes have weight in, those with most first."""
        rows = np.vstack([_leading_rows(change, TAIL / 10) for change in changes])
        turned = self.turned(basis.T)
        for _ in range(2):
            rows -= (rows @ turned.T) @ turned
        directions: Array = self.vectors @ _leading_rows(rows, TAIL).T
        return directions.astype(np.float64)


def _leading_rows(matrix: Array, tail: float) -> Array:
    """Orthogonal combinations of rows, the longest first, but for a share of their sum of squares."""
    squares, vectors = np.linalg.eigh((matrix @ matrix.T).astype(np.float64))
    squares = np.maximum(squares[::-1], 0.0)
    left = squares.sum() - np.cumsum(squares)
    count = int(np.count_nonzero(left > tail * squares.sum())) + bool(squares.sum() > 0)
    rows: Array = vectors[:, ::-1][:, :count].T.astype(matrix.dtype) @ matrix
    return rows


@dataclass(frozen=True)
class Curvature:
    """X^T X, and what it tells of all problems with the same X: bounds of their gaps, and steps."""

    square: Array
    bound: GapBound
    steps: NewtonSteps

    @classmethod
    def of(cls, square: Array, n_rows: int, dtype: str) -> tuple[Curvature, Spectrum]:
        spectrum = Spectrum.of(square)
        steps = NewtonSteps(spectrum.values, spectrum.vectors, n_rows)
        return cls(square, GapBound(square, n_rows, dtype), steps), spectrum
