"""Scores of label sets are those of scikit-learn and of the paper, however the rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import Array, assert_same_sums, bounded, csr, cuts, over_blocks, problems
from sklearn import metrics as sk

from dswml import metrics
from dswml.blocks import RowBlock
from dswml.errors import DataError, UsageError
from dswml.executor import InProcessExecutor
from dswml.sweep import combine

ZERO_DIVISION = st.sampled_from([0.0, 1.0])


def ratio(a: Array, b: Array, zero_division: float) -> Array:
    return np.array([x / y if y else zero_division for x, y in zip(a.ravel(), b.ravel(), strict=True)])


@given(problems(), ZERO_DIVISION)
@bounded
def test_precision_recall_and_f1_are_the_dense_ones(
    problem: tuple[Array, Array, Array], zero_division: float
) -> None:
    y_true, y_pred, _ = problem
    for average, axis in (("micro", (0, 1)), ("macro", 0), ("samples", 1)):
        tp, true, pred = (np.sum(v, axis=axis) for v in (y_true * y_pred, y_true, y_pred))
        expected = [
            ratio(np.asarray(a), np.asarray(b), zero_division).mean()
            for a, b in ((tp, pred), (tp, true), (2 * tp, true + pred))
        ]
        found = metrics.precision_recall_f1(
            csr(y_true),
            csr(y_pred),
            average,  # type: ignore[arg-type]
            zero_division=zero_division,
        )
        np.testing.assert_allclose(found, expected, rtol=1e-13)


@given(problems(min_labels=2), ZERO_DIVISION)
@bounded
def test_precision_recall_f1_and_hamming_loss_are_those_of_scikit_learn(
    problem: tuple[Array, Array, Array], zero_division: float
) -> None:
    y_true, y_pred, _ = problem
    found = metrics.evaluate(y_true, y_pred, zero_division=zero_division)
    for average in ("micro", "macro", "samples"):
        expected = sk.precision_recall_fscore_support(
            y_true, y_pred, average=average, zero_division=zero_division
        )[:3]
        got = [found[f"{average}_{name}"] for name in ("precision", "recall", "f1")]
        np.testing.assert_allclose(got, expected, rtol=1e-13)
    table = metrics.label_table(metrics.label_block(y_true, y_pred), zero_division=zero_division)
    by_label = sk.precision_recall_fscore_support(y_true, y_pred, average=None, zero_division=zero_division)
    for name, expected in zip(("precision", "recall", "f1", "support"), by_label, strict=True):
        np.testing.assert_allclose(table[name], expected, rtol=1e-13)
    assert found["hamming_loss"] == pytest.approx(sk.hamming_loss(y_true, y_pred), rel=1e-13)


@given(problems(), st.floats(0, 1))
@bounded
def test_losses_sparsity_and_coverage_are_the_dense_ones(
    problem: tuple[Array, Array, Array], p0: float
) -> None:
    y_true, y_pred, _ = problem
    n_rows = len(y_true)
    wrong, missed = (y_pred > y_true).sum(), (y_pred < y_true).sum()
    occurring = (y_true.sum(axis=0) > 0).sum()
    found_labels = ((y_true * y_pred).sum(axis=0) > 0).sum()
    scores = metrics.evaluate(y_true, y_pred, p0=p0)
    assert scores["weighted_hamming_loss"] == pytest.approx((p0 * wrong + (1 - p0) * missed) / n_rows)
    assert scores["hamming_loss"] == pytest.approx(np.mean(y_true != y_pred))
    assert scores["output_sparsity"] == y_pred.sum() / n_rows
    assert scores["label_cardinality"] == y_true.sum() / n_rows
    assert scores["coverage"] == (found_labels / occurring if occurring else 0)
    assert metrics.weighted_hamming_loss(y_true, y_pred, p0) == scores["weighted_hamming_loss"]
    assert metrics.hamming_loss(y_true, y_pred) == scores["hamming_loss"]
    assert metrics.coverage(y_true, y_pred) == scores["coverage"]
    assert metrics.output_sparsity(y_pred) == scores["output_sparsity"]


def test_weighted_hamming_loss_is_table_1_of_the_paper() -> None:
    n_labels, k, p0 = 20, 3, 0.3
    truth = np.zeros((1, n_labels), dtype=int)
    truth[:, :k] = 1
    plus_k = truth.copy()
    plus_k[:, k : 2 * k] = 1
    losses = [
        metrics.weighted_hamming_loss(truth, guess, p0)
        for guess in (np.zeros_like(truth), np.ones_like(truth), plus_k, 1 - truth)
    ]
    p1 = 1 - p0
    np.testing.assert_allclose(
        losses, [p1 * k, p0 * (n_labels - k), p0 * k, p1 * k + p0 * (n_labels - k)], rtol=1e-14
    )


def test_predicting_nothing_has_the_precision_that_was_asked_for() -> None:
    y_true, nothing = np.array([[1, 0], [1, 1]]), np.zeros((2, 2), dtype=int)
    for zero_division in (0.0, 1.0):
        found = metrics.evaluate(y_true, nothing, zero_division=zero_division)
        assert [found[f"{average}_precision"] for average in ("micro", "macro", "samples")] == [
            zero_division
        ] * 3
        assert found["micro_recall"] == found["micro_f1"] == 0


@given(problems(), st.data())
@bounded
def test_counts_do_not_depend_on_the_row_blocks(
    problem: tuple[Array, Array, Array], data: st.DataObject
) -> None:
    y_true, y_pred, _ = problem
    places = data.draw(cuts(len(y_true)))
    whole = metrics.label_block(csr(y_true), csr(y_pred))
    cut = over_blocks(
        lambda rows: metrics.label_block(csr(y_true[rows]), csr(y_pred[rows])), len(y_true), places
    )
    assert_same_sums(cut, whole)


def test_one_merged_partial_of_all_families_goes_through_an_executor() -> None:
    rng = np.random.default_rng(5)
    y_true = csr(rng.random((200, 12)) < 0.15)
    scores = rng.normal(size=(200, 12)) + 2 * y_true.toarray()
    edges = metrics.uniform_edges(64, -4, 6)
    weights = metrics.inverse_propensities(y_true.sum(axis=0), 200)

    def block(rows: RowBlock, threshold: float) -> dict[str, Array]:
        y, s = y_true[rows.start : rows.stop], scores[rows.start : rows.stop]
        return {
            **metrics.label_block(y, metrics.select_at_threshold(s, threshold)),
            **metrics.ranking_block(y, metrics.top_k(s, 3)[0], weights),
            **metrics.score_histogram_block(y, s, edges),
            **metrics.label_histogram_block(y, s, edges),
        }

    blocks = [RowBlock(i, start, min(start + 17, 200)) for i, start in enumerate(range(0, 200, 17))]
    with InProcessExecutor(threads=2) as executor:
        total = executor.reduce(block, combine, blocks, 1.0)
    auc = metrics.auc_from_histogram(total, edges)
    found = {
        **metrics.label_scores(total, p0=0.2),
        **metrics.ranking_scores(total),
        "micro_auc": auc.value,
        "micro_auc_error_bound": auc.error_bound,
    }
    expected = metrics.evaluate(
        y_true, scores=scores, threshold=1.0, k=3, p0=0.2, inverse_propensity=weights, edges=edges
    )
    assert found == pytest.approx(expected, rel=1e-12)
    by_label = total["label_active_scores"].sum(axis=0)
    np.testing.assert_array_equal(by_label, total["active_scores"])


def test_labels_may_be_stored_in_any_sparse_way() -> None:
    dense = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]])
    unsorted = sp.csr_array((np.ones(4), [2, 0, 2, 1], [0, 2, 2, 4]), shape=(3, 3))
    with_zeros = sp.csr_array((np.array([1, 0, 1, 1, 1]), [0, 1, 2, 1, 2], [0, 3, 3, 5]), shape=(3, 3))
    expected = metrics.evaluate(dense, dense[::-1])
    for stored in (unsorted, with_zeros, sp.coo_array(dense), sp.csc_matrix(dense), dense.astype(bool)):
        before = stored.copy()
        assert metrics.evaluate(stored, dense[::-1]) == expected
        assert (before != stored).sum() == 0
    assert with_zeros.nnz == 5


def test_evaluate_gives_what_its_arguments_allow() -> None:
    y_true, scores = np.array([[1, 0, 1], [0, 1, 0]]), np.array([[0.9, 0.6, 0.4], [0.1, 0.8, 0.2]])
    only_scores = metrics.evaluate(y_true, scores=scores)
    assert "micro_f1" not in only_scores
    assert [name for name in only_scores if name.startswith("P@")] == ["P@1", "P@2", "P@3"]
    assert "PSP@1" not in only_scores
    assert only_scores["micro_auc_error_bound"] == 0
    given_top = metrics.evaluate(y_true, top=np.array([[0], [1]]), inverse_propensity=np.ones(3))
    assert given_top["P@1"] == given_top["PSP@1"] == 1
    assert "micro_auc" not in given_top
    by_label = metrics.evaluate(y_true, scores=scores, threshold=np.array([0.5, 0.7, 0.3]))
    assert by_label["micro_f1"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"y_true": [[1]]}, "nothing to evaluate"),
        ({"y_true": [[1]], "y_pred": [[1]], "threshold": 0.5}, "threshold=0.5"),
        ({"y_true": [[1]], "y_pred": [[1, 0]]}, r"\(1, 1\) and y_pred \(1, 2\)"),
        ({"y_true": [[1]], "scores": [[1, 0]]}, r"\(1, 1\) and scores \(1, 2\)"),
        ({"y_true": [[1]], "y_pred": [[1]], "p0": 1.5}, "p0 is 1.5"),
        ({"y_true": [1]}, "nothing to evaluate"),
        ({"y_true": [1], "y_pred": [1]}, r"y_true has 1 dimension\(s\)"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_shapes(
    arguments: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        metrics.evaluate(**arguments)  # type: ignore[arg-type]


def test_scores_given_as_labels_are_refused_by_place() -> None:
    with pytest.raises(DataError, match=r"y_pred is 0\.7 at row 1, label 2: every label must be 0 or 1"):
        metrics.evaluate(np.eye(3, dtype=int), np.array([[0, 0, 0], [0, 1, 0.7], [0.1, 0, 0]]))


def test_nothing_cannot_be_scored() -> None:
    with pytest.raises(DataError, match="there are 0 rows and 3 labels"):
        metrics.evaluate(np.zeros((0, 3)), np.zeros((0, 3)))
    with pytest.raises(DataError, match="no rows"):
        metrics.evaluate(np.zeros((0, 3)), top=np.zeros((0, 1), dtype=int))
    with pytest.raises(UsageError, match="average is 'weighted'"):
        metrics.precision_recall_f1([[1]], [[1]], "weighted")  # type: ignore[arg-type]
