"""Evaluation in one read: the figures of scikit-learn and of the definitions, whatever blocks and tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from distributed import Client
from numpy.typing import NDArray
from prediction_cases import (
    BLOCK_BYTES,
    D,
    L,
    N,
    R,
    dense_ranking,
    dense_scores,
    dense_top_k,
    make_store,
    names,
    rows_and_labels,
    tied_model,
)
from sklearn.metrics import hamming_loss, precision_recall_fscore_support, roc_auc_score

from dswml import Model, SparseWeightedClassifier, evaluate, evaluation, open_dataset, scoring
from dswml.dask_executor import DaskExecutor
from dswml.errors import DataError, UsageError
from dswml.evaluation import Evaluation
from dswml.executor import InProcessExecutor
from dswml.importers import import_dataset
from dswml.prediction import predict_dataset
from dswml.stored import Dataset

Array = NDArray[Any]

X, Y = rows_and_labels()
RULES: dict[str, tuple[dict[str, Any], Callable[[Array], Array]]] = {
    "the model's": ({}, lambda scores: scores >= 0.5),
    "threshold": ({"threshold": 0.25}, lambda scores: scores >= 0.25),
    "label thresholds": (
        {"threshold": np.linspace(-0.5, 1, L)},
        lambda scores: scores >= np.linspace(-0.5, 1, L),
    ),
    "the 7 best": ({"top_k": 7}, lambda scores: dense_top_k(scores, 7)),
}


def smooth_model() -> Model:
    """A model whose scores are all different."""
    rng = np.random.default_rng(6)
    return tied_model(u=rng.normal(size=(D, R)), m=rng.normal(size=(R, L)) / 4, label_counts=Y.sum(axis=0))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Rows and labels in a store, cut into many row blocks."""
    data = make_store(tmp_path_factory.mktemp("data") / "d.zarr", sparse=True)
    assert len(data.blocks) > 3
    return data


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many tiles":
        # Other processes would not know of this.
        monkeypatch.setattr(evaluation, "current_executor", lambda data: InProcessExecutor(2))
        monkeypatch.setattr(scoring, "TILE_ENTRIES", 60)
        monkeypatch.setattr(scoring, "TILE_LABELS", 7)


@pytest.mark.parametrize("rule", RULES)
def test_label_sets_score_what_scikit_learn_says(data: Dataset, rule: str, tiles: None) -> None:
    options, choose = RULES[rule]
    model = tied_model()
    predicted = choose(dense_scores(model, X)).astype(int)
    found = evaluate(model, data, **options).scores
    for average in ("micro", "macro", "samples"):
        expected = precision_recall_fscore_support(Y, predicted, average=average, zero_division=0)
        for name, value in zip(("precision", "recall", "f1"), expected, strict=False):
            assert found[f"{average}_{name}"] == pytest.approx(value), name
    assert found["hamming_loss"] == pytest.approx(hamming_loss(Y, predicted))
    wrong, missed = (predicted > Y).sum() / N, (predicted < Y).sum() / N
    assert found["weighted_hamming_loss"] == pytest.approx(model.p0 * wrong + (1 - model.p0) * missed)
    assert found["output_sparsity"] == pytest.approx(predicted.sum() / N)
    assert found["label_cardinality"] == pytest.approx(Y.sum() / N)
    assert found["coverage"] == pytest.approx((predicted & Y).any(axis=0).sum() / Y.any(axis=0).sum())


def test_rankings_score_what_the_definitions_say(data: Dataset, tiles: None) -> None:
    model = tied_model(label_counts=Y.sum(axis=0), info={"data": {"n_rows": N}})
    found = evaluate(model, data, k=4).scores
    top = dense_ranking(dense_scores(model, X), 4)
    hits = np.take_along_axis(Y, top, axis=1).astype(float)
    weights = 1 + (np.log(N) - 1) * 2.5**0.55 * (Y.sum(axis=0) + 1.5) ** -0.55
    discount = 1 / np.log2(np.arange(2, 6))
    for k in range(1, 5):
        assert found[f"P@{k}"] == pytest.approx(hits[:, :k].mean())
        ndcg, gain, best = [], 0.0, 0.0
        for row, hit in enumerate(hits):
            active = np.flatnonzero(Y[row])
            ideal = discount[: min(k, active.size)].sum()
            ndcg.append((hit[:k] * discount[:k]).sum() / ideal if active.size else 0.0)
            gain += (hit[:k] * weights[top[row, :k]]).sum()
            best += np.sort(weights[active])[::-1][:k].sum()
        assert found[f"nDCG@{k}"] == pytest.approx(np.mean(ndcg))
        assert found[f"PSP@{k}"] == pytest.approx(gain / best)
    assert "P@5" not in found


