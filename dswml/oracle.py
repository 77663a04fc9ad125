"""The linear oracle: the top singular vectors of the gradient, of which W is never a part.

Where the gradient is small it is assembled in one read and decomposed; the singular value is
then exact and so is the duality gap. Otherwise it stays an operator: one read multiplies a
block of vectors from the right, one from the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from .duality import NEAR
from .problem import Problem
from .small_problem import Quadratic

__all__ = [
    "Answer",
    "assembled",
    "krylov",
    "leading_on_basis",
    "leading_vectors",
    "nothing_found",
    "singular_form",
    "singular_rotation",
    "svd",
    "warm_start",
    "with_recent",
]

Array = npt.NDArray[Any]

#: Fresh random vectors in every start block, so that no part of the spectrum stays unseen.
FRESH = 8
#: Entries of a matrix that are decomposed at a time.
ROTATION_ENTRIES = 2**20
#: A top pair counts as converged when ||G v - s u|| is at most this share of s.
PAIR_ACCURACY = 1e-10


@dataclass(frozen=True)
class Answer:
    """Leading singular triples of grad F(W), largest first.

    Attributes
    ----------
    left, right : ndarray (D, m), (L, m)
    values : ndarray
        m or more singular values, exact where ``exact``, else those of a block, which are lower bounds.
    objective : float
        F(W), from the same read.
    slope : float
        <W, grad F(W)>.
    """

    left: Array
    values: Array
    right: Array
    objective: float
    slope: float
    exact: bool

    def gap(self, radius: float) -> float:
        """Duality gap <W, G> + radius * sigma_1 (Eq. 37)."""
        return max(self.slope + radius * float(self.values[0]), 0.0)


def assembled(
    problem: Problem,
    mt: Array,
    leading: int | None = None,
    least: int = 0,
    *,
    square: bool = False,
    known: Array | None = None,
) -> tuple[Answer, Array | None]:
    """Decompose the whole gradient, which one read of the data assembles (see `decompose`).

    The same read brings X^T X where that is asked for. A ``known`` part of the gradient is left out.
    """
    sums = problem.sweep(mt, assemble=True, square=square)
    mt = _padded(mt, problem.rank)
    gradient = problem.gradient(mt, sums["gradient"])  # L x D
    value_and_slope = problem.value_and_slope(mt, sums, gradient)
    if known is not None:
        gradient -= known
    left, values, right = decompose(gradient, leading, least)
    answer = Answer(left, values, right, *value_and_slope, exact=True)
    return answer, sums.get("square")


def krylov(problem: Problem, mt: Array, start: Array, max_rounds: int) -> Answer:
    """Block Krylov iteration from ``start`` (L x k) until the top pair has converged.

    A round multiplies by the gradient and by its transpose: two reads. All left vectors so far
    are kept, so the answer is the best that their span contains.
    """
    block = np.linalg.qr(start)[0]
    lefts = np.zeros((problem.n_features, 0))
    images = np.zeros((problem.n_labels, 0))  # G^T lefts
    answer: Answer | None = None
    for _ in range(max_rounds):
        sums = problem.sweep(mt, right=block)
        mt = _padded(mt, problem.rank)
        value_and_slope = problem.value_and_slope(mt, sums)
        product = problem.gradient_times(mt, block, sums["right"])
        if answer is not None:
            residual = product[:, 0] - answer.values[0] * answer.left[:, 0]
            if np.linalg.norm(residual) <= PAIR_ACCURACY * answer.values[0]:
                break
        for _ in range(2):
            product = product - lefts @ (lefts.T @ product)
            product, triangle = np.linalg.qr(product)
            diagonal = np.abs(np.diag(triangle))
            product = product[:, diagonal > 1e-13 * max(diagonal.max(initial=0.0), 1e-300)]
        room = min(problem.n_features, problem.n_labels) - lefts.shape[1]
        product = product[:, : max(room, 0)]
        if not product.shape[1]:
            break
        sums = problem.sweep(mt, left=product)
        lefts = np.hstack([lefts, product])
        images = np.hstack([images, problem.gradient_transpose_times(mt, product, sums["left"])])
        right, values, coordinates = svd(images)
        answer = Answer(lefts @ coordinates.T, values, right, *value_and_slope, exact=False)
        # The pair first, so that its residual is read off the next product; then what is new.
        block = np.linalg.qr(np.hstack([right[:, :1], images[:, -product.shape[1] :]]))[0]
        block[:, 0] = right[:, 0]
    return answer or nothing_found(problem, block, *value_and_slope)


def leading_on_basis(small: Quadratic, mt: Array, count: int) -> tuple[Array, Array, Array]:
    """The leading singular triples of the gradient so far as the basis of the small problem contains them.

    Left vectors are given by their coordinates in the basis, and the values are all there are: lower bounds.
    """
    small.begin(mt)
    squares, coordinates = np.linalg.eigh(small.total("gradient_gram"))
    values = np.sqrt(np.maximum(squares[::-1], 0))
    coordinates = coordinates[:, ::-1][:, :count]
    scaled = coordinates / np.maximum(values[: coordinates.shape[1]], 1e-300)
    return coordinates, values, np.concatenate(small.each("gradient_times", scaled))


def nothing_found(problem: Problem, block: Array, objective: float, slope: float) -> Answer:
    """Answer of a gradient that vanishes on the block."""
    left = np.zeros((problem.n_features, block.shape[1]))
    return Answer(left, np.zeros(block.shape[1]), block, objective, slope, exact=False)


def warm_start(mt: Array, last: Array, width: int, rng: np.random.Generator) -> Array:
    """Start block of at most ``width`` vectors: W's right singular vectors, the last ones, fresh ones.

    Near the optimum the top singular value of the gradient is as manifold as W's rank and its
    space is W's own; without W's vectors the block stalls and underestimates it.
    """
    n_labels = mt.shape[0]
    width = min(width, n_labels)
    parts = [np.zeros((n_labels, 0))]
    if mt.shape[1]:
        parts.append(leading_vectors(mt, max(width - FRESH, 1)))
    taken = sum(part.shape[1] for part in parts)
    parts.append(last[:, : max(width - FRESH - taken, 0)])
    taken = sum(part.shape[1] for part in parts)
    parts.append(rng.standard_normal((n_labels, max(width - taken, 0))))
    block: Array = np.linalg.qr(np.hstack(parts))[0]
    return block


def singular_rotation(mt: Array) -> tuple[Array, Array]:
    """Singular values of a matrix, largest first, and its right singular vectors as rows.

    The others, of which there may be a hundred times as many entries, are ``mt @ rows.T / values``.

    Examples
    --------
    >>> values, rows = singular_rotation(np.array([[0.0, 3.0], [2.0, 0.0]]))
    >>> values.round(12), abs(rows).round(12)
    (array([3., 2.]), array([[0., 1.],
           [1., 0.]]))
    """
    if mt.shape[0] < mt.shape[1]:
        frame, coordinates = np.linalg.qr(mt.T)
        rotation, values, _ = svd(coordinates)
        return values, (frame @ rotation).T
    triangle: Array = np.zeros((0, mt.shape[1]))
    step = max(ROTATION_ENTRIES // max(mt.shape[1], 1), mt.shape[1], 1)
    for first in range(0, len(mt), step):
        triangle = np.asarray(np.linalg.qr(np.vstack([triangle, mt[first : first + step]]), mode="r"))
    _, values, rows = svd(triangle)
    return values, rows


def singular_form(basis: Array | None, mt: Array) -> tuple[Array, Array]:
    """U and M of W's own rank, U with orthonormal columns, from M^T on a basis; None for the features."""
    values, rows = singular_rotation(mt)
    rows = rows[: np.count_nonzero(values > 1e-13 * values.max(initial=0.0))]  # nothing certified is dropped
    return rows.T if basis is None else basis[:, : mt.shape[1]] @ rows.T, rows @ mt.T


