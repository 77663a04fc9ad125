"""How good predictions are: scores of label sets, and one door to all metrics of the package.

Every metric is a pure function of one row block that returns *partials*, named arrays that add
over blocks, and a function from their sum to scores; no array of rows x labels is needed. Counts
are exact integers, the same however rows are cut into blocks. The partials of different
families have different names, but for those that count the same, and can be merged into one.

=======================  =======================================  ==============================
partial of a block       scores of the sum                        from
=======================  =======================================  ==============================
`label_block`            `label_scores`, `label_table`            predicted labels
`rules.rule_block`       `label_curves`                           tiles of scores
`ranking_block`          `ranking_scores`, `ranking_curves`       the k best labels of every row
`score_histogram_block`  `auc_from_histogram`, `threshold_curve`  tiles of scores
`label_histogram_block`  `best_label_thresholds`                  tiles of scores
=======================  =======================================  ==============================

`evaluate` does all of it for arrays in memory.

Precision, recall and F1 are those of scikit-learn with a given ``zero_division``, the value of a
ratio with denominator zero: 0 by default; 1 is what the paper's tables need, where predicting
nothing has precision 1. The macro average is over all labels (napkinXC: up to the last label that
occurs). The Hamming loss is the share of wrong entries (scikit-learn; napkinXC and the paper's Eq. 7
count wrong labels a row, which is L times that). The weighted Hamming loss is the paper's Eq. 6,
p0 times wrongly predicted plus p1 = 1 - p0 times missed labels, a row. Coverage is the share of
the labels active in some row that are predicted correctly at least once (napkinXC's coverage@k
without the k; scikit-learn's coverage error, the depth of a ranking that covers all labels of a
row, is something else). Output sparsity is the mean number of predicted labels a row, label
cardinality that of true labels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .errors import DataError, UsageError
from .histograms import (
    active_entry_scores,
    exact_edges,
    label_histogram_block,
    quantile_edges,
    score_histogram_block,
    uniform_edges,
)
from .ranking import (
    coverage_at_k,
    inverse_propensities,
    ndcg_at_k,
    precision_at_k,
    psndcg_at_k,
    psp_at_k,
    quotient,
    ranking_block,
    ranking_curves,
    ranking_scores,
    recall_at_k,
)
from .roc import (
    Auc,
    ThresholdCurve,
    auc_from_histogram,
    best_label_thresholds,
    micro_auc,
    threshold_curve,
)
from .selection import (
    compiled,
    empty_top_k,
    label_rows,
    labels_of_top_k,
    merge_top_k,
    score_tile,
    select_at_threshold,
    top_k,
)

__all__ = [
    "Auc",
    "ThresholdCurve",
    "active_entry_scores",
    "auc_from_histogram",
    "best_label_thresholds",
    "coverage",
    "coverage_at_k",
    "empty_top_k",
    "evaluate",
    "exact_edges",
    "hamming_loss",
    "inverse_propensities",
    "label_block",
    "label_curves",
    "label_histogram_block",
    "label_scores",
    "label_table",
    "labels_of_top_k",
    "merge_top_k",
    "micro_auc",
    "ndcg_at_k",
    "output_sparsity",
    "precision_at_k",
    "precision_recall_f1",
    "psndcg_at_k",
    "psp_at_k",
    "quantile_edges",
    "ranking_block",
    "ranking_curves",
    "ranking_scores",
    "recall_at_k",
    "score_histogram_block",
    "select_at_threshold",
    "threshold_curve",
    "top_k",
    "uniform_edges",
    "weighted_hamming_loss",
]

Array = npt.NDArray[Any]
Partial = dict[str, Array]
Average = Literal["micro", "macro", "samples"]

#: The sums of `label_block` that depend on the prediction, by label and of rows.
COUNTS = ("tp", "fp", "fn")
ROW_SUMS = ("rows_without_prediction", "rows_without_either", "row_precision", "row_recall", "row_f1")


def label_block(y_true: Any, y_pred: Any) -> Partial:
    """Return the sums of one row block for `label_scores` and `label_table`; sums of blocks add.

    Parameters
    ----------
    y_true, y_pred : csr_array (n, L)
        True and predicted labels.

    Returns
    -------
    dict of str to ndarray
        Integer counts "tp", "fp", "fn" (L,), "n_rows", "rows_without_label",
        "rows_without_prediction", "rows_without_either"; sums over the other rows of "row_precision",
        "row_recall", "row_f1".

    Examples
    --------
    >>> partial = label_block([[1, 0, 1], [0, 1, 0]], [[1, 1, 0], [0, 1, 0]])
    >>> partial["tp"].tolist(), partial["fp"].tolist(), partial["fn"].tolist()
    ([1, 1, 0], [0, 1, 0], [0, 0, 1])
    """
    true, predicted = label_rows(y_true), label_rows(y_pred, "y_pred")
    if true.shape != predicted.shape:
        raise UsageError(
            f"y_true has shape {true.shape} and y_pred {predicted.shape}: give the same rows and labels"
        )
    n_rows, n_labels = true.shape
    tp = np.zeros(n_labels, dtype=np.int64)
    row_tp = np.zeros(n_rows, dtype=np.int64)
    _add_common(true.indptr, true.indices, predicted.indptr, predicted.indices, tp, row_tp)
    row_true, row_predicted = np.diff(true.indptr), np.diff(predicted.indptr)
    either = row_true + row_predicted
    return {
        "n_rows": np.array(n_rows, dtype=np.int64),
        "rows_without_label": _zeros(row_true),
        "rows_without_prediction": _zeros(row_predicted),
        "rows_without_either": _zeros(either),
        "tp": tp,
        "fp": np.bincount(predicted.indices, minlength=n_labels) - tp,
        "fn": np.bincount(true.indices, minlength=n_labels) - tp,
        "row_precision": np.asarray(quotient(row_tp, row_predicted, 0.0).sum()),
        "row_recall": np.asarray(quotient(row_tp, row_true, 0.0).sum()),
        "row_f1": np.asarray(quotient(2 * row_tp, either, 0.0).sum()),
    }


def label_scores(
    partial: Partial, *, p0: float | None = None, zero_division: float = 0.0
) -> dict[str, float]:
    """Return the scores of predicted labels from the sum of the partials of all row blocks.

    Parameters
    ----------
    partial : dict
        Sum of `label_block` over all row blocks.
    p0 : float, optional
        Weight of inactive labels; with it comes the weighted Hamming loss.
    zero_division : float
        Value of a ratio with denominator zero: precision of predicting nothing, recall of nothing.

    Returns
    -------
    dict of str to float
        "micro_precision", "micro_recall", "micro_f1", the same as "macro" and "samples",
        "hamming_loss", "weighted_hamming_loss", "coverage", "output_sparsity", "label_cardinality".

    Examples
    --------
    >>> partial = label_block([[1, 0, 1], [0, 1, 0]], [[1, 1, 0], [0, 1, 0]])
    >>> scores = label_scores(partial, p0=0.25)
    >>> scores["samples_precision"], scores["weighted_hamming_loss"], scores["output_sparsity"]
    (0.75, 0.5, 1.5)
    """
    one = {name: np.asarray(partial[name])[None] for name in (*COUNTS, *ROW_SUMS)}
    curves = label_curves({**partial, **one}, partial["tp"].size, p0=p0, zero_division=zero_division)
    return {name: float(values[0]) for name, values in curves.items()}


def label_curves(
    partial: Partial, n_labels: int, *, p0: float | None = None, zero_division: float = 0.0
) -> dict[str, Array]:
    """Return the scores of `label_scores` for several predictions C of the same rows.

    Parameters
    ----------
    partial : dict
        What `label_block` returns, with a first axis for the predictions: "tp", "fp", "fn" (C, L), or
        (C, 1) if they are known over all labels alone; the sums of rows and the numbers of rows that
        depend on the prediction (C,), if they are known.
    n_labels : int
    p0, zero_division
        As for `label_scores`.

    Returns
    -------
    dict of str to ndarray (C,)
        Without counts by label no "macro" and no "coverage", without sums of rows no "samples".

    Examples
    --------
    >>> totals = {"tp": np.array([[2], [1]]), "fp": np.array([[1], [0]]), "fn": np.array([[0], [1]])}
    >>> label_curves({"n_rows": np.array(2), **totals}, 3)["micro_recall"]
    array([1. , 0.5])
    """
    n_rows = int(partial["n_rows"])
    if not n_rows or not n_labels:
        raise DataError(f"there are {n_rows} rows and {n_labels} labels to score: give at least one of each")
    by_label, by_row = partial["tp"].shape[1] == n_labels, "row_f1" in partial
    tp, fp, fn = (partial[name].sum(axis=1) for name in COUNTS)
    table = label_table(partial, zero_division=zero_division)
    out: dict[str, Array] = {}
    for name, numerator, denominator, empty in (
        ("precision", tp, tp + fp, "rows_without_prediction"),
        ("recall", tp, tp + fn, "rows_without_label"),
        ("f1", 2 * tp, 2 * tp + fp + fn, "rows_without_either"),
    ):
        out[f"micro_{name}"] = quotient(numerator, denominator, zero_division)
        if by_label:
            out[f"macro_{name}"] = table[name].mean(axis=1)
        if by_row:
            out[f"samples_{name}"] = (partial[f"row_{name}"] + zero_division * partial[empty]) / n_rows
    out["hamming_loss"] = (fp + fn) / (n_rows * n_labels)
    if p0 is not None:
        if not 0 <= p0 <= 1:
            raise UsageError(f"p0 is {p0!r}: the weight of inactive labels must lie between 0 and 1")
        out["weighted_hamming_loss"] = (p0 * fp + (1 - p0) * fn) / n_rows
    if by_label:
        found, occurring = (np.count_nonzero(each, axis=1) for each in (partial["tp"], table["support"]))
        out["coverage"] = quotient(found, occurring, zero_division)
    out["output_sparsity"] = (tp + fp) / n_rows
    out["label_cardinality"] = (tp + fn) / n_rows
    return out


def label_table(partial: Partial, *, zero_division: float = 0.0) -> dict[str, Array]:
    """Return "precision", "recall", "f1", "support" and "predicted" (counts) of every label.

    Examples
    --------
    >>> label_table(label_block([[1, 0], [1, 1]], [[1, 0], [0, 1]]))["recall"]
    array([0.5, 1. ])
    """
    tp, fp, fn = partial["tp"], partial["fp"], partial["fn"]
    return {
        "precision": quotient(tp, tp + fp, zero_division),
        "recall": quotient(tp, tp + fn, zero_division),
        "f1": quotient(2 * tp, 2 * tp + fp + fn, zero_division),
        "support": tp + fn,
        "predicted": tp + fp,
    }


def evaluate(
    y_true: Any,
    y_pred: Any = None,
    scores: Any = None,
    *,
    threshold: float | Array | None = None,
    top: Array | None = None,
    k: int = 5,
    p0: float | None = None,
    inverse_propensity: Array | None = None,
    zero_division: float = 0.0,
    edges: Array | None = None,
) -> dict[str, float]:
    """Return every score that what is given allows, for arrays in memory.

    Parameters
    ----------
    y_true : csr_array, sparse matrix or array-like (n, L)
        True labels.
    y_pred : csr_array, sparse matrix or array-like (n, L), optional
        Predicted labels.
    scores : array-like (n, L), optional
        Scores of all labels: adds the micro AUC, and the ranking of the k best labels.
    threshold : float or ndarray (L,), optional
        Predict the labels with at least this score, instead of giving ``y_pred``.
    top : ndarray of int (n, K), optional
        Ranking, best label first, -1 for none, instead of the one by ``scores``.
    k : int
        Length of the ranking by ``scores``, but not more than there are labels.
    p0 : float, optional
        Weight of inactive labels in the weighted Hamming loss.
    inverse_propensity : ndarray (L,), optional
        Adds PSP@k and PSnDCG@k; see `inverse_propensities`.
    zero_division : float
        Value of a ratio with denominator zero.
    edges : ndarray, optional
        Bins for the AUC; exact by default.

    Returns
    -------
    dict of str to float
        The names of `label_scores` and `ranking_scores`, "micro_auc" and "micro_auc_error_bound".

    Examples
    --------
    >>> found = evaluate([[1, 0, 1], [0, 1, 0]], scores=[[0.9, 0.6, 0.4], [0.1, 0.8, 0.2]], threshold=0.5)
    >>> found["micro_f1"], found["P@1"], found["micro_auc"]
    (0.6666666666666666, 1.0, 0.8888888888888888)
    """
    if y_pred is None and scores is None and top is None:
        raise UsageError("there is nothing to evaluate: give y_pred, scores or top")
    if threshold is not None and (scores is None or y_pred is not None):
        raise UsageError(f"threshold={threshold!r} makes predictions of scores: give scores and no y_pred")
    true = label_rows(y_true)
    out: dict[str, float] = {}
    if scores is not None:
        scores = score_tile(scores)
        if scores.shape != true.shape:
            raise UsageError(
                f"y_true has shape {true.shape} and scores {scores.shape}: give the same rows and labels"
            )
        if threshold is not None:
            y_pred = select_at_threshold(scores, threshold)
        if top is None:
            top = top_k(scores, min(k, scores.shape[1]))[0]
    if y_pred is not None:
        out.update(label_scores(label_block(true, y_pred), p0=p0, zero_division=zero_division))
    if top is not None:
        out.update(ranking_scores(ranking_block(true, top, inverse_propensity), zero_division=zero_division))
    if scores is not None:
        auc = micro_auc(true, scores, edges)
        out.update(micro_auc=auc.value, micro_auc_error_bound=auc.error_bound)
    return out


def precision_recall_f1(
    y_true: Any, y_pred: Any, average: Average = "micro", *, zero_division: float = 0.0
) -> tuple[float, float, float]:
    """Return precision, recall and F1, over all entries, or averaged over labels or rows.

    Examples
    --------
    >>> precision_recall_f1([[1, 0, 1]], [[1, 1, 0]])
    (0.5, 0.5, 0.5)
    """
    if average not in ("micro", "macro", "samples"):
        raise UsageError(f"average is {average!r}: it must be 'micro', 'macro' or 'samples'")
    scores = label_scores(label_block(y_true, y_pred), zero_division=zero_division)
    return scores[f"{average}_precision"], scores[f"{average}_recall"], scores[f"{average}_f1"]


def hamming_loss(y_true: Any, y_pred: Any) -> float:
    """Return the share of entries that are wrong.

    Examples
    --------
    >>> hamming_loss([[1, 0, 1, 0]], [[1, 1, 0, 0]])
    0.5
    """
    return label_scores(label_block(y_true, y_pred))["hamming_loss"]


def weighted_hamming_loss(y_true: Any, y_pred: Any, p0: float) -> float:
    """Return the mean over rows of the paper's Eq. 6: p0 x wrongly predicted + (1 - p0) x missed labels.

    Examples
    --------
    >>> weighted_hamming_loss([[1, 0, 1, 0]], [[1, 1, 0, 0]], p0=0.25)
    1.0
    """
    return label_scores(label_block(y_true, y_pred), p0=p0)["weighted_hamming_loss"]


def coverage(y_true: Any, y_pred: Any) -> float:
    """Return the share of the labels active in some row that are predicted correctly at least once.

    Examples
    --------
    >>> coverage([[1, 0, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 1]])
    0.5
    """
    return label_scores(label_block(y_true, y_pred))["coverage"]


def output_sparsity(y_pred: Any) -> float:
    """Return the mean number of predicted labels a row.

    Examples
    --------
    >>> output_sparsity([[1, 0, 1], [1, 0, 0]])
    1.5
    """
    return label_scores(label_block(y_pred, y_pred))["output_sparsity"]


def _zeros(counts: Array) -> Array:
    return np.array(np.count_nonzero(counts == 0), dtype=np.int64)


@compiled
def _add_common(
    true_indptr: Array, true: Array, pred_indptr: Array, pred: Array, label_tp: Array, row_tp: Array
) -> None:
    """Count the labels that two sorted CSR blocks have in common, by label and by row."""
    for i in range(row_tp.size):
        a, b = true_indptr[i], pred_indptr[i]
        while a < true_indptr[i + 1] and b < pred_indptr[i + 1]:
            if true[a] == pred[b]:
                label_tp[true[a]] += 1
                row_tp[i] += 1
                a += 1
                b += 1
            elif true[a] < pred[b]:
                a += 1
            else:
                b += 1