def best_f1(scores: Array) -> float:
    """The best micro F1 over all thresholds that are scores."""
    flat, true = scores.ravel(), Y.ravel() == 1
    chosen = (flat >= limit for limit in np.unique(flat))
    return float(max(2 * (true & some).sum() / (true.sum() + some.sum()) for some in chosen))


@pytest.mark.parametrize("model", [tied_model(), smooth_model()], ids=["ties", "no ties"])
def test_the_exact_auc_and_threshold_are_exact(data: Dataset, model: Model, tiles: None) -> None:
    scores = dense_scores(model, X)
    found = evaluate(model, data, exact=True)
    assert found.edges["kind"] == "exact"
    assert found.auc.error_bound == 0
    assert found.auc.value == pytest.approx(roc_auc_score(Y.ravel(), scores.ravel()), abs=1e-12)
    assert found.best_f1 == pytest.approx(best_f1(scores))
    assert evaluate(model, data, threshold=found.best_threshold).scores["micro_f1"] == found.best_f1


@pytest.mark.parametrize("bins", [4, 64, 2**14])
@pytest.mark.parametrize("model", [tied_model(), smooth_model()], ids=["ties", "no ties"])
def test_the_auc_lies_within_the_bound_that_is_told(
    data: Dataset, model: Model, bins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "BINS", (bins,))
    found = evaluate(model, data)
    exact = roc_auc_score(Y.ravel(), dense_scores(model, X).ravel())
    assert abs(found.auc.value - exact) <= found.auc.error_bound + 1e-12
    assert found.edges["number"] == bins + 1
    assert found.edges["lowest"] <= found.best_threshold <= found.edges["highest"]
    assert evaluate(model, data, threshold=found.best_threshold).scores["micro_f1"] == found.best_f1


