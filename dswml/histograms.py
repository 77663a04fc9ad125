"""Histograms of scores over fixed bins, active and inactive entries apart, summed over blocks and tiles.

Inactive entries vastly outnumber active ones, and neither need be kept: one counts scores between
fixed, increasing *edges* e_0 < ... < e_B, in the bins (-inf, e_0), [e_0, e_1), ..., [e_B, inf).
The counts are integers and add over blocks of rows and tiles of labels; `dswml.roc` says what
follows from them. Scores are compared with edges in float64, and NaN is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .selection import compiled, label_rows, refuse_nan, score_tile

__all__ = [
    "MAX_LABEL_BINS",
    "active_entry_scores",
    "exact_edges",
    "label_histogram_block",
    "quantile_edges",
    "score_bins",
    "score_histogram_block",
    "uniform_edges",
]

Array = npt.NDArray[Any]
Partial = dict[str, Array]

#: Largest number of labels x bins of histograms label by label: two arrays of 128 MiB.
MAX_LABEL_BINS = 2**24


def uniform_edges(bins: int = 2048, low: float = -0.5, high: float = 1.5) -> Array:
    """Return edges at equal distances; those of the default are exact binary fractions.

    Examples
    --------
    >>> uniform_edges(4)
    array([-0.5,  0. ,  0.5,  1. ,  1.5])
    """
    if bins < 1 or not low < high:
        raise UsageError(f"{bins} bins from {low} to {high} are no bins: give at least 1, from low to high")
    return checked_edges(np.linspace(low, high, bins + 1))


def quantile_edges(active: Array, inactive: Array, bins: int = 2048) -> Array:
    """Return edges at the quantiles of a sample of scores, half of active and half of inactive ones.

    About 2 / bins of either kind of entry falls between two edges, so the bound on the error of the
    AUC is about 1 / bins at most, and both ends of the ROC are resolved, whatever the scale of the
    scores. The edges must be the same for all blocks: take the sample once.

    Parameters
    ----------
    active, inactive : ndarray
        Scores of some active and of some inactive entries.
    bins : int
        Number of edges at most, as equal quantiles are one edge.

    Examples
    --------
    >>> quantile_edges(np.array([0.5, 1.0]), np.array([0.0, 0.25]), bins=4)
    array([0.  , 0.25, 0.5 , 1.  ])
    """
    if bins < 2 or not np.size(active) or not np.size(inactive):
        raise UsageError(
            f"{bins} edges from {np.size(active)} active and {np.size(inactive)} inactive scores are not "
            "possible: give at least 2, and a sample of both kinds"
        )
    levels = np.linspace(0, 1, bins // 2)
    samples = [np.asarray(scores, dtype=np.float64).ravel() for scores in (active, inactive)]
    return checked_edges(np.unique([np.quantile(sample, levels, method="lower") for sample in samples]))


def exact_edges(active: Array) -> Array:
    """Return edges around every distinct score of the active entries, for an exact AUC and ROC.

    Parameters
    ----------
    active : ndarray
        The scores of *all* active entries, out of the same tiles as those that are counted
        (`active_entry_scores`): a last bit computed otherwise shows as an error bound above 0.

    Examples
    --------
    >>> exact_edges(np.array([1.0, 0.5, 1.0])).size
    4
    """
    values = np.unique(np.asarray(active, dtype=np.float64))
    if not values.size:
        return np.zeros(1)
    return checked_edges(np.union1d(values, np.nextafter(values, np.inf)))


def active_entry_scores(y_true: Any, scores: Array, first_label: int = 0) -> Array:
    """Return the scores of the active entries of a tile, in the order of rows.

    Parameters
    ----------
    y_true : csr_array (n, L)
        True labels, all of them or those of the tile alone (``first_label=0``).
    scores : ndarray (n, t)
        Scores of the labels ``first_label``, ..., ``first_label + t - 1``.

    Examples
    --------
    >>> active_entry_scores([[0, 1, 1]], np.array([[0.7, 0.2]]), first_label=1)
    array([0.7, 0.2])
    """
    labels, tile = matching_tile(y_true, scores, first_label)
    columns = labels.indices - first_label
    inside = (columns >= 0) & (columns < tile.shape[1])
    rows = np.repeat(np.arange(labels.shape[0]), np.diff(labels.indptr))
    found: Array = tile[rows[inside], columns[inside]]
    return found


def score_histogram_block(y_true: Any, scores: Array, edges: Array, first_label: int = 0) -> Partial:
    """Count the scores of a tile between the edges; counts of tiles and of blocks add.

    Parameters
    ----------
    y_true : csr_array (n, L)
        True labels, all of them or those of the tile alone (``first_label=0``).
    scores : ndarray (n, t)
        Scores of the labels ``first_label``, ..., ``first_label + t - 1``.
    edges : ndarray (B + 1,)
        Increasing finite numbers, the same for all blocks.

    Returns
    -------
    dict of str to ndarray
        "active_scores" and "inactive_scores", int64 counts (B + 2,).

    Examples
    --------
    >>> score_histogram_block([[0, 1, 1]], np.array([[0.1, 0.2, 0.9]]), np.array([0.5]))
    {'active_scores': array([1, 1]), 'inactive_scores': array([1, 0])}
    """
    active, inactive = _histogram(y_true, scores, edges, first_label, 1)
    return {"active_scores": active[0], "inactive_scores": inactive[0]}


def label_histogram_block(y_true: Any, scores: Array, edges: Array, first_label: int = 0) -> Partial:
    """Count the scores of a tile between the edges label by label; see `score_histogram_block`.

    Counts of row blocks add; those of tiles are put side by side by the caller. Labels x bins
    must not exceed `MAX_LABEL_BINS`: with many labels take few edges, or one threshold for all.

    Returns
    -------
    dict of str to ndarray
        "label_active_scores" and "label_inactive_scores", int64 counts (t, B + 2).
    """
    n_labels, n_bins = score_tile(scores).shape[1], np.size(edges) + 1
    if n_labels * n_bins > MAX_LABEL_BINS:
        raise UsageError(
            f"{n_labels} labels x {n_bins} bins exceed {MAX_LABEL_BINS} counts: "
            "use fewer edges, or one threshold for all labels"
        )
    active, inactive = _histogram(y_true, scores, edges, first_label, n_labels)
    return {"label_active_scores": active, "label_inactive_scores": inactive}


def score_bins(scores: Array, edges: Array) -> Array:
    """Return the bin of every score of a tile: how many of the edges are at or below it.

    Examples
    --------
    >>> score_bins(np.array([[0.1, 0.5, 0.9]]), np.array([0.5, 0.75]))
    array([[0, 1, 2]], dtype=uint8)
    """
    tile, edges = score_tile(scores), checked_edges(edges)
    bins = np.empty(tile.shape, dtype=np.min_scalar_type(edges.size))
    refuse_nan(_tile_bins(tile, edges, *_cells(edges), bins), tile, 0)
    return bins


def checked_edges(edges: Any) -> Array:
    checked = np.ascontiguousarray(edges, dtype=np.float64)
    if (
        checked.ndim != 1
        or not checked.size
        or not np.isfinite(checked).all()
        or (checked[1:] <= checked[:-1]).any()
    ):
        raise UsageError("edges must be a vector of increasing, finite numbers: see uniform_edges")
    return checked


def matching_tile(y_true: Any, scores: Array, first_label: int) -> tuple[Any, Array]:
    labels, tile = label_rows(y_true), score_tile(scores)
    if labels.shape[0] != tile.shape[0] or not 0 <= first_label <= labels.shape[1] - tile.shape[1]:
        raise UsageError(
            f"scores of shape {tile.shape} from label {first_label} on do not lie inside y_true of shape "
            f"{labels.shape}: give the same rows, and the index of the first label of the tile"
        )
    return labels, tile


def _histogram(
    y_true: Any, scores: Array, edges: Array, first_label: int, groups: int
) -> tuple[Array, Array]:
    labels, tile = matching_tile(y_true, scores, first_label)
    edges = checked_edges(edges)
    active = np.zeros((groups, edges.size + 1), dtype=np.int64)
    total = np.zeros_like(active)
    nan = _count_scores(
        labels.indptr, labels.indices, tile, first_label, edges, *_cells(edges), active, total
    )
    refuse_nan(nan, tile, first_label)
    return active, total - active


def _cells(edges: Array) -> tuple[Array, float, float]:
    """Cut the range of the edges into equal cells: how many edges lie in those before each, and the scale.

    Return also the step between the edges if that is a power of two and nothing is rounded, or else 0.
    """
    number = min(2 * edges.size, 2**20)
    # Python's numbers: a width that overflows, or whose inverse does, is no error but means one cell.
    width = float(edges[-1]) - float(edges[0])
    step = width / (edges.size - 1) if width > 0 else 1.0
    power_of_two = math.frexp(step)[0] == 0.5 and math.isfinite(1 / step)
    if power_of_two and np.array_equal(edges - edges[0], np.arange(edges.size) * step):
        return np.zeros(0, dtype=np.int64), 1 / step, step
    scale = number / width if width > 0 else 0.0
    scale = scale if math.isfinite(scale) else 0.0
    return _edges_before(edges, scale, number), scale, 0.0


@compiled
def _cell(score: float, low: float, scale: float, number: int) -> int:
    # Monotone in the score, rounding included, so edges of earlier cells are below a score of this one.
    return min(int((score - low) * scale), number - 1) if scale > 0 else 0


@compiled
def _edges_before(edges: Array, scale: float, number: int) -> Array:
    before = np.zeros(number + 1, dtype=np.int64)
    for edge in edges:
        before[_cell(edge, edges[0], scale, number) + 1] += 1
    return np.cumsum(before)


@compiled
def _regular_bins(scores: Array, edges: Array, scale: float, step: float, out: Array) -> int:
    """What `_bins` does, for edges at equal distances and without a branch."""
    lowest, last = edges[0], float(edges.size - 1)
    unknown = 0
    for j in range(scores.size):
        score = np.float64(scores[j])
        unknown += score != score
        place = (score - lowest) * scale
        place = place if place < last else last
        before = np.int32(place if place > 0.0 else 0.0)
        # A score just below an edge may be rounded up to it.
        out[j] = before + np.int32(lowest + before * step <= score)
    if unknown:
        for j in range(scores.size):
            if np.isnan(scores[j]):
                return j
    return -1


@compiled
def _bins(scores: Array, edges: Array, cells: Array, scale: float, step: float, out: Array) -> int:
    """Number of edges at or below each score of a row; return the place of a NaN, or -1."""
    if step > 0:
        return _regular_bins(scores, edges, scale, step, out)
    lowest, highest = edges[0], edges[-1]
    for j in range(scores.size):
        score = np.float64(scores[j])
        if not (lowest <= score < highest):
            if np.isnan(score):
                return j
            out[j] = 0 if score < lowest else edges.size
            continue
        cell = _cell(score, lowest, scale, cells.size - 1)
        low, high = cells[cell], cells[cell + 1]
        if high - low <= 1:
            # An edge of a later cell is above the score. A branch would be guessed wrong half the time.
            low += np.int64(edges[low] <= score)
        else:
            while low < high:
                middle = (low + high) >> 1
                if edges[middle] <= score:
                    low = middle + 1
                else:
                    high = middle
        out[j] = low
    return -1


@compiled
def _tile_bins(tile: Array, edges: Array, cells: Array, scale: float, step: float, out: Array) -> int:
    """Fill the bins of a tile; return the flat place of a NaN, or -1."""
    for i in range(tile.shape[0]):
        nan = _bins(tile[i], edges, cells, scale, step, out[i])
        if nan >= 0:
            return int(i * tile.shape[1] + nan)
    return -1


@compiled
def _count_scores(
    indptr: Array,
    indices: Array,
    tile: Array,
    first_label: int,
    edges: Array,
    cells: Array,
    scale: float,
    step: float,
    active: Array,
    total: Array,
) -> int:
    """Count all scores and those of active entries, by label if there is more than one row to count in.

    Return the flat place of a NaN, or -1.
    """
    by_label = total.shape[0] > 1
    width = tile.shape[1]
    bins = np.empty(width, dtype=np.int32)
    for i in range(tile.shape[0]):
        nan = _bins(tile[i], edges, cells, scale, step, bins)
        if nan >= 0:
            return int(i * width + nan)
        if by_label:
            for j in range(width):
                total[j, bins[j]] += 1
        else:
            for j in range(width):
                total[0, bins[j]] += 1
        for entry in range(indptr[i], indptr[i + 1]):
            j = indices[entry] - first_label
            if 0 <= j < width:
                active[j if by_label else 0, bins[j]] += 1
    return -1
