"""An upper bound on the largest singular value of the gradient, without ever forming it.

Any iteration on vectors gives lower bounds only, and a gap made with one looks closed when it
is not. Let Q (L x k) hold approximate leading right singular vectors of G, A = G^T G Q,
H = Q^T A, R = A - Q H, and let tau bound ||G (I - Q Q^T)||. By the Schur complement sigma_1^2
is at most the root mu above max(lambda_max(H), tau^2) of mu = lambda_max(H + R^T R / (mu - tau^2)).
tau comes from block Lanczos on the deflated operator with b independent Gaussian starts: after t
steps its largest Ritz value theta is at least (1 - eps) tau^2 except with probability
(1.648 sqrt(L) exp(-sqrt(eps) (2 t - 1)))^b (Kuczynski & Wozniakowski 1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bound", "schur_bound", "singular_value_bound"]

Array = npt.NDArray[Any]
Operator = Callable[[Array], Array]

#: Probability with which a bound may be wrong.
FAILURE = 1e-9
#: Independent starts, and steps, of the Lanczos iteration.
STARTS = 20
STEPS = 6
#: Reads that a block costs: its own round and those of the iteration outside it.
READS = 2 + 2 * STEPS
#: The block is widened until the rest of the spectrum is below this share of the top.
SEPARATION = 0.8
#: At most this many times.
MAX_WIDENINGS = 6


@dataclass(frozen=True)
class Bound:
    """Upper bound on sigma_1, the block it was found with and the confidence in it."""

    sigma: float
    block: Array
    confidence: float


def singular_value_bound(
    times: Operator,
    transpose_times: Operator,
    block: Array,
    rng: np.random.Generator,
    max_reads: float = math.inf,
) -> Bound | None:
    """Bound sigma_1 of the operator ``times`` from above.

    Parameters
    ----------
    times, transpose_times : callable
        Multiply G and G^T with a few columns; each call is one read of the data.
    block : ndarray (L, k)
        Approximate leading right singular vectors.
    rng : Generator
        For the Lanczos starts.
    max_reads : float
        Most calls of either; None is returned where they do not suffice for any bound.
    """
    q = np.linalg.qr(block)[0]
    reads = 2 if q.shape[1] >= q.shape[0] else READS
    if reads > max_reads:
        return None
    image = transpose_times(times(q))
    widenings = 0
    while True:
        if q.shape[1] >= q.shape[0]:  # nothing is left outside the block
            h = q.T @ image
            return Bound(float(np.sqrt(max(np.linalg.eigvalsh((h + h.T) / 2)[-1], 0.0))), q, 1.0)
        tau_squared, leaders = _deflated_bound(times, transpose_times, q, rng)
        h = q.T @ image
        h = (h + h.T) / 2
        top = float(np.linalg.eigvalsh(h)[-1])
        separated = tau_squared <= SEPARATION**2 * top
        if separated or widenings == MAX_WIDENINGS or reads + READS > max_reads:
            residual = image - q @ h
            mu = schur_bound(h, residual.T @ residual, tau_squared)
            return Bound(float(np.sqrt(mu)), q, (1 - FAILURE) ** (widenings + 1))
        # The deflated leaders are the next singular vectors: just what the block lacks.
        leaders = leaders[:, : q.shape[0] - q.shape[1]]
        image = np.hstack([image, transpose_times(times(leaders))])
        q = np.hstack([q, leaders])
        widenings += 1
        reads += READS


def _deflated_bound(
    times: Operator, transpose_times: Operator, q: Array, rng: np.random.Generator
) -> tuple[float, Array]:
    """Return a bound on tau^2 and the leading Ritz vectors outside the block."""
    n_labels = q.shape[0]
    starts = min(STARTS, n_labels - q.shape[1])
    krylov = np.empty((n_labels, STEPS * starts), order="F")
    ritz = np.zeros((STEPS * starts, STEPS * starts))
    steps = count = 0
    new = _outside(rng.standard_normal((n_labels, starts)), q, krylov[:, :0])
    for _ in range(STEPS):
        if not new.shape[1]:
            break
        image = transpose_times(times(new))
        image = image - q @ (q.T @ image)
        before, count = count, count + new.shape[1]
        krylov[:, before:count] = new
        # The operator is symmetric, so the images of earlier vectors need not be kept.
        ritz[:count, before:count] = krylov[:, :count].T @ image
        ritz[before:count, :count] = ritz[:count, before:count].T
        steps += 1
        if count + q.shape[1] >= n_labels:
            break
        new = _outside(image, q, krylov[:, :count])
    krylov, ritz = krylov[:, :count], ritz[:count, :count]
    values, vectors = np.linalg.eigh((ritz + ritz.T) / 2)
    leaders = krylov @ vectors[:, ::-1][:, :STARTS]
    theta = max(float(values[-1]), 0.0)
    if not new.shape[1] or krylov.shape[1] + q.shape[1] >= n_labels:
        return theta, leaders  # an invariant space met by random starts: the Ritz value is exact
    root = (np.log(1.648 * np.sqrt(n_labels)) - np.log(FAILURE) / starts) / (2 * steps - 1)
    share = root**2
    return (theta / (1 - share) if share < 1 else np.inf), leaders


def _outside(vectors: Array, q: Array, krylov: Array) -> Array:
    """Orthonormal basis of what ``vectors`` have outside both blocks."""
    least = 1e-10 * float(np.linalg.norm(vectors, axis=0).max(initial=0.0))
    for _ in range(2):  # the second time finds what rounding left inside, which the first had magnified
        vectors = vectors - q @ (q.T @ vectors)
        vectors = vectors - krylov @ (krylov.T @ vectors)
        left, values, _ = np.linalg.svd(vectors, full_matrices=False)
        vectors, least = left[:, values > max(least, 1e-300)], 0.5
    return vectors


def schur_bound(h: Array, residual_gram: Array, tau_squared: float) -> float:
    """Root above max(lambda_max(h), tau^2) of mu = lambda_max(h + residual_gram / (mu - tau^2)).

    Examples
    --------
    >>> schur_bound(np.array([[4.0]]), np.array([[0.0]]), tau_squared=1.0)
    4.0
    >>> round(schur_bound(np.array([[4.0]]), np.array([[4.0]]), tau_squared=1.0), 6)
    5.0
    """
    if not np.isfinite(tau_squared):
        return np.inf
    top = float(np.linalg.eigvalsh(h)[-1])
    low = max(top, tau_squared)
    coupling = float(np.linalg.eigvalsh(residual_gram)[-1])
    if coupling <= (np.finfo(float).eps * max(low, 1e-300)) ** 2:
        return low
    high = low + np.sqrt(coupling)  # there the right-hand side is below mu
    while high - low > 1e-14 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if float(np.linalg.eigvalsh(h + residual_gram / (middle - tau_squared))[-1]) > middle:
            low = middle
        else:
            high = middle
    return float(high)