def test_as_many_bins_are_taken_as_the_error_needs(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BINS", (8, 128, 4096))
    assert evaluate(smooth_model(), data).edges["number"] == 4097
    monkeypatch.setattr(evaluation, "AUC_ERROR", 0.5)
    assert evaluate(smooth_model(), data).edges["number"] == 9


def test_the_curve_and_the_table_of_labels_are_those_of_the_scores(data: Dataset) -> None:
    model = smooth_model()
    scores = dense_scores(model, X)
    found = evaluate(model, data, threshold=0.25)
    for at in range(0, found.curve.thresholds.size, 500):
        predicted = scores >= found.curve.thresholds[at]
        assert found.curve.tp[at] == (predicted & (Y == 1)).sum()
        assert found.curve.fp[at] == (predicted & (Y == 0)).sum()
    expected = precision_recall_fscore_support(Y, scores >= 0.25, average=None, zero_division=0)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose(found.labels[name], values)


def same(one: Evaluation, two: Evaluation) -> bool:
    a, b = one.as_dict(), two.as_dict()
    return {**a, "seconds": 0} == {**b, "seconds": 0}


@pytest.mark.parametrize("exact", [False, True], ids=["histogram", "exact"])
def test_a_cluster_of_processes_finds_the_same_bits(data: Dataset, dask_client: Client, exact: bool) -> None:
    model = smooth_model()
    with InProcessExecutor(1) as one, InProcessExecutor(3) as three, DaskExecutor(dask_client) as cluster:
        first, *others = (evaluate(model, data, exact=exact, executor=who) for who in (one, three, cluster))
    assert all(same(first, other) for other in others)


def test_arrays_and_places_are_evaluated_alike(data: Dataset, tmp_path: Path) -> None:
    model = tied_model()
    model.save(tmp_path / "model.zarr")
    first = evaluate(model, open_dataset(str(data.url)))
    assert same(first, evaluate(tmp_path / "model.zarr", str(data.url)))
    assert same(first, evaluate(model, X, Y))
    assert same(first, evaluate(model, sp.csr_array(X), sp.csr_array(Y)))
    small = evaluate(model, X, Y, block_bytes=BLOCK_BYTES)
    assert small.scores["micro_f1"] == first.scores["micro_f1"]


def test_a_row_that_cannot_be_scored_is_named_with_its_store(tmp_path: Path) -> None:
    data = make_store(tmp_path / "d.zarr", sparse=True)
    row = data.blocks[-1].start + 3
    features: Any = zarr.open_group(tmp_path / "d.zarr", mode="r+")["X"]
    features["data"][features["indptr"][row]] = np.nan
    with InProcessExecutor(2) as executor:
        for call in (evaluate, partial(predict_dataset, out=tmp_path / "out.zarr")):
            with pytest.raises(DataError, match=f"row {row} of .*d.zarr has features that are NaN"):
                call(smooth_model(), data, executor=executor)


def test_labels_that_no_row_carries_are_evaluated_without_complaint() -> None:
    labels = np.zeros_like(Y)
    labels[:, 0] = 1
    found = evaluate(tied_model(), X, labels)
    assert found.scores["macro_recall"] <= 1 / L
    nothing = evaluate(tied_model(), X, np.zeros_like(Y))
    assert np.isnan(nothing.auc.value)
    assert nothing.as_dict()["micro_auc"] is None


# Propensities.


def test_propensities_come_from_the_training_data(data: Dataset, tmp_path: Path) -> None:
    trained = SparseWeightedClassifier(radius=2, weights=0.2, tol=0.1).fit(data).model_
    found = evaluate(trained, data)
    assert found.propensity == {"a": 0.55, "b": 1.5, "counts_from": "the model", "n_rows": N}
    assert "PSP@1" in found.scores
    bare = tied_model()
    assert evaluate(bare, data).propensity is None
    assert "PSP@1" not in evaluate(bare, data).scores
    named = evaluate(bare, data, propensity_from=data.url, propensity=(0.6, 2.6))
    assert named.propensity == {"a": 0.6, "b": 2.6, "counts_from": data.url, "n_rows": N}
    counted = tied_model(label_counts=Y.sum(axis=0), info={"data": {"n_rows": N}})
    assert named.scores["PSP@3"] == evaluate(counted, data, propensity=(0.6, 2.6)).scores["PSP@3"]


# What does not belong together.


def test_other_labels_than_the_models_are_refused(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"has {L} labels, but the model was trained on {L - 1}"):
        evaluate(tied_model(m=np.ones((R, L - 1))), data)
    with pytest.raises(DataError, match=f"has {D} features, but the model was trained on {D + 2}"):
        evaluate(tied_model(u=np.ones((D + 2, R))), data)
    named = make_store(tmp_path / "named.zarr", sparse=False, label_names=names("label", L))
    other = tuple(names("label", L)[::-1])
    with pytest.raises(DataError, match=r"label 0 of .* is 'label 0, .* but 'label 22, "):
        evaluate(tied_model(label_names=other), named)


def test_arguments_that_make_no_sense_are_refused(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="k is 0"):
        evaluate(tied_model(), data, k=0)
    with pytest.raises(UsageError, match="either a threshold or top_k"):
        evaluate(tied_model(), data, threshold=0.5, top_k=3)
    monkeypatch.setattr(evaluation, "MAX_EXACT", 10)
    with pytest.raises(UsageError, match=r"--exact.* at most 10, and the data have \d+"):
        evaluate(tied_model(), data, exact=True)


def test_more_places_than_labels_are_as_many_as_labels(data: Dataset) -> None:
    found = evaluate(tied_model(), data, k=100).scores
    assert f"P@{L}" in found
    assert f"P@{L + 1}" not in found


# Real data.


def test_real_data(real_data: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        import_dataset(
            real_data / "mulan" / f"emotions-{part}.arff", tmp_path / f"{part}.zarr", normalize="l2"
        )
    clf = SparseWeightedClassifier(radius=30, weights="uniform", fit_intercept=0.3, tol=1e-6)
    model = clf.fit(tmp_path / "train.zarr").model_
    test = open_dataset(tmp_path / "test.zarr")
    found = evaluate(model, test, exact=True)
    true = test.read_y(0, test.n_rows).toarray()
    scores = model.decision_function(test.read_x(0, test.n_rows))
    assert found.auc.value == pytest.approx(roc_auc_score(true.ravel(), scores.ravel()), abs=1e-9)
    assert found.auc.value > 0.75
    assert found.best_f1 > 0.6
