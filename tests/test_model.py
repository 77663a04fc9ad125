"""The model file: bit exact, readable by Zarr alone, refused when it is not as it was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from numpy.typing import NDArray
from training_cases import planted

import dswml
from dswml import Model, SparseWeightedClassifier, create_dataset, load_model
from dswml.errors import DataError, IncompleteStoreError, StoreExistsError, StoreNotFoundError, UsageError
from dswml.frank_wolfe import Record

pytestmark = pytest.mark.usefixtures("calm_blas")

Array = NDArray[Any]
Tamper = Callable[[Path], None]

N, D, L = 60, 9, 11
X, Y = planted(N, D, L)
ARRAYS = ("U", "M", "history", "label_counts", "label_names", "feature_names")
#: A file that an earlier release wrote.
WRITTEN_BEFORE = Path(__file__).parent / "data" / "model-v1.zarr"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    data = create_dataset(
        tmp_path_factory.mktemp("model") / "data.zarr",
        X,
        Y,
        label_names=[f"étiquette {number}" for number in range(L)],
        feature_names=[f"f{number}" for number in range(D)],
    )
    clf = SparseWeightedClassifier(radius=4, weights=0.2, normalize="l2", fit_intercept=0.5, threshold=0.4)
    return clf.fit(data).model_


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "model.zarr"
    model.save(place)
    return place


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model.zarr"))


def assert_same(one: Model, two: Model) -> None:
    for column in fields(Model):
        a, b = getattr(one, column.name), getattr(two, column.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), column.name
        elif column.name == "info":
            assert json.loads(json.dumps(dict(a))) == b
        else:
            assert a == b, column.name


# There and back.


def test_what_is_saved_is_loaded_to_the_bit(model: Model, saved: Path) -> None:
    loaded = load_model(saved)
    assert_same(model, loaded)
    np.testing.assert_array_equal(loaded.decision_function(X), model.decision_function(X))
    assert loaded.fingerprint == model.fingerprint


def test_thresholds_of_labels_and_ranks_are_kept(model: Model, tmp_path: Path) -> None:
    own = np.linspace(0.1, 0.9, L)
    own[3] = np.inf
    for number, changed in enumerate((model.with_threshold(own), model.with_threshold(top_k=3))):
        changed.save(tmp_path / f"{number}.zarr")
        loaded = load_model(tmp_path / f"{number}.zarr")
        assert_same(changed, loaded)
        np.testing.assert_array_equal(loaded.predict(X).toarray(), changed.predict(X).toarray())


def test_a_model_of_nothing_is_a_model(tmp_path: Path) -> None:
    empty = SparseWeightedClassifier(weights=0.2, max_iter=0).fit(X, Y).model_
    assert empty.rank == 0
    empty.save(tmp_path / "empty.zarr")
    loaded = load_model(tmp_path / "empty.zarr")
    assert_same(empty, loaded)
    np.testing.assert_array_equal(loaded.decision_function(X), np.zeros((N, L)))
    bare = Model(u=np.eye(2), m=np.ones((2, 3)), p0=0.1)
    bare.save(tmp_path / "bare.zarr")
    assert_same(bare, load_model(tmp_path / "bare.zarr"))


def test_a_file_written_before_is_read_still() -> None:
    loaded = load_model(WRITTEN_BEFORE)
    assert (loaded.n_features, loaded.n_labels, loaded.p0, loaded.threshold) == (4, 8, 0.3, 0.375)
    assert (loaded.normalize, loaded.intercept) == ("l2", 0.5)
    assert loaded.label_names == ("a", "b", "c", "d", "e", "f", "g", "é")
    assert loaded.info["status"] == "OPTIMAL"
    assert loaded.history[-1].relative_gap == loaded.info["relative_gap"]
    u, m = loaded.factors()
    rows = np.array([[3.0, 0.0, 4.0, 0.0]])
    scores = np.array([[0.6, 0.0, 0.8, 0.0, 0.5]]) @ u @ m
    np.testing.assert_allclose(loaded.decision_function(rows), scores, atol=1e-12)


def test_zarr_alone_reads_the_file(model: Model, saved: Path) -> None:
    group: Any = zarr.open_group(str(saved), mode="r")
    np.testing.assert_array_equal(group["U"][:] @ group["M"][:], model.u @ model.m)
    names = json.loads(group["label_names"][:].tobytes())
    assert tuple(names) == model.label_names
    attrs = dict(group.attrs)
    assert (attrs["format"], attrs["complete"], attrs["p0"], attrs["intercept"]) == (
        "dswml-model",
        True,
        0.2,
        0.5,
    )
    assert attrs["history_columns"] == [column.name for column in fields(Record)]
    assert group["history"].shape == (len(model.history), len(attrs["history_columns"]))


def test_the_file_says_how_the_fit_went(model: Model, saved: Path) -> None:
    info = load_model(saved).info
    assert info["status"] == "OPTIMAL"
    assert info["parameters"]["radius"] == 4
    assert info["certificate"]["method"] == "curvature"
    assert info["data"]["n_rows"] == N
    assert len(info["data"]["fingerprint"]) == 64
    assert {"dswml", "numpy", "zarr", "python"} <= info["versions"].keys()
    assert info["objective"] == model.history[-1].objective


def test_nothing_in_the_file_is_code(saved: Path) -> None:
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert {file.name for file in files if "c" not in file.relative_to(saved).parts} == {"zarr.json"}
    for file in files:
        content = file.read_bytes()
        assert b"pickle" not in content
        assert b"numpy.core" not in content
        assert not content.startswith(b"\x80")
    for name in ARRAYS:
        described = json.loads((saved / name / "zarr.json").read_text())
        assert described["data_type"] in ("float64", "int64", "uint8")


def test_factors_are_in_compact_singular_form(model: Model) -> None:
    u, m = model.factors()
    assert (u.shape, m.shape) == ((D + 1, model.rank), (model.rank, L))
    np.testing.assert_allclose(u.T @ u, np.eye(model.rank), atol=1e-12)
    values = np.linalg.svd(u @ m, compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm(m, axis=1), values[: model.rank], atol=1e-12)


def test_an_existing_place_is_replaced_only_when_asked(model: Model, copied: Path) -> None:
    with pytest.raises(
        StoreExistsError, match=r"model\.zarr exists: choose another place, or overwrite=True"
    ):
        model.save(copied)
    other = replace(model, threshold=0.9)
    other.save(copied, overwrite=True)
    assert load_model(copied).threshold == 0.9


def test_models_travel_by_url(model: Model) -> None:
    model.save("memory://models/m.zarr")
    assert_same(model, load_model("memory://models/m.zarr"))


# Refusals.


def attributes(place: Path) -> Any:
    return json.loads((place / "zarr.json").read_text())


def with_attributes(**changed: Any) -> Tamper:
    def tamper(place: Path) -> None:
        described = attributes(place)
        described["attributes"].update(changed)
        described["attributes"] = {k: v for k, v in described["attributes"].items() if v is not ...}
        (place / "zarr.json").write_text(json.dumps(described))

    return tamper


def with_array(name: str, change: Callable[[Array], Array]) -> Tamper:
    """Written anew by Zarr, so that every checksum of a chunk is right."""

    def tamper(place: Path) -> None:
        group: Any = zarr.open_group(str(place), mode="r+")
        values = change(group[name][:])
        del group[name]
        group.create_array(name, data=values)

    return tamper


def one_more(values: Array) -> Array:
    values.flat[0] += 1
    return values


def renamed(values: Array) -> Array:
    return np.frombuffer(values.tobytes().replace(b"f0", b"g0").replace(b" 0", b" 9"), dtype=np.uint8)


def without(name: str) -> Tamper:
    return lambda place: shutil.rmtree(place / name)


REFUSED: dict[str, tuple[Tamper, str]] = {
    "another format": (with_attributes(format="other"), r"is not a dswml model .*'other'"),
    "no format": (with_attributes(format=...), "is not a dswml model"),
    "newer": (with_attributes(format_version=99), r"version 99; this program reads .* install a newer dswml"),
    "version of another type": (with_attributes(format_version="1"), "version '1'"),
    "no version": (with_attributes(format_version=...), "version None"),
    "no digests": (with_attributes(sha256=...), "sha256 .* is missing"),
    "unknown loss": (with_attributes(loss="hinge"), "'hinge'.* install a newer dswml"),
    "unknown preprocessing": (with_attributes(normalize="l1"), "'l1'.* install a newer dswml"),
    "p0 is no number": (with_attributes(p0="0.2"), "attribute p0 .* is '0.2' where a number must be"),
    "p0 is no weight": (with_attributes(p0=1.5), "attribute p0 .* is 1.5, not between 0 and 1"),
    "threshold missing": (with_attributes(threshold=...), "attribute threshold .* is None"),
    "intercept is NaN": (with_attributes(intercept=float("nan")), "attribute intercept"),
    "no intercept": (with_attributes(intercept=0.0), r"10 features and 9 names"),
    "other columns": (with_attributes(history_columns=["a"]), r"history .* has columns \['a'\]"),
    "too many labels of a row": (with_attributes(top_k=L + 1), "top_k"),
    "no U": (without("U"), "array U .* is missing"),
    "no M": (without("M"), "array M .* is missing"),
    "no history": (without("history"), "array history .* is missing"),
    "no label names": (without("label_names"), "array label_names .* does not match its checksum"),
    "no label counts": (without("label_counts"), "array label_counts .* is missing"),
    "number in U": (with_array("U", one_more), "array U .* does not match its checksum"),
    "number in M": (with_array("M", one_more), "array M .* does not match its checksum"),
    "number in history": (with_array("history", one_more), "array history .* does not match its checksum"),
    "label count": (
        with_array("label_counts", one_more),
        "array label_counts .* does not match its checksum",
    ),
    "label name": (with_array("label_names", renamed), "array label_names .* does not match its checksum"),
    "feature name": (with_array("feature_names", renamed), "array feature_names .* does not match"),
    "type of U": (with_array("U", lambda u: u.astype(np.float32)), "array U .* not a matrix of float64"),
    "type of counts": (with_array("label_counts", lambda c: c.astype(np.int32)), "not a vector of int64"),
    "shape of U": (with_array("U", lambda u: u[:-1]), "array U .* does not match its checksum"),
    "transposed M": (with_array("M", lambda m: m.T.copy()), "M"),
    "flat M": (with_array("M", lambda m: m.ravel()), "array M .* not a matrix"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_as_it_was_written_is_refused(case: str, copied: Path) -> None:
    tamper, sentence = REFUSED[case]
    tamper(copied)
    with pytest.raises(DataError, match=sentence) as caught:
        load_model(copied)
    assert str(copied) in str(caught.value)
    assert caught.value.exit_code == 3


def chunks(place: Path) -> Iterator[tuple[str, Path]]:
    for name in ARRAYS:
        for file in sorted((place / name / "c").rglob("*")):
            if file.is_file():
                yield name, file


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "a flipped bit"])
def test_a_damaged_chunk_is_named(damage: str, saved: Path, tmp_path: Path) -> None:
    for number, (name, original) in enumerate(chunks(saved)):
        place = Path(shutil.copytree(saved, tmp_path / f"{number}.zarr"))
        file = place / original.relative_to(saved)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 8
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes({"truncated": bytes(content[:-5]), "empty": b""}.get(damage, bytes(content)))
        with pytest.raises(DataError, match=rf"chunk 0 of array {name} in .*{number}\.zarr (is|cannot)"):
            load_model(place)


def test_a_description_that_was_changed_is_refused(copied: Path) -> None:
    described = json.loads((copied / "U" / "zarr.json").read_text())
    described["shape"][0] += 1
    (copied / "U" / "zarr.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="U"):
        load_model(copied)


def test_an_interrupted_write_is_refused(copied: Path) -> None:
    with_attributes(complete=False)(copied)
    with pytest.raises(IncompleteStoreError, match="is incomplete: its writing was interrupted; train again"):
        load_model(copied)


def test_what_is_not_there_or_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"nothing\.zarr"):
        load_model(tmp_path / "nothing.zarr")
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match="file"):
        load_model(tmp_path / "file")
    create_dataset(tmp_path / "data.zarr", X, Y)
    with pytest.raises(DataError, match=r"is not a dswml model .*'dswml-dataset'"):
        load_model(tmp_path / "data.zarr")


# Scoring with plain arrays.


def test_single_rows_are_scored_from_plain_arrays(model: Model) -> None:
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    scores = np.hstack([unit, np.full((N, 1), 0.5)]) @ model.u @ model.m
    for row in (X[:1], X[:1].tolist(), sp.csr_array(X[:1]), sp.coo_array(X[:1]), X[:1].astype(np.float32)):
        np.testing.assert_allclose(model.decision_function(row), scores[:1], atol=1e-6)
        labels = model.predict(row)
        assert sp.issparse(labels)
        assert labels.dtype == np.uint8
        np.testing.assert_array_equal(labels.toarray(), scores[:1] >= 0.4)
    best, values = model.predict_topk(X[:1], k=2)
    assert best.tolist() == [np.argsort(-scores[0])[:2].tolist()]
    np.testing.assert_allclose(values[0], np.sort(scores[0])[::-1][:2])
    assert model.predict(X[:0]).shape == (0, L)


def test_whole_numbers_are_scored_with_the_intercept_in_full() -> None:
    """An intercept of 0.5 beside integer features is not rounded away."""
    plain = Model(u=np.eye(3), m=np.eye(3), p0=0.1, intercept=0.5)
    for rows in (np.array([[1, 2]]), sp.csr_array(np.array([[1, 2]], dtype=np.int8))):
        np.testing.assert_allclose(plain.decision_function(rows), [[1, 2, 0.5]])


def test_entries_that_are_given_twice_count_as_their_sum() -> None:
    plain = Model(u=np.eye(2), m=np.eye(2), p0=0.1, normalize="l2")
    rows = sp.csr_array((np.array([1.0, 2.0, 4.0]), np.array([0, 0, 1]), np.array([0, 3])), shape=(1, 2))
    np.testing.assert_allclose(plain.decision_function(rows), [[0.6, 0.8]])
    assert rows.nnz == 3


@pytest.mark.parametrize("rows", [X[0], X[:, :-1], np.ones((2, 3, 4))])
def test_rows_of_another_shape_are_refused(rows: Any, model: Model) -> None:
    with pytest.raises(UsageError, match=r"X has shape \(.*\), but the model was trained on 9 features"):
        model.predict(rows)


@pytest.mark.parametrize("k", [0, L + 1])
def test_a_number_of_labels_that_there_are_not_is_refused(k: int, model: Model) -> None:
    with pytest.raises(UsageError, match=f"k must be between 1 and the number of labels, {L}; got {k}"):
        model.predict_topk(X, k)


def test_the_package_offers_models() -> None:
    assert {"Model", "load_model", "SparseWeightedClassifier", "open_dataset"} <= set(dswml.__all__)
