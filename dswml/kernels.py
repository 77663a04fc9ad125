"""Loops over sparse rows that decide the speed of everything which is not a matrix product.

All of them release the interpreter lock, run on one thread and add in a fixed order, so
the same inputs give the same bits. ``indptr``/``indices`` are one block of a CSR matrix; with ``starts``
and ``ends`` in place of ``indptr`` they may be some rows of one, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

__all__ = [
    "active_scores",
    "add_gram_products",
    "add_label_grams",
    "add_row_products",
    "add_up_rows",
    "csr_square",
    "csr_times_dense",
    "csr_transpose_times_dense",
    "csr_transpose_times_labels",
    "dense_transpose_times_labels",
    "gradient_step",
    "row_norms",
    "step_sums",
    "take_rows",
]

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])

#: Side of the squares in which a matrix is mirrored: two of them fit into the processor's first cache.
TILE = 32


def _compiled(function: F) -> F:
    # Reassociation lets the compiler use vector registers; the order stays fixed once compiled.
    compiled: Any = numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})(function)
    return cast(F, compiled)


@_compiled
def active_scores(indptr: Array, indices: Array, z: Array, mt: Array, scores: Array) -> None:
    """Scores of the active entries, ``scores[k] = <z_i, m_l>``, over the columns of ``mt`` (SDDMM)."""
    rank = mt.shape[1]
    for i in range(indptr.size - 1):
        for k in range(indptr[i], indptr[i + 1]):
            label = indices[k]
            total = 0.0
            for a in range(rank):
                total += z[i, a] * mt[label, a]
            scores[k] = total


@_compiled
def csr_times_dense(
    starts: Array, ends: Array, indices: Array, data: Array, dense: Array, out: Array
) -> None:
    """``out = A @ dense`` for rows A, four entries at a time: a line of the sum is loaded once for them."""
    width = dense.shape[1]
    for i in range(starts.size):
        line, k = out[i], starts[i]
        for a in range(width):
            line[a] = 0
        while k + 3 < ends[i]:
            one, two = dense[indices[k]], dense[indices[k + 1]]
            three, four = dense[indices[k + 2]], dense[indices[k + 3]]
            s, t, u, v = data[k], data[k + 1], data[k + 2], data[k + 3]
            for a in range(width):
                line[a] += s * one[a] + t * two[a] + u * three[a] + v * four[a]
            k += 4
        while k < ends[i]:
            one, s = dense[indices[k]], data[k]
            for a in range(width):
                line[a] += s * one[a]
            k += 1


@_compiled
def csr_transpose_times_dense(
    starts: Array, ends: Array, indices: Array, data: Array, dense: Array, out: Array
) -> None:
    """``out += A.T @ dense`` for rows A."""
    width = dense.shape[1]
    for i in range(starts.size):
        for k in range(starts[i], ends[i]):
            column = indices[k]
            value = data[k]
            for a in range(width):
                out[column, a] += value * dense[i, a]


@_compiled
def csr_square(starts: Array, ends: Array, indices: Array, data: Array, out: Array) -> None:
    """``out = A.T @ A`` for rows A, every pair of a row's entries once, given zeros.

    Column by column, so that what is added to stays in the processor's cache.
    """
    side, size = len(out), (ends - starts).sum()
    places = np.zeros(side + 1, dtype=np.int64)
    for i in range(starts.size):
        for k in range(starts[i], ends[i]):
            places[indices[k] + 1] += 1
    for a in range(side):
        places[a + 1] += places[a]
    entries, stops = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
    for i in range(starts.size):
        for k in range(starts[i], ends[i]):
            at = places[indices[k]]
            entries[at], stops[at] = k, ends[i]
            places[indices[k]] = at + 1
    first = 0
    for a in range(side):
        line = out[a]
        for at in range(first, places[a]):
            value = np.float64(data[entries[at]])
            line[a] += value * value / 2
            for j in range(entries[at] + 1, stops[at]):
                line[indices[j]] += value * data[j]
        first = places[a]
    for top in range(0, side, TILE):
        for left in range(0, top + 1, TILE):
            for a in range(top, min(top + TILE, side)):
                for b in range(left, min(left + TILE, a + 1)):
                    out[a, b] += out[b, a]
                    out[b, a] = out[a, b]


@_compiled
def csr_transpose_times_labels(
    x_starts: Array,
    x_ends: Array,
    x_indices: Array,
    x_data: Array,
    indptr: Array,
    indices: Array,
    values: Array,
    out: Array,
) -> None:
    """``out[p] += (X.T @ E_p).T`` (labels x features) for rows X and CSR blocks E_p of one pattern."""
    for i in range(indptr.size - 1):
        for k in range(indptr[i], indptr[i + 1]):
            for point in range(len(values)):
                line = out[point, indices[k]]
                value = values[point, k]
                for j in range(x_starts[i], x_ends[i]):
                    line[x_indices[j]] += value * x_data[j]


@_compiled
def dense_transpose_times_labels(x: Array, indptr: Array, indices: Array, values: Array, out: Array) -> None:
    """``out += (X.T @ E).T`` (labels x features) for a dense block X and a CSR block E."""
    width = x.shape[1]
    for i in range(indptr.size - 1):
        for k in range(indptr[i], indptr[i + 1]):
            label = indices[k]
            value = values[k]
            for a in range(width):
                out[label, a] += value * x[i, a]


@_compiled
def add_label_grams(
    indptr: Array, indices: Array, place: Array, z: Array, rank: int, width: int, out: Array
) -> None:
    """``out[place[l]] += z_i[:rank] z_i[rank-width:rank]^T`` over active entries with ``place[l] >= 0``."""
    for i in range(indptr.size - 1):
        new = z[i, rank - width : rank]
        for k in range(indptr[i], indptr[i + 1]):
            heavy = place[indices[k]]
            if heavy >= 0:
                for a in range(rank):
                    left = np.float64(z[i, a])
                    line = out[heavy, a]
                    for b in range(width):
                        line[b] += left * new[b]


@_compiled
def add_gram_products(grams: Array, place: Array, first: int, stop: int, mt: Array, out: Array) -> None:
    """``out[l] = C_l m_l`` for the labels of ``[first, stop)`` that have a Gram matrix (``place >= 0``)."""
    rank = mt.shape[1]
    for label in range(first, stop):
        heavy = place[label]
        if heavy >= 0:
            for a in range(rank):
                total = 0.0
                for b in range(rank):
                    total += grams[heavy, a, b] * mt[label, b]
                out[label, a] = total


@_compiled
def add_row_products(
    indptr: Array, rows: Array, place: Array, first: int, stop: int, z: Array, mt: Array, out: Array
) -> None:
    """``out[l] = sum_i z_i <z_i, m_l>`` over the active rows i of the labels that have no Gram matrix."""
    rank = mt.shape[1]
    for label in range(first, stop):
        if place[label] >= 0:
            continue
        line, m, k = out[label], mt[label], indptr[label]
        for a in range(rank):
            line[a] = 0.0
        while k + 3 < indptr[label + 1]:  # four rows at a time, as above
            one, two, three, four = z[rows[k]], z[rows[k + 1]], z[rows[k + 2]], z[rows[k + 3]]
            s, t, u, v = 0.0, 0.0, 0.0, 0.0
            for a in range(rank):
                s += one[a] * m[a]
                t += two[a] * m[a]
                u += three[a] * m[a]
                v += four[a] * m[a]
            for a in range(rank):
                line[a] += s * one[a] + t * two[a] + u * three[a] + v * four[a]
            k += 4
        while k < indptr[label + 1]:
            one, s = z[rows[k]], 0.0
            for a in range(rank):
                s += one[a] * m[a]
            for a in range(rank):
                line[a] += s * one[a]
            k += 1


@_compiled
def add_up_rows(indptr: Array, rows: Array, labels: Array, z: Array, out: Array) -> None:
    """``out[l] = sum_i z_i`` over the active rows i of the given labels."""
    width = z.shape[1]
    for label in labels:
        for a in range(width):
            out[label, a] = 0.0
        for k in range(indptr[label], indptr[label + 1]):
            for a in range(width):
                out[label, a] += z[rows[k], a]


@_compiled
def gradient_step(x: Array, g: Array, curvature: float, out: Array) -> None:
    """``out = x - g / curvature``."""
    inverse = 1 / curvature
    for i in range(x.shape[0]):
        for a in range(x.shape[1]):
            out[i, a] = x[i, a] - inverse * g[i, a]


@_compiled
def step_sums(
    x: Array, g: Array, x_new: Array, g_new: Array, curvature: float, left: Array
) -> tuple[float, float, float, float]:
    """``<g, d>, <d, d>, <d, e>, <e, e>`` of ``d = x_new - x, e = g_new - g``; ``left = e - curvature d``."""
    slope = length = met = turned = 0.0
    for i in range(x.shape[0]):
        for a in range(x.shape[1]):
            d = x_new[i, a] - x[i, a]
            e = g_new[i, a] - g[i, a]
            slope += g[i, a] * d
            length += d * d
            met += d * e
            turned += e * e
            left[i, a] = e - curvature * d
    return slope, length, met, turned


@_compiled
def blend(old: Array, share: float, new: Array) -> None:
    """``new = old + share (new - old)``."""
    for i in range(old.shape[0]):
        for a in range(old.shape[1]):
            new[i, a] = old[i, a] + share * (new[i, a] - old[i, a])


@_compiled
def splitting_step(
    turned: Array,
    z: Array,
    taken: Array,
    values: Array,
    penalty: float,
    relaxation: float,
    free: Array,
    ahead: Array,
) -> None:
    """``free = (turned + penalty (z - taken)) / (values + penalty)``; ``ahead`` beyond it, plus ``taken``."""
    for i in range(z.shape[0]):
        for a in range(z.shape[1]):
            best = (turned[i, a] + penalty * (z[i, a] - taken[i, a])) / (values[a] + penalty)
            free[i, a] = best
            ahead[i, a] = relaxation * best + (1 - relaxation) * z[i, a] + taken[i, a]


@_compiled
def splitting_sums(turned: Array, z: Array, taken: Array, values: Array, penalty: float, out: Array) -> None:
    """Add to the rows of ``out``, for every column, sums of ``z g``, ``z turned`` and the square of the rest.

    Here ``g = z values - turned``, and the rest is ``g + penalty taken``.
    """
    for i in range(z.shape[0]):
        for a in range(z.shape[1]):
            g = z[i, a] * values[a] - turned[i, a]
            rest = g + penalty * taken[i, a]
            out[0, a] += z[i, a] * g
            out[1, a] += z[i, a] * turned[i, a]
            out[2, a] += rest * rest


@_compiled
def take_rows(
    indptr: Array, indices: Array, data: Array, rows: Array, ends: Array, out_indices: Array, out_data: Array
) -> None:
    """Copy some rows of a CSR block one after the other; row ``rows[i]`` ends at ``ends[i + 1]``."""
    for i in range(rows.size):
        at = ends[i]
        for k in range(indptr[rows[i]], indptr[rows[i] + 1]):
            out_indices[at], out_data[at] = indices[k], data[k]
            at += 1


@_compiled
def row_norms(indptr: Array, data: Array, out: Array) -> None:
    """Euclidean norm of every row of a CSR block, accumulated in float64."""
    for i in range(indptr.size - 1):
        total = 0.0
        for k in range(indptr[i], indptr[i + 1]):
            total += np.float64(data[k]) * np.float64(data[k])
        out[i] = np.sqrt(total)
