"""Rules that choose labels from scores, tuned on held-out rows: one threshold, one a label, or the k best.

There is a small number of candidates, in the order in which they predict fewer and fewer labels, and a
score lies in a *bin*: the number of candidates that predict its label. So the numbers of true and
false positives at all candidates follow from histograms over the bins, of every label or of all together,
and the sums of precision, recall and F1 of the rows from the histograms of the rows, which are not kept.
Thresholds are multiples of a power of 1/2, so that they are written and compared without rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .histograms import MAX_LABEL_BINS, label_histogram_block, score_bins, uniform_edges
from .metrics import COUNTS, ROW_SUMS, label_curves
from .roc import at_least, best_label_thresholds, last_argmax
from .scoring import Rule
from .selection import compiled, label_rows

__all__ = ["KINDS", "LOSSES", "RULE_SCORES", "Candidates", "direction", "plan_candidates", "rule_block"]

Array = npt.NDArray[Any]
Partial = dict[str, Array]

#: What can be tuned instead of a given threshold: one for all labels, one for each, the k best.
KINDS = ("tuned", "per-label", "rcut")
#: Scores of which less is better.
LOSSES = ("hamming_loss", "weighted_hamming_loss")
#: Scores that depend on the rule; the rule is tuned for micro-F1 where another one chooses the point.
RULE_SCORES = (
    *(f"{kind}_{name}" for kind in ("micro", "macro", "samples") for name in ("precision", "recall", "f1")),
    "coverage",
    *LOSSES,
)
#: Scores that thresholds label by label can be tuned for.
LABEL_SCORES = ("micro_f1", "macro_f1")
#: The thresholds that are tried: a population minimiser scores between 0 and 1, and a fit goes beyond.
LOWEST, HIGHEST = -0.25, 1.25
#: Distance of two thresholds; doubled up to the second where counts label by label find no room.
STEP, COARSEST = 2**-6, 2**-2
#: Largest k of the k best.
MAX_TOP_K = 64


def direction(score: str) -> int:
    """Return 1 for a score of which more is better, and -1 for a loss.

    Examples
    --------
    >>> direction("micro_f1"), direction("hamming_loss")
    (1, -1)
    """
    return -1 if score in LOSSES else 1


@dataclass(frozen=True)
class Candidates:
    """The rules to choose from, and the score that chooses.

    Attributes
    ----------
    kind : {"fixed", "tuned", "per-label", "rcut"}
    target : str
        One of `RULE_SCORES`.
    n_labels : int
    edges : ndarray (C,)
        The thresholds, increasing; none for "rcut".
    top_k : int
        The largest k of "rcut", or 0.

    Examples
    --------
    >>> rules = plan_candidates("tuned", "micro_f1", n_labels=3, k_hat=2)
    >>> sums = rules.count([[1, 0, 0], [0, 1, 1]], np.array([[0.9, 0.4, 0.1], [0.2, 0.7, 0.6]]), None)
    >>> str(rules.best(sums, p0=0.5))
    'score >= 0.59375'
    """

    kind: str
    target: str
    n_labels: int
    edges: Array
    top_k: int = 0

    @property
    def number(self) -> int:
        """Number of candidates; thresholds label by label are chosen among so many for each."""
        return self.top_k or self.edges.size

    @property
    def tuned(self) -> bool:
        """Whether there is anything to choose from."""
        return self.kind != "fixed"

    @property
    def by_label(self) -> bool:
        """Whether true and false positives are counted label by label."""
        return not self.tuned or _needs_labels(self.kind, self.target)

    @property
    def nbytes(self) -> int:
        """Size of the counts."""
        return 16 * (self.n_labels if self.by_label else 1) * (self.number + 1) + 40 * self.number

    def count(self, y_true: Any, scores: Array, top: Array | None) -> Partial:
        """Return the counts of some rows at all candidates; those of other rows add.

        ``top`` has the best labels of the rows, as many as "rcut" needs at least.
        """
        if self.kind == "per-label":
            return label_histogram_block(y_true, scores, self.edges)
        if self.kind == "rcut":
            assert top is not None
            bins = np.zeros(scores.shape, dtype=np.uint8)
            places = np.arange(self.top_k, 0, -1, dtype=np.uint8)
            np.put_along_axis(bins, top[:, : self.top_k], places[None], axis=1)
        else:
            bins = score_bins(scores, self.edges)
        return rule_block(y_true, bins, self.number, by_label=self.by_label)

    def best(self, sums: Partial, p0: float) -> Rule:
        """Return the best rule for the rows that were counted; of equals the one with fewest labels."""
        if not self.tuned:
            return Rule(float(self.edges[0]))
        if self.kind == "per-label":
            return Rule(best_label_thresholds(sums, self.edges, score=self.target))
        curve = label_curves(self.at(sums), self.n_labels, p0=p0)[self.target]
        place = int(last_argmax(direction(self.target) * curve[None])[0])
        return Rule(top_k=self.top_k - place) if self.kind == "rcut" else Rule(float(self.edges[place]))

    def at(self, sums: Partial, rule: Rule | None = None) -> Partial:
        """Return what `dswml.metrics.label_curves` needs, at one rule or at all candidates."""
        tp, fp = (at_least(sums[f"label_{name}_scores"]) for name in ("active", "inactive"))
        active = tp[:, 0]
        places = np.arange(self.number)
        if rule is not None and rule.top_k is not None:
            places = np.array([self.top_k - rule.top_k])
        elif rule is not None:
            places = np.searchsorted(self.edges, np.atleast_1d(np.asarray(rule.threshold)))
        out: Partial = {name: sums[name] for name in ("n_rows", "rows_without_label")}
        if self.kind == "per-label":
            labels = np.arange(self.n_labels)
            tp, fp = (each[labels, 1 + places][None] for each in (tp, fp))
        else:
            tp, fp = (each[:, 1 + places].T for each in (tp, fp))
            out |= {name: sums[name][places] for name in ROW_SUMS}
        return {**out, **dict(zip(COUNTS, (tp, fp, active - tp), strict=True))}


def _needs_labels(kind: str, target: str) -> bool:
    return kind == "per-label" or target.startswith("macro_") or target == "coverage"


def plan_candidates(
    threshold: float | str, score: str, n_labels: int, k_hat: int, room: float = math.inf
) -> Candidates:
    """Return the candidates of what is to be tuned.

    Parameters
    ----------
    threshold : float or {"tuned", "per-label", "rcut"}
        A given threshold is the only candidate.
    score : str
        The score that chooses; where it does not depend on the rule, that is tuned for micro-F1.
    n_labels, k_hat : int
        Number of labels, and largest number of labels of a row: the k best are tried up to that, or 64.
    room : float
        Bytes that counts label by label may take: there are fewer candidates where they would take more.

    Examples
    --------
    >>> plan_candidates("rcut", "micro_f1", n_labels=50, k_hat=7).number
    7
    >>> plan_candidates("tuned", "P@1", n_labels=50, k_hat=7).edges[[0, 1, -1]]
    array([-0.25    , -0.234375,  1.25    ])
    """
    target = score if score in RULE_SCORES else "micro_f1"
    if not isinstance(threshold, str):
        if not math.isfinite(threshold):
            raise UsageError(f"the threshold is {threshold!r}: give a finite number, or {_either(KINDS)}")
        return Candidates("fixed", target, n_labels, np.array([float(threshold)]))
    if threshold not in KINDS:
        raise UsageError(f"the threshold is {threshold!r}: give a number, or {_either(KINDS)}")
    if threshold == "per-label" and target not in LABEL_SCORES:
        raise UsageError(
            f"thresholds label by label cannot be tuned for {score!r}: choose by {_either(LABEL_SCORES)}, "
            "or tune one threshold for all labels with 'tuned'"
        )
    most = math.inf
    if _needs_labels(threshold, target):
        most = min(room / (16 * n_labels), MAX_LABEL_BINS // n_labels) - 1
    if threshold == "rcut":
        return Candidates(
            threshold, target, n_labels, np.zeros(0), int(max(min(k_hat, n_labels, MAX_TOP_K, most), 1))
        )
    step = STEP
    while (HIGHEST - LOWEST) / step + 1 > most and step < COARSEST:
        step *= 2
    return Candidates(
        threshold, target, n_labels, uniform_edges(round((HIGHEST - LOWEST) / step), LOWEST, HIGHEST)
    )


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"


def rule_block(y_true: Any, bins: Array, number: int, *, by_label: bool) -> Partial:
    """Return the sums of `dswml.metrics.label_block` at all candidates, from the bins of all labels.

    Parameters
    ----------
    y_true : csr_array (n, L)
        True labels.
    bins : ndarray of int (n, L)
        Number of candidates that predict each label.
    number : int
        Number of candidates C.
    by_label : bool
        Count label by label.

    Returns
    -------
    dict of str to ndarray
        Histograms "label_active_scores" and "label_inactive_scores", int64 (L, C + 1) or (1, C + 1);
        "n_rows", "rows_without_label"; the others of `label_block` that are of rows (C,).

    Examples
    --------
    >>> sums = rule_block([[1, 0, 1]], np.array([[2, 1, 0]]), 2, by_label=False)
    >>> sums["label_active_scores"], sums["row_precision"]
    (array([[1, 0, 1]]), array([0.5, 1. ]))
    """
    labels = label_rows(y_true)
    active = np.zeros((labels.shape[1] if by_label else 1, number + 1), dtype=np.int64)
    total = np.zeros_like(active)
    without = np.zeros((2, number), dtype=np.int64)
    sums = np.zeros((3, number))
    _count_rules(labels.indptr, labels.indices, bins, active, total, without, sums)
    return {
        "n_rows": np.array(labels.shape[0], dtype=np.int64),
        "rows_without_label": np.array(np.count_nonzero(np.diff(labels.indptr) == 0), dtype=np.int64),
        "label_active_scores": active,
        "label_inactive_scores": total - active,
        **dict(zip(ROW_SUMS, (*without, *sums), strict=True)),
    }


@compiled
def _count_rules(
    indptr: Array, indices: Array, bins: Array, active: Array, total: Array, without: Array, sums: Array
) -> None:
    """Walk over the rows: add to the histograms and, from each row's own, to the sums of the rows."""
    by_label = total.shape[0] > 1
    number = sums.shape[1]
    n_rows, n_labels = bins.shape
    alone = by_label and number == 1  # then bins are predictions, and can be added up
    row_active = np.zeros(number + 1, dtype=np.int64)
    row_total = np.zeros(number + 1, dtype=np.int64)
    for i in range(n_rows):
        row_active[:] = 0
        row_total[:] = 0
        if alone:
            chosen = 0
            for j in range(n_labels):
                chosen += bins[i, j]
                total[j, 1] += bins[i, j]
            row_total[1] = chosen
        else:
            for j in range(n_labels):
                row_total[bins[i, j]] += 1
        for entry in range(indptr[i], indptr[i + 1]):
            row_active[bins[i, indices[entry]]] += 1
        if by_label:
            for j in range(0 if alone else n_labels):
                total[j, bins[i, j]] += 1
            for entry in range(indptr[i], indptr[i + 1]):
                active[indices[entry], bins[i, indices[entry]]] += 1
        else:
            total[0] += row_total
            active[0] += row_active
        true = indptr[i + 1] - indptr[i]
        tp = predicted = 0
        for c in range(number - 1, -1, -1):
            tp += row_active[c + 1]
            predicted += row_total[c + 1]
            without[0, c] += predicted == 0
            without[1, c] += predicted + true == 0
            if tp > 0:
                sums[0, c] += tp / predicted
                sums[1, c] += tp / true
                sums[2, c] += 2 * tp / (predicted + true)
    if alone:
        total[:, 0] = n_rows - total[:, 1]
