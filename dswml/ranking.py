"""Scores of rankings, summed over row blocks: P@k, nDCG@k, R@k, coverage@k, PSP@k and PSnDCG@k.

For a row with active labels T, |T| = m, and the ranking l_1, ..., l_K, with rel_j = 1 where l_j is
in T and d_j = 1 / log2(j + 1), the scores at every k = 1, ..., K are

- P@k       mean over rows of 1/k sum_{j<=k} rel_j;
- R@k       mean over rows of 1/m sum_{j<=k} rel_j;
- nDCG@k    mean over rows of sum_{j<=k} rel_j d_j / sum_{j<=min(k,m)} d_j;
- PSP@k     sum over rows of 1/k sum_{j<=k} q_j rel_j, over the same sum for the best ranking;
- PSnDCG@k  sum over rows of sum_{j<=k} q_j rel_j d_j / sum_{j<=min(k,m)} d_j, over the same for the best;
- coverage@k  share of the labels active in some row that are among the first k of a row where
  they are active,

where q_j is the inverse propensity of l_j (Jain, Prabhu and Varma 2016) and the best ranking of a
row puts its active labels in the order of their inverse propensity. These are the definitions of
napkinXC 0.7 (normalised) and, but for coverage@k, which it lacks, of pyxclib. Both libraries and this
module divide P@k by k even where a ranking is shorter, and count a row without active labels as
0 and as a row; napkinXC's ``zero_division`` for such rows is ours as well. What differs: equal scores
are ranked by label index here and in no stated order there, pyxclib rounds nDCG to float32, and
where there is no active label at all both divide by zero where `ranking_scores` returns
``zero_division``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DataError, UsageError
from .selection import compiled, label_rows

__all__ = [
    "coverage_at_k",
    "inverse_propensities",
    "ndcg_at_k",
    "precision_at_k",
    "psndcg_at_k",
    "psp_at_k",
    "ranking_block",
    "ranking_curves",
    "ranking_scores",
    "recall_at_k",
]

Array = npt.NDArray[Any]
Partial = dict[str, Array]


#: Sums over rows of a partial, by name; all but the first two need propensities.
SUMS = ("recall_gain", "ndcg", "ps_gain", "ps_best_gain", "psndcg", "psndcg_best")


def inverse_propensities(label_counts: Array, n_rows: int, a: float = 0.55, b: float = 1.5) -> Array:
    """Return 1 / p_l = 1 + (ln N - 1) (b + 1)^a (N_l + b)^-a of all labels (Jain et al. 2016).

    Parameters
    ----------
    label_counts : ndarray (L,)
        Number of *training* rows where each label is active.
    n_rows : int
        Number of training rows, at least 3: below that the model gives probabilities above 1.
    a, b : float
        Usual values: 0.5, 0.4 for Wikipedia, 0.6, 2.6 for Amazon, 0.55, 1.5 for all others.

    Examples
    --------
    >>> inverse_propensities(np.array([0, 10, 1000]), 1000).round(3)
    array([8.824, 3.552, 1.219])
    """
    if n_rows < 3:
        raise UsageError(
            f"propensities from {n_rows} training rows are not probabilities: at least 3 are needed"
        )
    counts = np.asarray(label_counts, dtype=np.float64)
    if counts.ndim != 1 or (counts < 0).any() or (counts > n_rows).any():
        raise UsageError(
            f"label counts must be a vector of numbers between 0 and {n_rows}, the number of rows: "
            "give counts and rows of the same training data"
        )
    weights: Array = 1 + (np.log(n_rows) - 1) * (b + 1) ** a * (counts + b) ** -a
    return weights


def ranking_block(
    y_true: Any, top: Array, inverse_propensity: Array | None = None, *, coverage: bool = True
) -> Partial:
    """Return the sums of one row block for `ranking_scores`; sums of blocks add.

    Parameters
    ----------
    y_true : csr_array (n, L)
        True labels.
    top : ndarray of int (n, K)
        Labels of every row, best first; -1 where there is none.
    inverse_propensity : ndarray (L,), optional
        Ask for the propensity-scored metrics; see `inverse_propensities`.
    coverage : bool
        Ask for what coverage@k needs, L (K + 1) integers a block.

    Returns
    -------
    dict of str to ndarray
        Integer counts "n_rows", "rows_without_label", "hits" (K,) and, for the coverage,
        "label_hits" (L, K) and "support" (L,); sums "recall_gain", "ndcg" and, with propensities,
        "ps_gain", "ps_best_gain", "psndcg", "psndcg_best", all (K,).
    """
    labels = label_rows(y_true)
    n_rows, n_labels = labels.shape
    top = np.asarray(top)
    if top.ndim != 2 or top.shape[0] != n_rows or top.shape[1] < 1 or top.dtype.kind not in "iu":
        raise UsageError(
            f"the ranking is {top.dtype} of shape {top.shape}, but y_true has {n_rows} rows: "
            "give the label indices of as many rows, best first"
        )
    top = np.ascontiguousarray(top, dtype=np.int64)
    depth = top.shape[1]
    weights = np.zeros(0)
    if inverse_propensity is not None:
        weights = np.asarray(inverse_propensity, dtype=np.float64)
        if weights.shape != (n_labels,):
            raise UsageError(
                f"the inverse propensities have shape {weights.shape}, but there are {n_labels} labels: "
                "give one for each label"
            )
    hit = np.zeros((n_rows, depth), dtype=np.bool_)
    wrong = _mark_hits(labels.indptr, labels.indices, top, n_labels, hit)
    if wrong >= 0:
        row, place = divmod(wrong, depth)
        raise DataError(
            f"the ranking of row {row} of the block has label {top[row, place]} at place {place + 1}: "
            f"labels must be different and between 0 and {n_labels - 1}, or -1 for none"
        )
    discount = 1 / np.log2(np.arange(2, depth + 2))
    sums = np.zeros((len(SUMS) if inverse_propensity is not None else 2, depth))
    _add_rows(labels.indptr, labels.indices, top, hit, weights, discount, np.cumsum(discount), sums)
    out: Partial = {
        "n_rows": np.array(n_rows, dtype=np.int64),
        "rows_without_label": np.array(np.count_nonzero(np.diff(labels.indptr) == 0), dtype=np.int64),
        "hits": hit.sum(axis=0, dtype=np.int64),
        **dict(zip(SUMS, sums, strict=False)),
    }
    if coverage:
        place = np.broadcast_to(np.arange(depth), hit.shape)[hit]
        flat = np.bincount(top[hit] * depth + place, minlength=n_labels * depth)
        out["label_hits"] = flat.astype(np.int64, copy=False).reshape(n_labels, depth)
        out["support"] = np.bincount(labels.indices, minlength=n_labels).astype(np.int64, copy=False)
    return out


def ranking_curves(partial: Partial, *, zero_division: float = 0.0) -> dict[str, Array]:
    """Return every score that the summed partial allows, at k = 1, ..., K.

    Parameters
    ----------
    partial : dict
        Sum of the partials of all row blocks.
    zero_division : float
        nDCG and R of a row without active labels, which napkinXC also adds to both sums of
        PSnDCG, and the value of a ratio whose denominator is zero over all rows.

    Returns
    -------
    dict of str to ndarray (K,)
        "P", "nDCG", "R" and, where asked for, "PSP", "PSnDCG", "coverage".
    """
    n_rows = int(partial["n_rows"])
    if n_rows == 0:
        raise DataError("there are no rows to score: give at least one row")
    extra = zero_division * int(partial["rows_without_label"])
    k = np.arange(1, partial["hits"].size + 1)
    curves: dict[str, Array] = {
        "P": np.cumsum(partial["hits"]) / (k * n_rows),
        "nDCG": (partial["ndcg"] + extra) / n_rows,
        "R": (np.cumsum(partial["recall_gain"]) + extra) / n_rows,
    }
    if "ps_gain" in partial:
        gain, best = np.cumsum(partial["ps_gain"]), np.cumsum(partial["ps_best_gain"])
        curves["PSP"] = quotient(gain, best, zero_division)
        curves["PSnDCG"] = quotient(partial["psndcg"] + extra, partial["psndcg_best"] + extra, zero_division)
    if "label_hits" in partial:
        found = np.count_nonzero(np.cumsum(partial["label_hits"], axis=1), axis=0)
        curves["coverage"] = quotient(found, int(np.count_nonzero(partial["support"])), zero_division)
    return curves


def ranking_scores(partial: Partial, *, zero_division: float = 0.0) -> dict[str, float]:
    """Return the scores of `ranking_curves` by name: "P@1", "P@2", ..., "nDCG@1", ...

    Examples
    --------
    >>> partial = ranking_block([[1, 0, 1], [0, 1, 0]], np.array([[0, 1], [2, 0]]))
    >>> ranking_scores(partial)["P@1"]
    0.5
    """
    return {
        f"{name}@{k}": float(value)
        for name, curve in ranking_curves(partial, zero_division=zero_division).items()
        for k, value in enumerate(curve, start=1)
    }


def precision_at_k(y_true: Any, top: Array) -> Array:
    """Return P@1, ..., P@K of rankings of K labels, best first.

    Examples
    --------
    >>> precision_at_k([[1, 0, 1]], np.array([[2, 1, 0]]))
    array([1.        , 0.5       , 0.66666667])
    """
    return _curve("P", y_true, top)


def recall_at_k(y_true: Any, top: Array, *, zero_division: float = 0.0) -> Array:
    """Return R@1, ..., R@K: the share of a row's active labels among its first k.

    Examples
    --------
    >>> recall_at_k([[1, 0, 1]], np.array([[2, 1, 0]]))
    array([0.5, 0.5, 1. ])
    """
    return _curve("R", y_true, top, zero_division=zero_division)


def ndcg_at_k(y_true: Any, top: Array, *, zero_division: float = 0.0) -> Array:
    """Return nDCG@1, ..., nDCG@K.

    Examples
    --------
    >>> ndcg_at_k([[1, 0, 1]], np.array([[2, 1, 0]])).round(3)
    array([1.   , 0.613, 0.92 ])
    """
    return _curve("nDCG", y_true, top, zero_division=zero_division)


def psp_at_k(y_true: Any, top: Array, inverse_propensity: Array) -> Array:
    """Return PSP@1, ..., PSP@K, normalised by the best possible ranking.

    Examples
    --------
    >>> psp_at_k([[1, 0, 1]], np.array([[2, 1, 0]]), np.array([4.0, 2.0, 1.0])).round(3)
    array([0.25, 0.2 , 1.  ])
    """
    return _curve("PSP", y_true, top, inverse_propensity)


def psndcg_at_k(y_true: Any, top: Array, inverse_propensity: Array, *, zero_division: float = 0.0) -> Array:
    """Return PSnDCG@1, ..., PSnDCG@K, normalised by the best possible ranking.

    Examples
    --------
    >>> psndcg_at_k([[1, 0, 1]], np.array([[2, 1, 0]]), np.array([4.0, 2.0, 1.0])).round(3)
    array([0.25 , 0.216, 0.648])
    """
    return _curve("PSnDCG", y_true, top, inverse_propensity, zero_division=zero_division)


def coverage_at_k(y_true: Any, top: Array) -> Array:
    """Return coverage@1, ..., coverage@K: the share of occurring labels found at least once.

    Examples
    --------
    >>> coverage_at_k([[1, 0, 1], [1, 0, 0]], np.array([[0, 2], [0, 1]]))
    array([0.5, 1. ])
    """
    return _curve("coverage", y_true, top)


def _curve(
    name: str,
    y_true: Any,
    top: Array,
    inverse_propensity: Array | None = None,
    *,
    zero_division: float = 0.0,
) -> Array:
    partial = ranking_block(y_true, top, inverse_propensity, coverage=name == "coverage")
    return ranking_curves(partial, zero_division=zero_division)[name]


def quotient(numerator: Array, denominator: Array | int, zero_division: float) -> Array:
    """Divide, with ``zero_division`` where the denominator is zero."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    out = np.full(numerator.shape, zero_division, dtype=np.float64)
    np.divide(numerator, denominator, out=out, where=denominator != 0)
    return out


