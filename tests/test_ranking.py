"""Scores of rankings are those of napkinXC and pyxclib, all k in one go, however the rows are cut."""

from __future__ import annotations

from math import log, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import Array, assert_same_sums, bounded, csr, cuts, over_blocks, problems, rankings
from sklearn.metrics import ndcg_score

from dswml import metrics
from dswml.errors import DataError, UsageError
from dswml.ranking import ranking_block, ranking_curves


def by_definition(y_true: Array, top: Array, q: Array, k: int, zero_division: float) -> dict[str, float]:
    """The definitions, row by row: means over rows, or ratios to the best ranking by propensity."""
    p, r, ndcg, psp, best_psp, psn, best_psn = (0.0 for _ in range(7))
    for y, ranked in zip(y_true, top[:, :k], strict=True):
        active = [int(label) for label in np.flatnonzero(y)]
        hits = [place for place, label in enumerate(ranked) if label in active]
        best = sorted((q[label] for label in active), reverse=True)[:k]
        p += len(hits) / k
        psp += sum(q[ranked[j]] for j in hits) / k
        best_psp += sum(best) / k
        if not active:
            r, ndcg, psn, best_psn = (v + zero_division for v in (r, ndcg, psn, best_psn))
            continue
        ideal = sum(1 / log2(j + 2) for j in range(min(k, len(active))))
        r += len(hits) / len(active)
        ndcg += sum(1 / log2(j + 2) for j in hits) / ideal
        psn += sum(q[ranked[j]] / log2(j + 2) for j in hits) / ideal
        best_psn += sum(w / log2(j + 2) for j, w in enumerate(best)) / ideal
    found = {
        label
        for y, ranked in zip(y_true, top[:, :k], strict=True)
        for label in ranked
        if label >= 0 and y[label]
    }
    occurring = np.count_nonzero(y_true.sum(axis=0))
    n = len(y_true)
    return {
        "P": p / n,
        "R": r / n,
        "nDCG": ndcg / n,
        "PSP": psp / best_psp if best_psp else zero_division,
        "PSnDCG": psn / best_psn if best_psn else zero_division,
        "coverage": len(found) / occurring if occurring else zero_division,
    }


@given(rankings(), st.sampled_from([0.0, 1.0]))
@bounded
def test_every_score_at_every_k_follows_its_definition(
    case: tuple[Array, Array, Array], zero_division: float
) -> None:
    y_true, top, weights = case
    curves = ranking_curves(ranking_block(csr(y_true), top, weights), zero_division=zero_division)
    for k in range(1, top.shape[1] + 1):
        expected = by_definition(y_true, top, weights, k, zero_division)
        assert {name: curve[k - 1] for name, curve in curves.items()} == pytest.approx(expected, rel=1e-12)


@given(rankings())
@bounded
def test_one_function_a_metric_gives_the_same_curves(case: tuple[Array, Array, Array]) -> None:
    y_true, top, weights = case
    curves = ranking_curves(ranking_block(csr(y_true), top, weights))
    for name, curve in {
        "P": metrics.precision_at_k(y_true, top),
        "R": metrics.recall_at_k(y_true, top),
        "nDCG": metrics.ndcg_at_k(y_true, top),
        "PSP": metrics.psp_at_k(y_true, top, weights),
        "PSnDCG": metrics.psndcg_at_k(y_true, top, weights),
        "coverage": metrics.coverage_at_k(y_true, top),
    }.items():
        np.testing.assert_array_equal(curve, curves[name], err_msg=name)


@given(problems(min_labels=2), st.data())
@bounded
def test_ndcg_of_scores_without_ties_is_that_of_scikit_learn(
    problem: tuple[Array, Array, Array], data: st.DataObject
) -> None:
    y_true = problem[0]
    n_rows, n_labels = y_true.shape
    scores = np.array([data.draw(st.permutations(range(n_labels))) for _ in range(n_rows)], dtype=float)
    found = metrics.ndcg_at_k(y_true, metrics.top_k(scores, n_labels)[0])
    expected = [ndcg_score(y_true, scores, k=k, ignore_ties=True) for k in range(1, n_labels + 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@given(rankings(), st.data())
@bounded
def test_counts_do_not_depend_on_the_row_blocks(
    case: tuple[Array, Array, Array], data: st.DataObject
) -> None:
    y_true, top, weights = case
    places = data.draw(cuts(len(y_true)))
    cut = over_blocks(lambda rows: ranking_block(csr(y_true[rows]), top[rows], weights), len(top), places)
    assert_same_sums(cut, ranking_block(csr(y_true), top, weights))


def test_the_best_ranking_has_propensity_scores_of_one() -> None:
    y_true = np.array([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    weights = np.array([1.0, 3.0, 2.0, 5.0])
    best = np.array([[1, 2, 0], [3, 2, 0], [0, 1, 2]])
    np.testing.assert_allclose(metrics.psp_at_k(y_true, best, weights), 1.0)
    np.testing.assert_allclose(metrics.psndcg_at_k(y_true, best, weights), 1.0)


def test_a_short_ranking_is_divided_by_k_all_the_same() -> None:
    y_true, top = [[1, 1, 1]], np.array([[0, -1, -1]])
    np.testing.assert_allclose(metrics.precision_at_k(y_true, top), [1, 1 / 2, 1 / 3])
    np.testing.assert_allclose(metrics.recall_at_k(y_true, top), [1 / 3, 1 / 3, 1 / 3])


def test_coverage_may_be_left_out_of_the_sums() -> None:
    partial = ranking_block([[1, 0]], np.array([[0]]), coverage=False)
    assert not {"label_hits", "support"} & partial.keys()
    assert ranking_curves(partial).keys() == {"P", "R", "nDCG"}


def test_inverse_propensities_are_those_of_jain_et_al() -> None:
    counts, n_rows, a, b = [0, 1, 7, 50], 50, 0.6, 2.6
    c = (log(n_rows) - 1) * (b + 1) ** a
    expected = [1 + c * (count + b) ** -a for count in counts]
    np.testing.assert_allclose(metrics.inverse_propensities(np.array(counts), n_rows, a, b), expected)
    assert (np.diff(metrics.inverse_propensities(np.arange(51), 50)) < 0).all()


@pytest.mark.parametrize(("counts", "n_rows", "sentence"), [([1], 2, "2 training rows"), ([5], 4, "0 and 4")])
def test_counts_that_give_no_probability_are_refused(counts: list[int], n_rows: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        metrics.inverse_propensities(np.array(counts), n_rows)


@pytest.mark.parametrize(
    ("top", "sentence"),
    [
        ([[0, 1], [2, 2]], "row 1 of the block has label 2 at place 2"),
        ([[0, 3], [1, 2]], "row 0 of the block has label 3 at place 2"),
        ([[0, 1], [-2, 2]], "row 1 of the block has label -2 at place 1"),
    ],
)
def test_rankings_with_impossible_labels_are_refused_by_place(top: list[list[int]], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        metrics.precision_at_k(np.eye(2, 3), np.array(top))


@pytest.mark.parametrize(
    ("top", "weights", "sentence"),
    [
        (np.zeros((3, 1), dtype=int), None, r"shape \(3, 1\), but y_true has 2 rows"),
        (np.zeros((2, 1)), None, "the ranking is float64"),
        (np.zeros((2, 1), dtype=int), np.ones(2), r"shape \(2,\), but there are 3 labels"),
    ],
)
def test_rankings_of_other_rows_or_labels_are_refused(top: Array, weights: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ranking_block(np.eye(2, 3), top, weights)
