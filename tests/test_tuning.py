"""Cross-validation: shared reads, the optimum of every point, no leak from held-out labels."""

from __future__ import annotations

import pathlib
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tuning_cases import assert_no_leak

from dswml import search_plan
from dswml.dataset import open_dataset
from dswml.errors import UsageError
from dswml.estimator import SparseWeightedClassifier
from dswml.estimator_cv import SparseWeightedClassifierCV
from dswml.executor import InProcessExecutor
from dswml.folds import fold_of_rows
from dswml.importers import import_dataset
from dswml.path import MANY, Path, Point
from dswml.sources import as_dataset
from dswml.training import Parameters, train
from dswml.tuning import Tuned, tune

RADII = (2.0, 10.0, 40.0)
WEIGHTS = (0.1, "uniform")
FOLDS, SEED = 3, 7


def problem(rows: int = 240, features: int = 15, labels: int = 20) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(rows, features)) / np.sqrt(features)
    scores = X @ rng.normal(size=(features, 4)) @ rng.normal(size=(4, labels))
    return X, (scores > np.quantile(scores, 0.85, axis=0)).astype(np.uint8)


def search(X: Any, Y: Any, **options: Any) -> Tuned:
    # Blocks of a few rows, so that folds are spread over many of them.
    data = as_dataset(X, Y, block_bytes=4096)
    with InProcessExecutor(2) as executor:
        return tune(data, executor, radii=RADII, weights=WEIGHTS, folds=FOLDS, seed=SEED, **options)


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return search(*problem())


def test_every_point_reaches_the_objective_of_a_separate_fit(tuned: Tuned) -> None:
    X, Y = problem()
    folds = fold_of_rows(0, len(X), FOLDS, SEED)
    for point in tuned.points:
        assert point.relative_gap.max() <= 1e-3
        for fold in range(FOLDS):
            single = SparseWeightedClassifier(point.radius, weights=point.p0, tol=1e-4)
            single.fit(X[folds != fold], Y[folds != fold])
            assert point.objective[fold] == pytest.approx(single.objective_, rel=1e-3)


def test_held_out_scores_are_those_of_a_dense_computation(tuned: Tuned) -> None:
    X, Y = problem()
    folds = fold_of_rows(0, len(X), FOLDS, SEED)
    point = tuned.points[2]
    for fold in range(FOLDS):
        single = SparseWeightedClassifier(point.radius, weights=point.p0, tol=1e-6)
        single.fit(X[folds != fold], Y[folds != fold])
        predicted, truth = single.predict(X[folds == fold]), Y[folds == fold]
        f1 = 2 * (predicted & truth).sum() / (predicted.sum() + truth.sum())
        assert point.scores["micro_f1"][fold] == pytest.approx(f1, abs=0.02)


def test_the_search_takes_at_most_three_times_the_reads_of_its_dearest_fit(tuned: Tuned) -> None:
    X, Y = problem()
    dearest = max(
        SparseWeightedClassifier(radius, weights=weights).fit(X, Y).n_passes_
        for radius in RADII
        for weights in WEIGHTS
    )
    assert tuned.passes <= 3 * dearest


def test_labels_of_held_out_rows_cannot_influence_their_fold(tuned: Tuned) -> None:
    assert_no_leak(tuned, search, problem(), FOLDS, SEED)


def test_sparsity_weights_of_a_fold_are_those_of_its_training_rows() -> None:
    X, _ = problem()
    rows = np.arange(len(X))
    Y = np.zeros((len(X), 40), dtype=np.uint8)
    Y[rows, rows % 40] = Y[rows, (7 * rows + 1) % 40] = 1
    folds = fold_of_rows(0, len(X), FOLDS, SEED)
    fullest = int(np.flatnonzero(folds == 0)[0])
    options: dict[str, Any] = {"radii": (10.0,), "weights": ("sparsity",), "folds": FOLDS, "seed": SEED}
    with InProcessExecutor(1) as executor:
        before = tune(as_dataset(X, Y), executor, **options).points[0]
        Y[fullest, :9] = 1  # K, as all rows have it, depends on a row that the first fold holds out
        after = tune(as_dataset(X, Y), executor, **options).points[0]
    assert before.p0 < after.p0
    assert before.objective[0] == after.objective[0]
    for fold in range(FOLDS):
        single = SparseWeightedClassifier(10.0, tol=1e-4).fit(X[folds != fold], Y[folds != fold])
        assert after.objective[fold] == pytest.approx(single.objective_, rel=1e-3)


def test_a_point_that_a_fold_never_solved_is_not_chosen(tuned: Tuned) -> None:
    unsolved = replace(tuned.best, relative_gap=np.array([1e-4, np.inf, 1e-4]))
    others = tuple(point for point in tuned.points if point is not tuned.best)
    assert replace(tuned, points=(unsolved, *others)).best in others