@compiled
def _mark_hits(indptr: Array, indices: Array, top: Array, n_labels: int, hit: Array) -> int:
    """Mark where the ranked label is active; return the flat place of a wrong label, or -1."""
    depth = top.shape[1]
    for i in range(top.shape[0]):
        for j in range(depth):
            label = top[i, j]
            if label == -1:
                continue
            if label < 0 or label >= n_labels:
                return int(i * depth + j)
            for earlier in range(j):
                if top[i, earlier] == label:
                    return int(i * depth + j)
            low, high = indptr[i], indptr[i + 1]
            while low < high:
                middle = (low + high) >> 1
                if indices[middle] < label:
                    low = middle + 1
                else:
                    high = middle
            hit[i, j] = low < indptr[i + 1] and indices[low] == label
    return -1


@compiled
def _add_rows(
    indptr: Array,
    indices: Array,
    top: Array,
    hit: Array,
    weights: Array,
    discount: Array,
    ideal: Array,
    sums: Array,
) -> None:
    """Add what each row with active labels contributes to the `SUMS` at every k."""
    depth = top.shape[1]
    best = np.zeros(depth)
    for i in range(top.shape[0]):
        count = indptr[i + 1] - indptr[i]
        if count == 0:
            continue
        if weights.size:
            _best_gains(indices[indptr[i] : indptr[i + 1]], weights, best)
        gain = weighted = weighted_best = 0.0
        for j in range(depth):
            most = ideal[min(j + 1, count) - 1]
            gain += hit[i, j] * discount[j]
            sums[0, j] += hit[i, j] / count
            sums[1, j] += gain / most
            if weights.size:
                own = weights[top[i, j]] if hit[i, j] else 0.0
                weighted += own * discount[j]
                weighted_best += best[j] * discount[j]
                sums[2, j] += own
                sums[3, j] += best[j]
                sums[4, j] += weighted / most
                sums[5, j] += weighted_best / most


@compiled
def _best_gains(active: Array, weights: Array, best: Array) -> None:
    """Put the largest weights of a row's active labels in descending order."""
    depth = best.size
    best[:] = 0
    for taken in range(active.size):
        weight = weights[active[taken]]
        place = min(taken, depth)
        while place > 0 and weight > best[place - 1]:
            place -= 1
        if place < depth:
            for later in range(min(taken, depth - 1), place, -1):
                best[later] = best[later - 1]
            best[place] = weight
