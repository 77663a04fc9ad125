"""Histograms give exact counts at their edges, an AUC within its bound, and the best thresholds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import TIED, Array, assert_same_sums, bounded, csr, cuts, over_blocks, problems
from sklearn.metrics import roc_auc_score

from dswml import histograms
from dswml.errors import DataError, UsageError
from dswml.histograms import (
    active_entry_scores,
    exact_edges,
    label_histogram_block,
    quantile_edges,
    score_histogram_block,
    uniform_edges,
)
from dswml.roc import auc_from_histogram, best_label_thresholds, micro_auc, threshold_curve

EDGES = st.one_of(
    st.lists(st.sampled_from([*TIED, 0.1, 1e-9, 3.0]), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(-3, 3), min_size=1, max_size=30, unique=True),
).map(lambda values: np.array(sorted(set(values))))


def both_kinds(y_true: Array) -> bool:
    return bool(y_true.any() and not y_true.all())


@given(problems(), EDGES, st.booleans())
@bounded
def test_scores_are_counted_in_the_bin_where_they_lie(
    problem: tuple[Array, Array, Array], edges: Array, single: bool
) -> None:
    y_true, _, scores = problem
    scores = scores.astype(np.float32) if single else scores
    place = np.searchsorted(edges, scores.astype(np.float64), side="right")
    found = score_histogram_block(csr(y_true), scores, edges)
    by_label = label_histogram_block(csr(y_true), scores, edges)
    for kind, name in ((1, "active_scores"), (0, "inactive_scores")):
        expected = [
            np.bincount(place[y_true[:, label] == kind, label], minlength=edges.size + 1)
            for label in range(y_true.shape[1])
        ]
        np.testing.assert_array_equal(by_label[f"label_{name}"], expected)
        np.testing.assert_array_equal(found[name], np.sum(expected, axis=0))


@pytest.mark.parametrize(
    "edges",
    [
        [0.0],
        [-1e308, 1e308],
        [0.0, 5e-324],
        [0.0, 5e-324, 1.0],
        [0.0, 5e-324, 1e-323],
        [-1e300, 0.0, 1e-300, 2e-300, 1e300],
        np.cumsum(np.geomspace(1e-12, 1, 300)),
        np.linspace(-1, 1, 1001),
        np.linspace(-1, 1, 1025),
        np.linspace(0.1, 1.1, 129),
    ],
)
def test_bins_are_right_for_edges_of_any_scale(edges: list[float]) -> None:
    around = np.array(edges, dtype=np.float64)
    near = np.concatenate(
        [around, np.nextafter(around, np.inf), np.nextafter(around, -np.inf), np.linspace(-2, 2, 401), [-0.0]]
    )
    scores = np.concatenate([near, [np.inf, -np.inf]])[None, :]
    found = score_histogram_block(csr(np.zeros(scores.shape)), scores, around)
    expected = np.bincount(np.searchsorted(around, scores[0], side="right"), minlength=around.size + 1)
    np.testing.assert_array_equal(found["inactive_scores"], expected)


@given(problems())
@bounded
def test_auc_by_merging_is_that_of_scikit_learn(problem: tuple[Array, Array, Array]) -> None:
    y_true, _, scores = problem
    found = micro_auc(csr(y_true), scores)
    if not both_kinds(y_true):
        assert np.isnan([found.value, found.error_bound]).all()
        return
    assert found.value == pytest.approx(roc_auc_score(y_true.ravel(), scores.ravel()), rel=1e-12)
    assert found.error_bound == 0


@given(problems(min_labels=2), EDGES)
@bounded
def test_auc_by_bins_is_within_its_bound(problem: tuple[Array, Array, Array], edges: Array) -> None:
    y_true, _, scores = problem
    if not both_kinds(y_true):
        return
    found = micro_auc(y_true, scores, edges)
    exact = roc_auc_score(y_true.ravel(), scores.ravel())
    assert abs(found.value - exact) <= found.error_bound + 1e-12
    counts = score_histogram_block(y_true, scores, edges)
    shares = [counts[name] / counts[name].sum() for name in ("active_scores", "inactive_scores")]
    assert found.error_bound <= np.dot(*shares) / 2 + 1e-12


def test_the_bound_is_attained_when_a_bin_hides_the_order() -> None:
    y_true, edges = [[1, 0]], np.array([0.0, 1.0])
    for scores, exact in (([[0.6, 0.4]], 1.0), ([[0.4, 0.6]], 0.0)):
        found = micro_auc(y_true, np.array(scores), edges)
        assert abs(found.value - exact) == found.error_bound == 0.5


def test_auc_of_more_pairs_than_64_bits_count() -> None:
    counts = {
        "active_scores": np.array([2**40, 2**40, 0]),
        "inactive_scores": np.array([2**60, 2**60, 0]),
    }
    found = auc_from_histogram(counts, np.array([0.0, 1.0]))
    assert (found.value, found.error_bound) == (0.5, 0.25)


def test_edges_at_quantiles_bound_the_error_by_their_number() -> None:
    rng = np.random.default_rng(2)
    y_true = rng.random((300, 50)) < 0.03
    scores = np.where(y_true, rng.normal(0.05, 0.02, y_true.shape), rng.exponential(0.01, y_true.shape))
    edges = quantile_edges(scores[:150][y_true[:150]], scores[:150][~y_true[:150]], bins=200)
    exact = roc_auc_score(y_true.ravel(), scores.ravel())
    by_quantiles, by_distance = (
        micro_auc(y_true, scores, edges),
        micro_auc(y_true, scores, uniform_edges(199)),
    )
    assert abs(by_quantiles.value - exact) <= by_quantiles.error_bound <= 1.5 / 200
    assert abs(by_distance.value - exact) <= by_distance.error_bound
    assert by_quantiles.error_bound < by_distance.error_bound / 10


@given(problems(), EDGES)
@bounded
def test_the_curve_is_exact_at_every_threshold(problem: tuple[Array, Array, Array], edges: Array) -> None:
    y_true, _, scores = problem
    curve = threshold_curve(score_histogram_block(y_true, scores, edges), edges)
    for place, threshold in enumerate(curve.thresholds):
        predicted = scores >= threshold
        tp, fp = (predicted & (y_true == 1)).sum(), (predicted & (y_true == 0)).sum()
        assert (curve.tp[place], curve.fp[place]) == (tp, fp)
        active, inactive = y_true.sum(), (1 - y_true).sum()
        assert curve.precision(1.0)[place] == (tp / (tp + fp) if tp + fp else 1)
        assert curve.recall()[place] == (tp / active if active else 0)
        assert curve.false_positive_rate()[place] == (fp / inactive if inactive else 0)
        assert curve.f1()[place] == (2 * tp / (tp + fp + active) if tp + fp + active else 0)
    threshold, f1 = curve.best()
    inner = curve.f1()[1:-1]
    assert f1 == inner.max()
    assert threshold == edges[inner == f1].max()


@given(problems(), EDGES)
@bounded
def test_the_area_under_the_curve_is_the_auc(problem: tuple[Array, Array, Array], edges: Array) -> None:
    y_true, _, scores = problem
    if not both_kinds(y_true):
        return
    partial = score_histogram_block(y_true, scores, edges)
    curve = threshold_curve(partial, edges)
    area = -np.trapezoid(curve.recall(), curve.false_positive_rate())
    assert area == pytest.approx(auc_from_histogram(partial, edges).value, rel=1e-12)


@given(problems(), st.data())
@bounded
def test_counts_do_not_depend_on_blocks_or_tiles(
    problem: tuple[Array, Array, Array], data: st.DataObject
) -> None:
    y_true, _, scores = problem
    n_labels = scores.shape[1]
    edges = data.draw(EDGES)
    tile_bounds = sorted({0, n_labels, *data.draw(st.lists(st.integers(0, n_labels), max_size=3))})

    def tiled(rows: slice) -> dict[str, Array]:
        parts = [
            score_histogram_block(csr(y_true[rows]), scores[rows, first:stop], edges, first)
            for first, stop in itertools.pairwise(tile_bounds)
        ]
        return {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}

    whole = score_histogram_block(csr(y_true), scores, edges)
    assert_same_sums(over_blocks(tiled, len(y_true), data.draw(cuts(len(y_true)))), whole)
    found = [
        active_entry_scores(csr(y_true), scores[:, first:stop], first)
        for first, stop in itertools.pairwise(tile_bounds)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.sort(scores[y_true == 1]))


@given(st.integers(1, 3), st.data())
@bounded
def test_label_thresholds_are_the_best_of_all_choices(n_labels: int, data: st.DataObject) -> None:
    edges = np.array([0.0, 0.3, 0.6])
    n_rows = data.draw(st.integers(1, 6))
    bits = st.lists(st.integers(0, 1), min_size=n_rows * n_labels, max_size=n_rows * n_labels)
    values = st.lists(
        st.sampled_from([-0.1, 0.0, 0.2, 0.5, 0.9]), min_size=n_rows * n_labels, max_size=n_rows * n_labels
    )
    y_true = np.array(data.draw(bits)).reshape(n_rows, n_labels)
    scores = np.array(data.draw(values)).reshape(n_rows, n_labels)
    partial = label_histogram_block(csr(y_true), scores, edges)

    def f1(thresholds: Array, axis: int | None) -> float:
        predicted = scores >= thresholds
        tp = (predicted & (y_true == 1)).sum(axis=axis)
        denominator = predicted.sum(axis=axis) + y_true.sum(axis=axis)
        return float(np.mean(np.where(denominator > 0, 2 * tp / np.maximum(denominator, 1), 0.0)))

    choices = [np.array(choice) for choice in itertools.product([*edges, np.inf], repeat=n_labels)]
    micro = best_label_thresholds(partial, edges, score="micro_f1")
    macro = best_label_thresholds(partial, edges, score="macro_f1")
    assert f1(micro, None) == pytest.approx(max(f1(choice, None) for choice in choices), rel=1e-12)
    assert f1(macro, 0) == pytest.approx(max(f1(choice, 0) for choice in choices), rel=1e-12)
    seen = y_true.any(axis=0)
    assert (macro[~seen] == np.inf).all()
    assert (best_label_thresholds(partial, edges, unseen=0.5)[~seen] == 0.5).all()


def test_default_edges_hold_the_usual_thresholds_exactly() -> None:
    assert {0.0, 0.25, 0.5, 1.0} <= set(uniform_edges().tolist())


def test_nan_and_bad_edges_are_refused() -> None:
    with pytest.raises(DataError, match="row 1 of the block, label 7, is NaN"):
        score_histogram_block(csr(np.zeros((2, 9))), np.array([[0.0, 0.0], [np.nan, 0.0]]), np.zeros(1), 7)
    for edges in ([], [1.0, 1.0], [1.0, 0.0], [0.0, np.inf], [[0.0]]):
        with pytest.raises(UsageError, match="increasing, finite"):
            score_histogram_block([[1]], np.zeros((1, 1)), np.array(edges))
    with pytest.raises(UsageError, match="increasing, finite"):
        exact_edges(np.array([np.inf]))
    with pytest.raises(UsageError, match=r"0 bins from -0\.5 to 1\.5"):
        uniform_edges(0)
    with pytest.raises(UsageError, match="0 active and 1 inactive"):
        quantile_edges(np.zeros(0), np.zeros(1))
    with pytest.raises(UsageError, match="score is 'f2'"):
        best_label_thresholds(
            label_histogram_block([[1]], np.zeros((1, 1)), np.zeros(1)), np.zeros(1), score="f2"
        )


def test_tiles_outside_the_labels_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"\(2, 3\) from label 2 on do not lie inside y_true of shape \(2, 4\)"
    ):
        score_histogram_block(np.zeros((2, 4)), np.zeros((2, 3)), np.zeros(1), 2)


def test_histograms_by_label_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histograms, "MAX_LABEL_BINS", 8)
    assert label_histogram_block(np.zeros((1, 2)), np.zeros((1, 2)), np.arange(3.0))
    with pytest.raises(UsageError, match="3 labels x 4 bins exceed 8 counts"):
        label_histogram_block(np.zeros((1, 3)), np.zeros((1, 3)), np.arange(3.0))
