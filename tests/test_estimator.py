"""The classifier is a scikit-learn estimator in full, takes data of every kind and answers in kind."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from distributed.protocol import pickle
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import check_estimator
from training_cases import objective, planted

from dswml import SparseWeightedClassifier, create_dataset
from dswml.errors import DataError, UsageError
from dswml.frank_wolfe import Record
from dswml.importers import import_dataset
from dswml.model import Model

pytestmark = pytest.mark.usefixtures("calm_blas")

Array = NDArray[Any]
Classifier = SparseWeightedClassifier

N, D, L = 80, 10, 12
X, Y = planted(N, D, L)
NAMES = [f"label {number}" for number in range(L)]


@pytest.fixture(scope="module")
def fitted() -> Classifier:
    return Classifier(radius=4, weights=0.15, tol=1e-6).fit(X, Y)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("estimator") / "data.zarr"
    create_dataset(place, X, Y, label_names=NAMES)
    return place


# scikit-learn.

#: The one check that does not apply, and why.
NOT_APPLICABLE = {
    "check_classifier_multioutput": "decision_function returns the scores XW, whose boundary is the "
    "threshold 1/2 and not 0"
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # by scikit-learn, of a y with inf
def test_it_is_a_scikit_learn_estimator() -> None:
    results = check_estimator(
        Classifier(weights="uniform", fit_intercept=True),
        expected_failed_checks=NOT_APPLICABLE,
        on_skip=None,
        on_fail="raise",
    )
    outcome: dict[str, set[str]] = {}
    for result in results:
        outcome.setdefault(result["status"], set()).add(result["check_name"])
    assert outcome.keys() <= {"passed", "xfail", "skipped"}
    assert outcome["xfail"] == set(NOT_APPLICABLE)
    assert len(outcome["passed"]) > 40
    # Skipped by scikit-learn itself: the array API needs a package and a switch.
    assert outcome.get("skipped", set()) <= {"check_array_api_input"}


def test_it_is_cloned_searched_and_put_into_pipelines() -> None:
    search = GridSearchCV(
        make_pipeline(Normalizer(), Classifier(weights=0.2, tol=1e-2)),
        {"sparseweightedclassifier__radius": [0.01, 30.0]},
        scoring=lambda pipeline, x, y: f1_score(y, pipeline.predict(x), average="micro", zero_division=0),
        cv=3,
    ).fit(X, Y)
    assert search.best_params_ == {"sparseweightedclassifier__radius": 30.0}
    assert search.best_estimator_.predict(X).shape == Y.shape
    cloned = clone(Classifier(radius=3, callbacks=[print], memory_limit="1 GiB"))
    assert (cloned.radius, cloned.callbacks, cloned.memory_limit) == (3, [print], "1 GiB")
    assert not hasattr(cloned, "model_")


def test_parameters_are_looked_at_when_fitting_and_not_before() -> None:
    with pytest.raises(UsageError, match="radius"):
        Classifier(radius=-1).set_params(tol=0.1).fit(X, Y)


NAN = float("nan")
INF = float("inf")
WRONG: dict[str, list[Any]] = {
    "radius": [0, -1.0, NAN, INF, "100", None, True],
    "weights": ["sparse", 0.0, 1.0, -0.1, 1, NAN, True, None, [0.1], np.array([0.1, 0.2])],
    "step": ["newton", None, 1],
    "loss": ["hinge", None],
    "block_size": [0, -1, 1.5, "wide", None, True],
    "tol": [-1e-3, NAN, INF, "small", None],
    "max_iter": [-1, 1.5, None, True, NAN],
    "max_passes": [0, -1, 2.5, "many"],
    "time_limit": [0, -1.0, NAN, INF, "1 h"],
    "fit_intercept": [NAN, INF, "yes", None],
    "normalize": ["l1", True, 2],
    "threshold": [NAN, INF, "half", True],
    "dtype": ["float16", np.float32, None],
    "cache": ["disk", None, True],
    "memory_limit": [0, -5, "much", None, NAN, INF],
    "random_state": ["seed", -1, 1.5],
    "callbacks": [5, print, [print, 5], "print"],
    "checkpoint": ["run", 5],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=repr
)
def test_a_wrong_parameter_is_named_with_what_it_must_be(name: str, value: Any) -> None:
    must = rf"The '{name}' parameter of SparseWeightedClassifier must be .*\. "
    with pytest.raises(UsageError, match=must + rf"Got {re.escape(repr(value))} instead\.") as caught:
        Classifier(**{name: value}).fit(X, Y)
    assert isinstance(caught.value, ValueError)


def test_every_parameter_has_wrong_values_here() -> None:
    assert WRONG.keys() == Classifier().get_params().keys()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {
        "radius": np.float32(3),
        "weights": np.float32(0.25),
        "tol": np.float32(1e-2),
        "max_iter": np.int32(50),
        "max_passes": np.int64(40),
        "time_limit": np.float32(100),
        "threshold": np.float16(0.5),
        "block_size": np.int8(4),
        "fit_intercept": np.float32(0.5),
        "memory_limit": 2**28,
        "random_state": np.int64(0),
    }
    clf = Classifier(**numbers).fit(X, Y)
    clf.model_.save(tmp_path / "m.zarr")
    plain = Classifier(
        **{name: value.item() if name != "memory_limit" else value for name, value in numbers.items()}
    )
    assert plain.fit(X, Y).objective_ == clf.objective_


def test_the_exponential_loss_has_no_corrective_step() -> None:
    with pytest.raises(UsageError, match=r"step='corrective' needs the square loss.*step='line-search'"):
        Classifier(loss="exponential").fit(X, Y)


# Weights.


def with_labels_a_row(k: int, n_labels: int) -> Array:
    y = np.zeros((N, n_labels), dtype=int)
    for row in range(N):
        y[row, (row + np.arange(k)) % n_labels] = 1
    return y


def test_sparsity_weights_follow_from_the_largest_number_of_labels_on_a_row() -> None:
    clf = Classifier(radius=1, tol=0.5).fit(X, with_labels_a_row(2, 20))
    assert (clf.k_hat_, clf.p0_) == (2, 0.2)
    assert Classifier(radius=1, tol=0.5, weights="uniform").fit(X, Y).p0_ == 0.5
    assert Classifier(radius=1, tol=0.5, weights=0.3).fit(X, Y).p0_ == 0.3


def test_sparsity_weights_that_favour_zeros_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"K = 3 and L = 12 .* p0 = 0\.5, .* favour predicting nothing"):
        Classifier(radius=1, tol=0.5).fit(X, with_labels_a_row(3, 12))


def test_there_are_no_sparsity_weights_where_half_of_all_labels_are_on_a_row() -> None:
    with pytest.raises(
        UsageError, match=r"2K < L, but K = 6 and L = 12 .* use weights='uniform' or a number"
    ):
        Classifier(radius=1).fit(X, with_labels_a_row(6, 12))


def test_emotions_has_no_sparsity_weights(real_data: Path, tmp_path: Path) -> None:
    import_dataset(real_data / "mulan" / "emotions.arff", tmp_path / "emotions.zarr")
    with pytest.raises(UsageError, match="K = 3 and L = 6"):
        Classifier().fit(tmp_path / "emotions.zarr")
    clf = Classifier(weights="uniform", normalize="l2", radius=10).fit(tmp_path / "emotions.zarr")
    assert clf.status_ == "OPTIMAL"


# What a fit leaves.


def test_fitted_attributes_are_concrete(fitted: Classifier) -> None:
    assert isinstance(fitted.model_, Model)
    assert all(isinstance(record, Record) for record in fitted.history_)
    assert (type(fitted.n_iter_), type(fitted.n_passes_), type(fitted.k_hat_)) == (int, int, int)
    for name in ("objective_", "gap_", "relative_gap_", "p0_"):
        assert isinstance(getattr(fitted, name), float)
    assert fitted.status_ == "OPTIMAL"
    assert fitted.certificate_ is not None
    assert fitted.certificate_.method == "curvature"
    assert fitted.n_features_in_ == D
    assert fitted.relative_gap_ <= 1e-6
    assert len(fitted.history_) == fitted.n_iter_ + 1
    assert fitted.classes_.tolist() == list(range(L))
    u, m = fitted.model_.factors()
    assert isinstance(u, np.ndarray)
    assert isinstance(m, np.ndarray)
    np.testing.assert_allclose(fitted.objective_, objective(X, Y, u @ m, 0.15), rtol=1e-10)


def test_predictions_follow_from_the_scores(fitted: Classifier) -> None:
    u, m = fitted.model_.factors()
    scores = X @ u @ m
    np.testing.assert_allclose(fitted.decision_function(X), scores, atol=1e-12)
    np.testing.assert_array_equal(fitted.predict(X), scores >= 0.5)
    np.testing.assert_array_equal(fitted.predict_topk(X, k=3), np.argsort(-scores, axis=1)[:, :3])
    eta = fitted.predict_proba(X)
    assert np.all((eta > 0) & (eta < 1))
    inside = (scores > 1e-6) & (scores < 1 - 1e-6)  # there the population minimiser gives the score back
    back = 0.85 * eta / (0.85 * eta + 0.15 * (1 - eta))
    np.testing.assert_allclose(back[inside], scores[inside], atol=1e-9)


def test_preprocessing_belongs_to_the_model() -> None:
    clf = Classifier(radius=4, weights=0.15, normalize="l2", fit_intercept=0.5, threshold=0.3).fit(X, Y)
    u, m = clf.model_.factors()
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    scores = np.hstack([unit, np.full((N, 1), 0.5)]) @ u @ m
    for rows in (X, 7 * X, sp.csr_array(X)):
        np.testing.assert_allclose(clf.decision_function(rows), scores, atol=1e-12)
        labels = clf.predict(rows)
        np.testing.assert_array_equal(labels.toarray() if sp.issparse(labels) else labels, scores >= 0.3)
    assert clf.model_.n_features == D


def test_the_exponential_loss_goes_by_the_sign() -> None:
    clf = Classifier(radius=3, weights=0.3, loss="exponential", step="line-search", max_iter=10).fit(X, Y)
    scores = clf.decision_function(X)
    np.testing.assert_array_equal(clf.predict(X), scores >= 0)
    eta = clf.predict_proba(X)  # the score is half the logarithm of p1 eta / (p0 (1 - eta))
    np.testing.assert_allclose(0.5 * np.log(0.7 * eta / (0.3 * (1 - eta))), scores, atol=1e-9)


def test_a_fit_is_repeated_by_its_random_state() -> None:
    one, two = (Classifier(radius=4, weights=0.15, random_state=7).fit(X, Y) for _ in range(2))
    assert one.model_.u.tobytes() == two.model_.u.tobytes()


def test_callbacks_can_stop_a_fit() -> None:
    seen: list[int] = []

    def stop(record: Record) -> bool:
        seen.append(record.iteration)
        return True

    clf = Classifier(radius=4, weights=0.15, tol=0.0, callbacks=[stop]).fit(X, Y)
    assert (clf.status_, seen) == ("INTERRUPTED", [0])
    np.testing.assert_array_equal(clf.predict(X), np.zeros_like(Y))


def test_nothing_is_predicted_before_a_fit() -> None:
    for method in ("predict", "predict_proba", "decision_function", "predict_topk"):
        with pytest.raises(NotFittedError):
            getattr(Classifier(), method)(X)


# Data of every kind.


def zarr_array(values: Array, folder: Path, name: str) -> Any:
    return zarr.create_array(str(folder / name), data=values, chunks=(25, values.shape[1]))


FORMS: dict[str, Callable[[Path, Path], tuple[Any, ...]]] = {
    "numpy": lambda store, folder: (X, Y),
    "float32": lambda store, folder: (X.astype(np.float32).astype(np.float64), Y),
    "scipy": lambda store, folder: (sp.csr_array(X), sp.csr_array(Y)),
    "csc": lambda store, folder: (sp.csc_matrix(X), sp.coo_array(Y)),
    "dask": lambda store, folder: (da.from_array(X, chunks=(30, 4)), da.from_array(Y, chunks=(50, 5))),
    "dask of csr": lambda store, folder: (da.from_array(X, chunks=(30, D)).map_blocks(sp.csr_array), Y),
    "zarr": lambda store, folder: (zarr_array(X, folder, "x"), zarr_array(Y, folder, "y")),
    "data set": lambda store, folder: (create_dataset(folder / "d.zarr", sp.csr_array(X), Y),),
    "path": lambda store, folder: (store,),
    "str": lambda store, folder: (str(store),),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_of_every_kind_give_the_same_model(
    form: str, fitted: Classifier, store: Path, tmp_path: Path
) -> None:
    clf = Classifier(radius=4, weights=0.15, tol=1e-6).fit(*FORMS[form](store, tmp_path))
    tolerance = 1e-6 if form == "float32" else 1e-9
    np.testing.assert_allclose(clf.objective_, fitted.objective_, rtol=tolerance)
    w, expected = clf.model_.u @ clf.model_.m, fitted.model_.u @ fitted.model_.m
    np.testing.assert_allclose(w, expected, atol=1e-5)
    assert clf.n_features_in_ == D
    assert clf.classes_.tolist() == (NAMES if form in ("path", "str") else list(range(L)))
    np.testing.assert_array_equal(np.asarray(clf.predict(X)), fitted.predict(X))


def test_label_names_are_the_classes_and_stay_with_the_model(store: Path) -> None:
    clf = Classifier(radius=4, weights=0.15).fit(store)
    assert clf.classes_.tolist() == NAMES
    assert clf.model_.label_names == tuple(NAMES)


def test_rows_that_were_scaled_when_stored_are_scaled_when_predicted(tmp_path: Path) -> None:
    data = create_dataset(tmp_path / "unit.zarr", X, Y, normalize="l2")
    stored = Classifier(radius=4, weights=0.15, tol=1e-6).fit(data)
    asked = Classifier(radius=4, weights=0.15, tol=1e-6, normalize="l2").fit(X, Y)
    again = Classifier(radius=4, weights=0.15, tol=1e-6, normalize="l2").fit(data)
    assert stored.model_.normalize == again.model_.normalize == "l2"
    for clf in (stored, again):
        np.testing.assert_allclose(clf.objective_, asked.objective_, rtol=1e-9)
        np.testing.assert_allclose(clf.decision_function(3 * X), asked.decision_function(X), atol=1e-6)
        (scores,) = clf.decision_function(data)
        np.testing.assert_allclose(scores, asked.decision_function(X), atol=1e-6)


METHODS = {
    "predict": np.int64,
    "decision_function": np.float64,
    "predict_proba": np.float64,
    "predict_topk": np.int64,
}


@pytest.mark.parametrize("method", METHODS)
def test_answers_follow_the_questions_in_kind(
    method: str, fitted: Classifier, store: Path, tmp_path: Path
) -> None:
    ask = getattr(fitted, method)
    expected = ask(X)
    assert isinstance(expected, np.ndarray)
    assert expected.dtype == METHODS[method]

    def same(answer: Any) -> None:
        answer = answer.toarray() if sp.issparse(answer) else answer
        np.testing.assert_allclose(answer, expected, atol=1e-12)

    of_sparse = ask(sp.csr_array(X))
    assert (method == "predict") == sp.issparse(of_sparse)
    same(of_sparse)
    same(ask(X.tolist()))
    same(ask(zarr_array(X, tmp_path, "x")))

    blocks = ask(store)
    assert iter(blocks) is blocks
    parts = list(blocks)
    same(np.vstack([part.toarray() if sp.issparse(part) else part for part in parts]))


@pytest.mark.parametrize("method", METHODS)
def test_dask_arrays_are_answered_lazily_with_the_same_row_chunks(method: str, fitted: Classifier) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("something was computed")

    rows = da.from_array(X, chunks=(30, 4))
    with dask.config.set(scheduler=refuse):
        answer = getattr(fitted, method)(rows)
        with pytest.raises(AssertionError, match="something was computed"):
            answer.compute()
    assert isinstance(answer, da.Array)
    assert answer.chunks[0] == (30, 30, 20)
    expected = getattr(fitted, method)(X)
    assert (answer.shape, answer.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(answer.compute(scheduler="synchronous"), expected, atol=1e-12)
    np.testing.assert_allclose(answer[35:41].compute(scheduler="threads"), expected[35:41], atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_lazy_answers_carry_the_model_once(method: str, fitted: Classifier) -> None:
    large = copy.copy(fitted)
    large.model_ = Model(u=np.zeros((D, 20)), m=np.zeros((20, 5000)), p0=0.1)
    graph = dict(getattr(large, method)(da.zeros((30, D), chunks=(1, D))).__dask_graph__())
    assert len(graph) > 30
    size = sum(len(pickle.dumps(task)) for task in graph.values())
    assert large.model_.m.nbytes < size < 1.5 * large.model_.m.nbytes


@pytest.mark.parametrize("columns", [D - 1, D + 1])
def test_another_number_of_features_is_refused_at_once(
    columns: int, fitted: Classifier, tmp_path: Path
) -> None:
    wrong = np.ones((20, columns))
    create_dataset(tmp_path / "wrong.zarr", wrong, np.ones((20, 1), dtype=int))
    for rows in (
        wrong,
        sp.csr_array(wrong),
        da.from_array(wrong, chunks=(7, columns)),
        tmp_path / "wrong.zarr",
    ):
        with pytest.raises(ValueError, match=f"X has {columns} features, .* is expecting {D} features"):
            fitted.predict(rows)


# Labels of every kind.


@pytest.mark.parametrize("kind", ["bool", "int8", "float64", "list", "csr", "csr of bool"])
def test_labels_of_every_kind(kind: str, fitted: Classifier) -> None:
    labels = {
        "bool": Y.astype(bool),
        "int8": Y.astype(np.int8),
        "float64": Y.astype(np.float64),
        "list": Y.tolist(),
        "csr": sp.csr_matrix(Y),
        "csr of bool": sp.csr_array(Y.astype(bool)),
    }[kind]
    clf = Classifier(radius=4, weights=0.15, tol=1e-6).fit(X, labels)
    np.testing.assert_array_equal(clf.predict(X), fitted.predict(X))
    if isinstance(labels, np.ndarray):
        assert clf.predict(X).dtype == labels.dtype


@pytest.mark.parametrize("classes", [[3, 5, 9], ["ant", "bee", "cat"], [False, True]])
def test_one_label_a_row_is_predicted_as_the_best_one(classes: list[Any]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(len(classes), size=N)
    x = np.eye(len(classes))[codes] + 0.1 * rng.normal(size=(N, len(classes)))
    clf = Classifier(radius=20, weights="uniform").fit(x, np.array(classes)[codes])
    assert clf.classes_.tolist() == classes
    assert clf.predict(x).tolist() == np.array(classes)[codes].tolist()
    assert clf.score(x, np.array(classes)[codes]) == 1
    np.testing.assert_allclose(clf.predict_proba(x).sum(axis=1), 1)
    expected = (N,) if len(classes) == 2 else (N, len(classes))
    assert clf.decision_function(x).shape == expected


def one_wrong(value: float, at: tuple[int, int]) -> Array:
    y: Array = Y.astype(np.float64)
    y[at] = value
    return y


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (X, one_wrong(2, (3, 4)), r"row 3, column 4 of Y in memory is 2\.0: every label must be 0 or 1"),
        (X, one_wrong(0.5, (0, 0)), r"row 0, column 0 of Y in memory is 0\.5"),
        (X, one_wrong(-1, (7, 1)), r"row 7, column 1 of Y in memory is -1\.0"),
        (X, one_wrong(NAN, (7, 1)), r"(?i)nan"),
        (X, Y[:-1], "80 rows and Y has 79 rows"),
        (X, np.arange(N)[:-1] % 5, "X has 80 rows and y has 79"),
        (X, None, "requires y to be passed, but the target y is None"),
        (da.from_array(X), None, "requires Y to be passed"),
        (np.where(np.eye(N, D), np.nan, X), Y, "(?i)nan"),
        (np.where(np.eye(N, D), np.inf, X), Y, "(?i)inf"),
        (X[:0], Y[:0], "(?i)0 sample|empty"),
        (X, Y[:, :0], "Y is empty"),
        (X[:, 0], Y, "(?i)1D|dimension"),
        (X + 1j, Y, "(?i)complex"),
    ],
)
def test_data_that_cannot_be_fitted_are_refused_with_a_sentence(x: Any, y: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Classifier(weights=0.2).fit(x, y)


def test_labels_that_never_occur_are_warned_of_and_no_labels_at_all_have_no_sparsity_weights() -> None:
    with pytest.warns(UserWarning, match="labels in Y have no positive row"):
        Classifier(radius=1, weights=0.2).fit(X, np.hstack([Y, 0 * Y[:, :1]]))
    with (
        pytest.warns(UserWarning, match="no positive"),
        pytest.raises(UsageError, match="no active label at all"),
    ):
        Classifier(radius=1).fit(X, 0 * Y)


def test_a_store_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(DataError, match=r"nowhere\.zarr"):
        Classifier().fit("nowhere.zarr")
