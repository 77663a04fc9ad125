"""Everything that depends on a threshold, from histograms of the scores: ROC, AUC, F1 curves, thresholds.

- At a threshold that is an edge, true and false positives (score >= edge) are **exact**.
- In the AUC a pair of an active and an inactive entry of the same bin counts one half, so that the
  **error is at most half the sum over bins of (share of the active) x (share of the inactive)
  entries**. Bins that can hold one value only are left out of that sum: their pairs are ties, which
  count one half anyway.
- With `exact_edges`, which separate every distinct score of an active entry from all others, the
  AUC is therefore exact, at the price of edges in memory in proportion to the active entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .histograms import active_entry_scores, checked_edges, exact_edges, matching_tile, score_histogram_block
from .ranking import quotient

__all__ = [
    "Auc",
    "ThresholdCurve",
    "at_least",
    "auc_from_histogram",
    "best_label_thresholds",
    "last_argmax",
    "micro_auc",
    "threshold_curve",
]

Array = npt.NDArray[Any]
Partial = dict[str, Array]


@dataclass(frozen=True)
class Auc:
    """Area under the ROC curve, and a bound on its error; NaN where a kind of entry is missing."""

    value: float
    error_bound: float


@dataclass(frozen=True)
class ThresholdCurve:
    """Micro counts at every threshold, -inf, the edges and inf: exact at all of them.

    Attributes
    ----------
    thresholds : ndarray (B + 3,)
        Increasing; a label is predicted where its score is at least this.
    tp, fp : ndarray of int (B + 3,)
        Active and inactive entries predicted.
    n_active, n_inactive : int
        Entries of either kind.
    """

    thresholds: Array
    tp: Array
    fp: Array
    n_active: int
    n_inactive: int

    def precision(self, zero_division: float = 0.0) -> Array:
        """Micro precision at every threshold."""
        return quotient(self.tp, self.tp + self.fp, zero_division)

    def recall(self, zero_division: float = 0.0) -> Array:
        """Micro recall, the true positive rate, at every threshold."""
        return quotient(self.tp, self.n_active, zero_division)

    def false_positive_rate(self, zero_division: float = 0.0) -> Array:
        """Share of the inactive entries that are predicted: the ROC curve's other axis."""
        return quotient(self.fp, self.n_inactive, zero_division)

    def f1(self, zero_division: float = 0.0) -> Array:
        """Micro F1 at every threshold."""
        return quotient(2 * self.tp, self.tp + self.fp + self.n_active, zero_division)

    def best(self) -> tuple[float, float]:
        """Return the finite threshold of the largest micro F1, and that F1; of several the largest."""
        f1 = self.f1()[1:-1]
        place = f1.size - 1 - int(np.argmax(f1[::-1]))
        return float(self.thresholds[1 + place]), float(f1[place])


def auc_from_histogram(partial: Partial, edges: Array) -> Auc:
    """Return the micro AUC from summed histograms, with the bound on its error.

    Examples
    --------
    >>> edges = np.array([0.5])
    >>> partial = score_histogram_block([[0, 1, 1]], np.array([[0.1, 0.2, 0.9]]), edges)
    >>> auc_from_histogram(partial, edges)
    Auc(value=0.75, error_bound=0.25)
    """
    edges = checked_edges(edges)
    one_value = np.zeros(edges.size + 1, dtype=bool)
    one_value[1:-1] = np.nextafter(edges[:-1], np.inf) == edges[1:]
    # Pairs of entries may exceed 64 bits: Python's integers then.
    large = int(partial["active_scores"].sum()) * int(partial["inactive_scores"].sum()) >= 2**61
    active, inactive = (
        partial[f"{name}_scores"].astype(object if large else np.int64) for name in ("active", "inactive")
    )
    at_least_active = np.cumsum(active[::-1])[::-1]
    pairs = int(at_least_active[0]) * int(inactive.sum())
    if pairs == 0:
        return Auc(math.nan, math.nan)
    wins = int((inactive * (2 * at_least_active - active)).sum())
    unknown = int((active * inactive)[~one_value].sum())
    return Auc(wins / (2 * pairs), unknown / (2 * pairs))


