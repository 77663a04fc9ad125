"""Scores in tiles: what is chosen from them is what the dense matrix of scores would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from prediction_cases import D, L, R, dense_ranking, dense_scores, dense_top_k, rows_and_labels, tied_model

from dswml import SparseWeightedClassifier, scoring
from dswml.errors import DataError, UsageError
from dswml.scoring import Rule, projected_pieces, score_tiles

Array = NDArray[Any]

X, _ = rows_and_labels(60)
FORMS: dict[str, Callable[[Array], Any]] = {
    "float64": lambda x: x,
    "float32": lambda x: x.astype(np.float32),
    "whole numbers": lambda x: x.astype(np.int64),
    "lists": lambda x: x.tolist(),
    "CSR": lambda x: sp.csr_array(x),
    "CSR of float32": lambda x: sp.csr_array(x.astype(np.float32)),
    "CSR of whole numbers": lambda x: sp.csr_matrix(x.astype(np.int64)),
    "CSC": lambda x: sp.csc_array(x),
}


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles larger than everything, and tiles of a few rows and labels."""
    if request.param == "many tiles":
        monkeypatch.setattr(scoring, "TILE_ENTRIES", 35)
        monkeypatch.setattr(scoring, "TILE_LABELS", 5)
    return str(request.param)


def test_tiles_cover_every_score_once_in_bounded_size(tiles: str) -> None:
    model = tied_model()
    scores = np.full((len(X), L), np.nan)
    for rows, z in projected_pieces(X, model.u, L):
        assert z.size <= scoring.TILE_ENTRIES
        for first, tile in score_tiles(z, model.m):
            assert tile.size <= scoring.TILE_ENTRIES
            assert np.isnan(scores[rows, first : first + tile.shape[1]]).all()
            scores[rows, first : first + tile.shape[1]] = tile
    np.testing.assert_array_equal(scores, dense_scores(model, X))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("normalize", "intercept"), [(None, 0.0), ("l2", 0.0), (None, 2.0), ("l2", 0.5)])
def test_scores_of_rows_of_every_form(form: str, normalize: str | None, intercept: float, tiles: str) -> None:
    u = np.random.default_rng(0).normal(size=(D + bool(intercept), R))
    model = tied_model(u=u, normalize=normalize, intercept=intercept)
    scores = model.decision_function(FORMS[form](X))
    assert scores.dtype == np.float64
    atol = 1e-6 if "float32" in form else 1e-12
    np.testing.assert_allclose(scores, dense_scores(model, X), atol=atol)


@pytest.mark.parametrize("threshold", [0.5, 0.0, -10.0, 10.0, -np.inf, np.inf])
def test_one_threshold_for_all_labels(threshold: float, tiles: str) -> None:
    model = tied_model(threshold=0.25)
    found = model.predict(X, threshold)
    assert found.dtype == np.uint8
    assert found.has_canonical_format
    np.testing.assert_array_equal(found.toarray(), dense_scores(model, X) >= threshold)
    np.testing.assert_array_equal(model.predict(X).toarray(), dense_scores(model, X) >= 0.25)


def test_a_threshold_for_every_label(tiles: str) -> None:
    limits = np.random.default_rng(1).integers(-2, 3, size=L) / 4
    limits[[2, 5]] = np.inf, -np.inf
    expected = dense_scores(tied_model(), X) >= limits
    np.testing.assert_array_equal(tied_model().predict(X, limits).toarray(), expected)
    np.testing.assert_array_equal(tied_model().with_threshold(limits).predict(X).toarray(), expected)
    assert not expected[:, 2].any()
    assert expected[:, 5].all()


@pytest.mark.parametrize("k", [1, 3, L])
def test_the_k_best_labels_of_equal_scores_the_lower(k: int, tiles: str) -> None:
    model = tied_model()
    scores = dense_scores(model, X)
    assert (np.diff(np.sort(scores, axis=1)) == 0).any(axis=1).all(), "every row must have equal scores"
    labels, best = model.predict_topk(X, k)
    np.testing.assert_array_equal(labels, dense_ranking(scores, k))
    np.testing.assert_array_equal(best, np.take_along_axis(scores, labels, axis=1))
    np.testing.assert_array_equal(model.predict(X, top_k=k).toarray(), dense_top_k(scores, k))
    np.testing.assert_array_equal(model.with_threshold(top_k=k).predict(X).toarray(), dense_top_k(scores, k))


def test_the_estimator_predicts_what_its_model_does(tiles: str) -> None:
    clf = SparseWeightedClassifier(radius=3, weights=0.2).fit(X, rows_and_labels(60)[1])
    np.testing.assert_array_equal(clf.predict(X), clf.model_.predict(X).toarray())
    one = SparseWeightedClassifier(radius=3, weights=0.2).fit(X, (X[:, 0] + X[:, 1]).astype(int))
    np.testing.assert_array_equal(one.predict(X), one.classes_[np.argmax(one.decision_function(X), axis=1)])


def test_no_rows_give_no_labels() -> None:
    model = tied_model()
    assert model.predict(X[:0]).shape == (0, L)
    assert model.decision_function(X[:0]).shape == (0, L)
    assert model.predict_topk(X[:0], 2)[0].shape == (0, 2)


def test_another_rule_is_another_model() -> None:
    model = tied_model()
    ranked = model.with_threshold(top_k=2)
    assert (str(model.rule), str(ranked.rule)) == ("score >= 0.5", "the 2 best")
    assert str(Rule(top_k=1)) == "the best label"
    assert str(ranked.with_threshold(np.zeros(L)).rule) == "score >= the label's own threshold"
    assert str(ranked.with_threshold(np.zeros(L)).with_threshold(0.3).rule) == "score >= 0.3"
    assert model.fingerprint == ranked.fingerprint
    assert model.fingerprint != tied_model(m=model.m + 1).fingerprint
    assert model.fingerprint != tied_model(normalize="l2").fingerprint


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"threshold": float("nan")}, "the threshold is NaN"),
        ({"threshold": np.zeros(L - 1)}, f"have shape \\({L - 1},\\), but there are {L} labels"),
        ({"threshold": np.where(np.arange(L) == 4, np.nan, 0)}, "threshold of label 4 is NaN"),
        ({"threshold": np.inf}, "must be a finite number"),
        ({"threshold": 0.5, "top_k": 3}, "either a threshold or top_k"),
        ({"top_k": 0}, "at least 1"),
        ({"top_k": L + 1}, f"between 1 and the number of labels, {L}; got {L + 1}"),
    ],
)
def test_rules_that_make_no_sense_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        tied_model().with_threshold(**arguments)


def test_a_threshold_that_selects_far_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_SELECTED", 10 * len(X))
    assert tied_model().predict(X, 0.5).nnz <= 10 * len(X)
    with pytest.raises(UsageError, match=f"'score >= -9' predicts more than 10 of {L} labels a row: raise"):
        tied_model().predict(X, -9.0)


@pytest.mark.parametrize(("bad", "normalize"), [(np.nan, None), (np.inf, "l2"), (1e300, "l2")])
@pytest.mark.parametrize("form", [np.asarray, sp.csr_array])
def test_a_row_without_finite_scores_is_named(form: Any, bad: float, normalize: str | None) -> None:
    rows = X.astype(np.float64)
    rows[7, 0] = bad
    model = tied_model(u=np.ones((D, R)), m=np.ones((R, L)), normalize=normalize)
    for call in (model.predict, model.predict_proba, model.predict_topk):
        with pytest.raises(DataError, match=r"^row 7 of X has features that are NaN or infinite"):
            call(form(rows))