def with_recent(used: Array, keep: int) -> Array:
    """Orthonormal columns that span the directions ``used`` (r x k) and the last ones of the basis.

    Examples
    --------
    >>> abs(with_recent(np.array([[1.0], [0.0], [0.0]]), 2))
    array([[1., 0.],
           [0., 0.],
           [0., 1.]])
    """
    recent = np.eye(len(used))[:, ::-1]
    rotation: Array = np.linalg.qr(np.hstack([used, recent]))[0][:, :keep]
    return rotation


def svd(matrix: Array) -> tuple[Array, Array, Array]:
    """Thin singular value decomposition; slower where LAPACK's fast one gives up, as it does at times."""
    try:
        left, values, right = np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        left, values, right = scipy.linalg.svd(matrix, full_matrices=False, lapack_driver="gesvd")
    return left, values, right


def leading_vectors(mt: Array, most: int | None = None) -> Array:
    """Orthonormal left singular vectors of those values that are not zero but for rounding."""
    values, rows = singular_rotation(mt)
    values = values[values > 1e-9 * max(values.max(initial=0.0), 1e-300)][:most]
    vectors: Array = mt @ (rows[: values.size].T / values)
    return vectors


def decompose(gradient: Array, leading: int | None, least: int = 0) -> tuple[Array, Array, Array]:
    """Singular triples of the transpose of an L x D matrix, through the smaller Gram matrix.

    The leading ones; or else all values, and the vectors of those near the largest, but ``least`` or more.
    """
    wide = gradient.shape[0] <= gradient.shape[1]
    gram = gradient @ gradient.T if wide else gradient.T @ gradient
    side = len(gram)
    if leading is None:
        squares, vectors = np.linalg.eigh(gram)  # unlike SciPy's it lets other threads run
    else:
        chosen = (side - min(leading, side), side - 1)
        squares, vectors = scipy.linalg.eigh(gram, subset_by_index=chosen, check_finite=False)
    values = np.sqrt(np.maximum(squares[::-1], 0))
    vectors = vectors[:, ::-1]
    count = max(int(np.count_nonzero(values > NEAR * values[0])), least, leading or 0)
    vectors = vectors[:, :count]
    # Where the gradient vanishes but for rounding it has no direction.
    inverse = np.divide(1, values, out=np.zeros_like(values), where=values > 1e-13 * values[0])[:count]
    if wide:
        return (gradient.T @ vectors) * inverse, values, vectors
    return vectors, values, (gradient @ vectors) * inverse


def _padded(mt: Array, rank: int) -> Array:
    """M^T with zero columns for directions that came after it."""
    return np.pad(mt, ((0, 0), (0, rank - mt.shape[1])))