def threshold_curve(partial: Partial, edges: Array) -> ThresholdCurve:
    """Return true and false positives at every edge as threshold, exactly; also the ROC curve.

    Examples
    --------
    >>> edges = np.array([0.0, 0.5, 1.0])
    >>> y_true, scores = [[0, 1, 1]], np.array([[0.1, 0.2, 0.9]])
    >>> curve = threshold_curve(score_histogram_block(y_true, scores, edges), edges)
    >>> curve.tp.tolist(), curve.fp.tolist()
    ([2, 2, 1, 0, 0], [1, 1, 0, 0, 0])
    >>> curve.best()
    (0.0, 0.8)
    """
    edges = checked_edges(edges)
    tp, fp = at_least(partial["active_scores"]), at_least(partial["inactive_scores"])
    return ThresholdCurve(np.concatenate([[-np.inf], edges, [np.inf]]), tp, fp, int(tp[0]), int(fp[0]))


def best_label_thresholds(
    partial: Partial, edges: Array, *, score: str = "micro_f1", unseen: float = math.inf
) -> Array:
    """Return the threshold of every label, out of the edges and inf, that is best for a score.

    Parameters
    ----------
    partial : dict
        Summed `label_histogram_block`, all labels.
    edges : ndarray (B + 1,)
        The edges of the histograms.
    score : {"micro_f1", "macro_f1"}
        The score to maximise over all choices. Of equally good ones the larger threshold is taken.
    unseen : float
        Threshold of labels without an active entry; by default they are never predicted.

    Returns
    -------
    ndarray (L,)

    Examples
    --------
    >>> from dswml.histograms import label_histogram_block
    >>> edges = np.array([0.0, 0.5])
    >>> y_true, scores = [[1, 0], [0, 1]], np.array([[0.3, 0.1], [-0.2, 0.9]])
    >>> best_label_thresholds(label_histogram_block(y_true, scores, edges), edges)
    array([0. , 0.5])
    """
    thresholds = np.concatenate([checked_edges(edges), [np.inf]])
    tp = at_least(partial["label_active_scores"])
    predicted = tp + at_least(partial["label_inactive_scores"])
    active = tp[:, 0].copy()
    tp, predicted = tp[:, 1:], predicted[:, 1:]
    if score == "macro_f1":
        place = last_argmax(quotient(2 * tp, predicted + active[:, None], 0.0))
    elif score == "micro_f1":
        place = _best_for_micro_f1(tp, predicted, int(active.sum()))
    else:
        raise UsageError(f"score is {score!r}: it must be 'micro_f1' or 'macro_f1'")
    return np.where(active > 0, thresholds[place], unseen)


def micro_auc(y_true: Any, scores: Array, edges: Array | None = None) -> Auc:
    """Return the micro AUC of whole arrays: exact by default, or over the bins of some edges.

    Examples
    --------
    >>> micro_auc([[0, 1, 1]], np.array([[0.2, 0.2, 0.9]]))
    Auc(value=0.75, error_bound=0.0)
    """
    labels, tile = matching_tile(y_true, scores, 0)
    if edges is None:
        edges = exact_edges(active_entry_scores(labels, tile))
    return auc_from_histogram(score_histogram_block(labels, tile, edges), edges)


def _best_for_micro_f1(tp: Array, predicted: Array, n_active: int) -> Array:
    """Dinkelbach's iteration: the best ratio f makes the best sum of 2 tp - f predicted equal f n_active,
    and that sum is the best label by label."""
    labels = np.arange(len(tp))
    best = -1.0
    place = np.full(len(tp), tp.shape[1] - 1)
    f1 = 0.0
    while f1 > best:
        best = f1
        place = last_argmax(2 * tp - best * predicted)
        denominator = int(predicted[labels, place].sum()) + n_active
        f1 = 2 * int(tp[labels, place].sum()) / denominator if denominator else 0.0
    return place


def last_argmax(values: Array) -> Array:
    """Place of the largest value of every row; of equal ones the last."""
    place: Array = values.shape[1] - 1 - np.argmax(values[:, ::-1], axis=1)
    return place


def at_least(counts: Array) -> Array:
    """Number of scores at or above -inf, every edge, and inf."""
    sums = np.cumsum(counts[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([sums, np.zeros((*counts.shape[:-1], 1), dtype=np.int64)], axis=-1)