@pytest.mark.parametrize("normalize", [None, "l2"])
def test_few_dense_features_in_single_precision_are_solved_at_all_radii(
    real_data: pathlib.Path, tmp_path: pathlib.Path, normalize: Any
) -> None:
    import_dataset(real_data / "mulan" / "emotions.arff", str(tmp_path / "emotions.zarr"))
    data = open_dataset(tmp_path / "emotions.zarr")
    radii = (1.0, 5.0, 20.0)
    with InProcessExecutor(2) as executor, warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = tune(data, executor, radii=radii, weights=("uniform", 0.3), folds=3, normalize=normalize)
        dearest = train(data, Parameters(20.0, weights=0.3, normalize=normalize), executor)[1].passes
    assert max(point.relative_gap.max() for point in tuned.points) <= 1e-3
    assert tuned.passes <= 3 * dearest


def test_the_path_without_folds_is_solved_on_all_rows_and_scores_nothing() -> None:
    X, Y = problem()
    with InProcessExecutor(1) as executor:
        path = tune(as_dataset(X, Y), executor, radii=RADII, weights=(0.1,), folds=0)
    single = SparseWeightedClassifier(10.0, weights=0.1, tol=1e-5).fit(X, Y)
    assert path.points[1].objective[0] == pytest.approx(single.objective_, rel=1e-3)
    assert path.points[1].scores == {}


def test_uniform_weights_take_one_read_where_their_products_find_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = as_dataset(*problem(), block_bytes=4096)
    with InProcessExecutor(1) as executor:
        found = tune(data, executor, radii=RADII, weights=("uniform",), folds=0)
        monkeypatch.setattr(search_plan, "RESULTS_SHARE", 0.0)
        others = tune(data, executor, radii=RADII, weights=("uniform",), folds=0)
    assert found.passes == 1 < others.passes
    for point, other in zip(found.points, others.points, strict=True):
        assert max(point.relative_gap[0], other.relative_gap[0]) <= 1e-3
        assert point.objective[0] == pytest.approx(other.objective[0], rel=1e-3)


def test_choices_and_tables(tuned: Tuned) -> None:
    best = max(point.mean("micro_f1") for point in tuned.points)
    assert tuned.best.mean("micro_f1") == best
    assert tuned.one_standard_error.radius <= tuned.best.radius
    assert tuned.one_standard_error.mean("micro_f1") >= best - tuned.best.standard_error("micro_f1")


def test_the_cross_validated_classifier_is_the_single_one_at_its_choice() -> None:
    X, Y = problem()
    chosen = SparseWeightedClassifierCV(RADII, weights=WEIGHTS, folds=FOLDS, random_state=0).fit(X, Y)
    single = SparseWeightedClassifier(chosen.radius_, weights=chosen.weights_, random_state=0).fit(X, Y)
    np.testing.assert_array_equal(chosen.predict(X), single.predict(X))
    assert chosen.objective_ == single.objective_


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be 0 or a whole number of at least 2; got 1"),
        ({"folds": "5"}, "folds must be 0 or a whole number of at least 2; got '5'"),
        ({"folds": 200}, "fold . of 200 has 0 of the 240 rows, .*: use fewer folds"),
        ({"radii": ()}, r"radii must be positive, finite numbers, at least one; got \[\]"),
        ({"radii": (1.0, float("nan"))}, r"radii must be .*; got \[1.0, nan\]"),
        ({"radii": (-1.0,)}, r"radii must be .*; got \[-1.0\]"),
        ({"weights": ()}, "weights must have at least one entry"),
        ({"time_limit": 5.0}, "stops after 5 s needs a checkpoint to go on from"),
        ({"score": "accuracy"}, "there is no score 'accuracy'"),
    ],
)
def test_what_cannot_be_searched_is_a_sentence(options: dict[str, Any], message: str) -> None:
    X, Y = problem()
    with InProcessExecutor(1) as executor, pytest.raises(UsageError, match=message):
        tune(as_dataset(X, Y), executor, **({"radii": RADII, "weights": ("uniform",)} | options))


def test_points_that_were_begun_go_on_when_fewer_are_worked_on_at_once() -> None:
    found: Any = Path.__new__(Path)
    found.window, found.points = 3, [Point(radius, n_labels=4) for radius in (1.0, 2.0, 3.0, 4.0)]
    found.problem = SimpleNamespace(rank=MANY)
    found.advance()
    assert [point.radius for point in found.open] == [1.0, 2.0, 3.0]
    found.problem.rank = MANY + 1  # the basis may be rotated from here on, and all that is on it with it
    found.advance()
    assert [point.mt.shape[1] for point in found.open] == 3 * [MANY + 1]
    found.points[0].u = found.points[1].u = np.zeros((1, 0))
    found.advance()
    assert [point.radius for point in found.open] == [3.0, 4.0]
