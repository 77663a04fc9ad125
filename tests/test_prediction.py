"""Predictions of data sets: the labels of the dense scores, the same bytes whoever writes them, resumable."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata.io
import dask.array as da
import fsspec
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from distributed import Client
from numpy.typing import NDArray
from prediction_cases import (
    BLOCK_BYTES,
    MANY_LABELS,
    MANY_ROWS,
    SLOW_ROWS,
    D,
    L,
    N,
    contents,
    dense_ranking,
    dense_scores,
    dense_top_k,
    make_store,
    names,
    rows_and_labels,
    slow_data,
    tied_model,
)

from dswml import Model, create_dataset, open_dataset, predict_dataset, prediction, prediction_output, scoring
from dswml.dask_executor import DaskExecutor
from dswml.errors import DataError, DswmlError, StoreExistsError, UsageError
from dswml.executor import InProcessExecutor
from dswml.layout import Layout, plan_layout
from dswml.prediction_output import Output, ZarrOutput
from dswml.sources import as_dataset
from dswml.stored import Dataset

Array = NDArray[Any]

X, Y = rows_and_labels()
FORMATS = ("zarr", "csv", "jsonl", "xmlrepo")
RULES: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.375},
    "label thresholds": {"threshold": np.linspace(-0.5, 1, L)},
    "top_k": {"top_k": 4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Sparse rows in a store, cut into many row blocks."""
    data = make_store(tmp_path_factory.mktemp("data") / "sparse.zarr", sparse=True)
    assert len(data.blocks) > 3
    return data


@pytest.fixture(scope="module")
def dense_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same rows, stored dense."""
    return make_store(tmp_path_factory.mktemp("data") / "dense.zarr", sparse=False)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows, labels, parts and chunks of the result so that each has to do with several of the others."""

    def small_chunks(*arguments: Any) -> Layout:
        return plan_layout(*arguments, chunk_rows=17)

    # Other processes would not know of this.
    monkeypatch.setattr(prediction, "current_executor", lambda data: InProcessExecutor(2))
    monkeypatch.setattr(scoring, "TILE_ENTRIES", 60)
    monkeypatch.setattr(scoring, "TILE_LABELS", 7)
    monkeypatch.setattr(prediction, "PART_ENTRIES", 30)
    monkeypatch.setattr(prediction_output, "plan_layout", small_chunks)


def make_dataset(place: Path) -> Path:
    create_dataset(place, X, Y)
    return place


def expected_labels(model: Model, threshold: Any = None, top_k: int | None = None) -> Array:
    scores = dense_scores(model, X)
    return dense_top_k(scores, top_k) if top_k is not None else (scores >= threshold).astype(np.int64)


def read_csr(place: Path) -> Any:
    """Read the result with Zarr and SciPy alone."""
    group: Any = zarr.open_group(str(place), mode="r")
    arrays = tuple(group[name][:] for name in ("data", "indices", "indptr"))
    return sp.csr_array(arrays, shape=group.attrs["shape"])


# What is predicted.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep_scores", [False, True], ids=["ones", "scores"])
def test_a_store_holds_the_labels_of_the_dense_scores(
    data: Dataset, dense_data: Dataset, tmp_path: Path, rule: str, keep_scores: bool, small_pieces: None
) -> None:
    model = tied_model()
    rows_of = data if keep_scores else dense_data
    done = predict_dataset(model, rows_of, tmp_path / "out.zarr", scores=keep_scores, **RULES[rule])
    found, expected = read_csr(tmp_path / "out.zarr"), expected_labels(model, **RULES[rule])
    assert found.dtype == (np.float64 if keep_scores else np.uint8)
    assert found.nnz == expected.sum() == done.n_predicted
    pattern = sp.csr_array((np.ones(found.nnz), found.indices, found.indptr), shape=found.shape)
    np.testing.assert_array_equal(pattern.toarray(), expected)
    assert pattern.has_canonical_format
    rows = np.repeat(np.arange(N), np.diff(found.indptr))
    values = dense_scores(model, X)[rows, found.indices] if keep_scores else np.ones(found.nnz)
    np.testing.assert_array_equal(found.data, values)
    group: Any = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")
    assert group["indices"].nchunks > 3
    assert group["indptr"].nchunks > 3


def test_anndata_reads_the_store(data: Dataset, tmp_path: Path) -> None:
    predict_dataset(tied_model(label_names=tuple(names("l", L))), data, tmp_path / "out.zarr", top_k=2)
    group: Any = zarr.open_group(str(tmp_path / "out.zarr"), mode="r")
    found: Any = anndata.io.read_elem(group)
    np.testing.assert_array_equal(found.toarray(), expected_labels(tied_model(), top_k=2))
    lazy = anndata.io.sparse_dataset(group)
    np.testing.assert_array_equal(lazy[10:20].toarray(), expected_labels(tied_model(), top_k=2)[10:20])
    assert json.loads(group["label_names"][:].tobytes()) == names("l", L)


def test_the_predictions_are_labels_for_our_own_reader(data: Dataset, tmp_path: Path) -> None:
    predict_dataset(tied_model(), data, tmp_path / "out.zarr")
    again = as_dataset(X, tmp_path / "out.zarr")
    np.testing.assert_array_equal(again.read_y(0, N).toarray(), expected_labels(tied_model(), 0.5))


def test_a_model_by_its_place_and_its_own_rule(data: Dataset, tmp_path: Path) -> None:
    tied_model().with_threshold(top_k=2).save(tmp_path / "model.zarr")
    assert data.url is not None
    done = predict_dataset(tmp_path / "model.zarr", data.url, tmp_path / "out.zarr")
    assert (done.rule, done.n_predicted, done.n_rows_before) == ("the 2 best", 2 * N, 0)
    np.testing.assert_array_equal(
        read_csr(tmp_path / "out.zarr").toarray(), expected_labels(tied_model(), top_k=2)
    )


def test_nothing_predicted_is_a_matrix_of_nothing(data: Dataset, tmp_path: Path) -> None:
    assert predict_dataset(tied_model(), data, tmp_path / "out.zarr", threshold=99).n_predicted == 0
    assert read_csr(tmp_path / "out.zarr").nnz == 0
    assert anndata.io.read_elem(zarr.open_group(str(tmp_path / "out.zarr"), mode="r")).shape == (N, L)
    predict_dataset(tied_model(), data, tmp_path / "out.csv", format="csv", threshold=99)
    assert (tmp_path / "out.csv").read_text() == "row,label,score\n"


# Text.


def dense_lists(named: bool, k: int) -> list[list[tuple[Any, float]]]:
    scores = dense_scores(tied_model(), X)
    label = names("label", L) if named else list(range(L))
    ranking = dense_ranking(scores, k)
    return [[(label[at], float(row[at])) for at in best] for row, best in zip(scores, ranking, strict=True)]


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
def test_csv_has_a_line_for_every_label_best_first(
    data: Dataset, tmp_path: Path, named: bool, small_pieces: None
) -> None:
    model = tied_model(label_names=tuple(names("label", L)) if named else None)
    predict_dataset(model, data, tmp_path / "out.csv", format="csv", top_k=3)
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert header == ["row", "label", "score"]
    expected = [(row, *pair) for row, pairs in enumerate(dense_lists(named, 3)) for pair in pairs]
    assert [(int(row), label, float(score)) for row, label, score in lines] == [
        (row, str(label), score) for row, label, score in expected
    ]


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
def test_json_lines_have_an_object_for_every_row(
    data: Dataset, tmp_path: Path, named: bool, small_pieces: None
) -> None:
    model = tied_model(label_names=tuple(names("label", L)) if named else None)
    predict_dataset(model, data, tmp_path / "out.jsonl", format="jsonl", threshold=0.75)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = [
        {"row": row, "labels": [{"label": label, "score": score} for label, score in pairs if score >= 0.75]}
        for row, pairs in enumerate(dense_lists(named, L))
    ]
    assert found == expected
    assert any(not row["labels"] for row in found)


def test_an_infinite_score_is_null_in_json(tmp_path: Path) -> None:
    model = Model(u=np.ones((1, 1)), m=np.array([[np.inf, -np.inf, 1.0]]), p0=0.1)
    predict_dataset(model, np.ones((1, 1)), tmp_path / "out.jsonl", format="jsonl", top_k=3)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)["labels"]
    assert [(each["label"], each["score"]) for each in found] == [(0, None), (2, 1.0), (1, None)]


def test_the_repository_format_is_a_matrix_by_lines(
    data: Dataset, tmp_path: Path, small_pieces: None
) -> None:
    predict_dataset(tied_model(), data, tmp_path / "out.txt", format="xmlrepo", threshold=0.75)
    header, *lines = (tmp_path / "out.txt").read_text().splitlines()
    assert header == f"{N} {L}"
    found = np.full((N, L), -np.inf)
    for row, line in enumerate(lines):
        pairs = [entry.split(":") for entry in line.split()]
        labels = [int(label) for label, _ in pairs]
        assert labels == sorted(labels)
        found[row, labels] = [float(score) for _, score in pairs]
    scores = dense_scores(tied_model(), X)
    np.testing.assert_array_equal(found, np.where(scores >= 0.75, scores, -np.inf))


# Rows of every kind.


def test_arrays_of_every_kind_are_predicted_alike(tmp_path: Path) -> None:
    stored = zarr.create_array(str(tmp_path / "x.zarr"), data=X, chunks=(70, D))
    forms: dict[str, Any] = {
        "numpy": X,
        "csr": sp.csr_array(X),
        "dask": da.from_array(X, chunks=(64, D)),
        "zarr": stored,
        "labelled": as_dataset(X, Y),
    }
    for name, rows in forms.items():
        predict_dataset(tied_model(), rows, tmp_path / f"{name}.csv", format="csv", block_bytes=BLOCK_BYTES)
    assert len({(tmp_path / f"{name}.csv").read_bytes() for name in forms}) == 1


def test_rows_stored_with_unit_norm_are_not_scaled_again(tmp_path: Path) -> None:
    u = np.random.default_rng(0).normal(size=(D, 3))
    model = tied_model(u=u, normalize="l2")
    raw = make_store(tmp_path / "raw.zarr", sparse=True)
    unit = make_store(tmp_path / "unit.zarr", sparse=True, normalize="l2")
    for name, rows in (("raw", raw), ("unit", unit)):
        predict_dataset(model, rows, tmp_path / f"{name}-out.zarr", top_k=L, scores=True)
        found = read_csr(tmp_path / f"{name}-out.zarr").toarray()
        np.testing.assert_allclose(found, dense_scores(model, X), atol=1e-12)
    with pytest.warns(UserWarning, match="were scaled to unit norm when they were stored"):
        predict_dataset(tied_model(u=u), unit, tmp_path / "other.zarr")


def test_other_features_than_the_models_are_refused(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"has {D} features, but the model was trained on {D + 1}"):
        predict_dataset(tied_model(u=np.ones((D + 1, 3))), data, tmp_path / "out.zarr")
    named = make_store(tmp_path / "named.zarr", sparse=False, feature_names=list("abcdef"))
    with pytest.raises(DataError, match=r"feature 3 of .* is 'd', but 'x' in the model"):
        predict_dataset(tied_model(feature_names=tuple("abcxef")), named, tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


# The same bytes everywhere.


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        ("zarr", "threshold"),
        ("zarr", "top_k"),
        ("csv", "threshold"),
        ("jsonl", "top_k"),
        ("xmlrepo", "top_k"),
    ],
)
def test_a_cluster_of_processes_writes_the_same_bytes(
    data: Dataset, tmp_path: Path, dask_client: Client, form: str, rule: str
) -> None:
    model = tied_model(label_names=tuple(names("label", L)))
    places = [tmp_path / "here", tmp_path / "there"]
    with InProcessExecutor(2) as here, DaskExecutor(dask_client) as there:
        for place, executor in zip(places, (here, there), strict=True):
            predict_dataset(model, data, place, format=form, scores=True, executor=executor, **RULES[rule])
    assert contents(places[0]) == contents(places[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def test_the_current_client_is_used(data: Dataset, tmp_path: Path, dask_client: Client) -> None:
    with dask_client.as_current():
        predict_dataset(tied_model(), data, tmp_path / "cluster.zarr")
    with InProcessExecutor(1) as executor:
        predict_dataset(tied_model(), data, tmp_path / "here.zarr", executor=executor)
    assert contents(tmp_path / "cluster.zarr") == contents(tmp_path / "here.zarr")


@pytest.mark.parametrize("form", ["zarr", "csv"])
def test_an_object_store_holds_the_same_bytes(data: Dataset, tmp_path: Path, form: str) -> None:
    fs = fsspec.filesystem("memory")
    for top_k in (3, 2):
        url = f"memory://predictions/{form}"
        predict_dataset(tied_model(), data, url, format=form, top_k=top_k, overwrite=True)
    predict_dataset(tied_model(), data, tmp_path / "local", format=form, top_k=2)
    found = {name.removeprefix(f"/predictions/{form}").strip("/"): fs.cat(name) for name in fs.find(url)}
    assert found == contents(tmp_path / "local")
    fs.rm("/predictions", recursive=True)


# Interruptions.


@pytest.mark.parametrize("form", ["zarr", "csv"])
def test_a_killed_process_is_resumed_to_the_same_bytes(tmp_path: Path, form: str) -> None:
    slow_data(tmp_path / "d.zarr")
    out = tmp_path / "killed"
    program = (
        "import prediction_cases; prediction_cases.predict_slowly"
        f"({str(tmp_path / 'd.zarr')!r}, {str(out)!r}, {form!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent)
    marks = (out if form == "zarr" else tmp_path / "killed.partial") / "_progress" / "done"
    while process.poll() is None and (not marks.is_dir() or len(list(marks.iterdir())) < 5):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the prediction ended before it could be killed"
    data = open_dataset(tmp_path / "d.zarr", block_bytes=BLOCK_BYTES)
    assert form == "zarr" or not out.exists()
    with pytest.raises(StoreExistsError, match="holds an interrupted prediction: go on with --resume"):
        predict_dataset(tied_model(), data, out, format=form, scores=True)
    done = predict_dataset(tied_model(), data, out, format=form, scores=True, resume=True)
    assert 0 < done.n_rows_before < SLOW_ROWS
    predict_dataset(tied_model(), data, tmp_path / "whole", format=form, scores=True)
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.zarr", "killed", "whole"]


class Interrupted(Exception):
    """Raised in place of an interruption."""


@pytest.mark.parametrize("form", ["zarr", "jsonl"])
@pytest.mark.parametrize("moment", ["assemble", "complete"])
def test_an_interruption_at_the_end_costs_nothing(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, moment: str
) -> None:
    def interrupted(*_: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(prediction.OUTPUTS[form], moment, interrupted)
        with pytest.raises(Interrupted):
            predict_dataset(tied_model(), data, tmp_path / "a", format=form)
    done = predict_dataset(tied_model(), data, tmp_path / "a", format=form, resume=True)
    whole = predict_dataset(tied_model(), data, tmp_path / "b", format=form)
    assert done.n_rows_before == N
    assert done.n_predicted == whole.n_predicted
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_store_that_lost_its_parts_after_assembly_is_completed(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_parts(self: Output, staging: Any) -> None:
        staging.clear()
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(ZarrOutput, "complete", lose_parts)
        with pytest.raises(Interrupted):
            predict_dataset(tied_model(), data, tmp_path / "a")
    assert predict_dataset(tied_model(), data, tmp_path / "a", resume=True).n_rows_before == N
    predict_dataset(tied_model(), data, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.fixture
def begun(data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prediction that was interrupted."""

    def interrupted(*_: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(ZarrOutput, "assemble", interrupted)
        with pytest.raises(Interrupted):
            predict_dataset(tied_model(), data, tmp_path / "begun.zarr", threshold=0.375)
    return tmp_path / "begun.zarr"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"threshold": 0.25}, "begun with threshold 0.375, and now it is 0.25"),
        ({"threshold": None, "top_k": 3}, "begun with top k None, and now it is 3"),
        ({"scores": True}, "begun with scores False, and now it is True"),
        ({"threshold": np.full(L, 0.375)}, "begun with threshold 0.375, and now it is"),
    ],
)
def test_only_the_same_prediction_is_resumed(
    data: Dataset, begun: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(StoreExistsError, match=told):
        predict_dataset(tied_model(), data, begun, resume=True, **{"threshold": 0.375, **changes})


def test_only_the_same_model_and_data_are_resumed(data: Dataset, begun: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreExistsError, match="begun with model "):
        predict_dataset(tied_model(m=2 * tied_model().m), data, begun, threshold=0.375, resume=True)
    with pytest.raises(StoreExistsError, match="begun with data "):
        predict_dataset(tied_model(), X[::-1].copy(), begun, threshold=0.375, resume=True)
    named = tied_model(label_names=tuple(names("l", L)))
    with pytest.raises(StoreExistsError, match="begun with label names "):
        predict_dataset(named, data, begun, threshold=0.375, resume=True)
    coarse = open_dataset(str(data.url))
    with pytest.raises(StoreExistsError, match="begun with row blocks "):
        predict_dataset(tied_model(), coarse, begun, threshold=0.375, resume=True)
    assert predict_dataset(tied_model(), data, begun, threshold=0.375, resume=True).n_rows_before == N


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("form", ["zarr", "csv"])
@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink])
def test_a_part_that_is_lost_or_damaged_is_made_again(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, damage: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(prediction, "PART_ENTRIES", 30)
    monkeypatch.setattr(scoring, "TILE_ENTRIES", 60)
    monkeypatch.setattr(prediction, "current_executor", lambda data: InProcessExecutor(2))
    predict_dataset(tied_model(), data, tmp_path / "whole", format=form, scores=True)
    staged = tmp_path / ("out" if form == "zarr" else "out.partial")

    def interrupted(*_: Any) -> None:
        raise Interrupted

    for name in ("indptr", "indices", "data") if form == "zarr" else ("text",):
        with monkeypatch.context() as patch:
            patch.setattr(prediction.OUTPUTS[form], "assemble", interrupted)
            with pytest.raises(Interrupted):
                predict_dataset(tied_model(), data, tmp_path / "out", format=form, scores=True)
        parts = sorted(path for path in (staged / "_progress" / "fragments" / name).iterdir())
        assert len(parts) > len(data.blocks)
        damage(parts[1])
        with pytest.warns(UserWarning, match=rf"1 of {len(parts)} parts in {staged} are lost or damaged"):
            done = predict_dataset(
                tied_model(), data, tmp_path / "out", format=form, scores=True, resume=True
            )
        assert 0 < done.n_rows_before < N
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        (shutil.rmtree if form == "zarr" else Path.unlink)(tmp_path / "out")


def test_a_part_that_is_damaged_after_it_was_looked_at_is_told(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("writing", 0):
            flip(tmp_path / "out" / "_progress" / "fragments" / "indices" / "0")

    with pytest.raises(
        DataError, match=r"indices/0 in .* is damaged: run the same command again with --resume"
    ):
        predict_dataset(tied_model(), data, tmp_path / "out", on_progress=damage)
    with pytest.warns(UserWarning, match="the first of rows 0 to"):
        predict_dataset(tied_model(), data, tmp_path / "out", resume=True)
    predict_dataset(tied_model(), data, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("form", ["zarr", "csv"])
def test_a_full_disk_is_told_with_the_way_on(tmp_path: Path, tiny_disk: Path, form: str) -> None:
    (tiny_disk / "filler").write_bytes(bytes(1_800_000))
    slow_data(tmp_path / "d.zarr")
    data, out = open_dataset(tmp_path / "d.zarr", block_bytes=BLOCK_BYTES), tiny_disk / "out"
    with pytest.raises(DswmlError, match=rf"{out} stopped \(No space left on device\): make room .*--resume"):
        predict_dataset(tied_model(), data, out, format=form, scores=True)
    (tiny_disk / "filler").unlink()
    assert predict_dataset(tied_model(), data, out, format=form, scores=True, resume=True).n_rows_before > 0
    predict_dataset(tied_model(), data, tmp_path / "whole", format=form, scores=True)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_full_disk_is_told_of_where_workers_write(
    tmp_path: Path, tiny_disk: Path, dask_client: Client
) -> None:
    (tiny_disk / "filler").write_bytes(bytes(1_800_000))
    slow_data(tmp_path / "d.zarr")
    data, out = open_dataset(tmp_path / "d.zarr", block_bytes=BLOCK_BYTES), tiny_disk / "out"
    with DaskExecutor(dask_client) as executor, pytest.raises(DswmlError, match=f"{out} stopped") as told:
        predict_dataset(tied_model(), data, out, scores=True, executor=executor)
    assert told.value.exit_code == 1


# What is there already.


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_there_is_kept_unless_it_is_to_be_replaced(data: Dataset, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    predict_dataset(tied_model(), data, out, format=form, top_k=1)
    before = contents(out)
    with pytest.raises(StoreExistsError, match=r"out exists.*--overwrite"):
        predict_dataset(tied_model(), data, out, format=form, top_k=2)
    if form == "zarr":
        with pytest.raises(StoreExistsError, match=r"out exists and is no interrupted.*--overwrite"):
            predict_dataset(tied_model(), data, out, top_k=2, resume=True)
    assert contents(out) == before
    done = predict_dataset(tied_model(), data, out, format=form, top_k=2, overwrite=True)
    assert done.n_predicted == 2 * N
    assert contents(out) != before


def test_a_store_that_is_finished_is_left_as_it_is_by_resume(data: Dataset, tmp_path: Path) -> None:
    whole = predict_dataset(tied_model(), data, tmp_path / "out", top_k=2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = predict_dataset(tied_model(), data, tmp_path / "out", top_k=2, resume=True)
    assert (again.n_predicted, again.n_rows_before) == (whole.n_predicted, N)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a half-removed store"])
def test_text_that_is_there_is_left_as_it_is_by_resume(data: Dataset, tmp_path: Path, left: str) -> None:
    predict_dataset(tied_model(), data, tmp_path / "out", format="csv")
    before = contents(tmp_path)
    if left != "nothing":
        (tmp_path / "out.partial").mkdir()
    if left == "a half-removed store":
        zarr.create_group(str(tmp_path / "out.partial"), attributes={"complete": False})
    with pytest.warns(
        UserWarning, match=r"out is there already, and text does not say of which .*--overwrite"
    ):
        again = predict_dataset(tied_model(), data, tmp_path / "out", format="csv", resume=True)
    assert (again.n_predicted, again.n_rows_before) == (None, N)
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_beside_text_and_not_ours_stays(data: Dataset, tmp_path: Path) -> None:
    predict_dataset(tied_model(), data, tmp_path / "out", format="csv")
    predict_dataset(tied_model(), data, tmp_path / "out.partial")
    before = contents(tmp_path)
    with pytest.raises(StoreExistsError, match="out exists and is no interrupted prediction"):
        predict_dataset(tied_model(), data, tmp_path / "out", format="csv", resume=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("form", ["csv", "jsonl", "xmlrepo"])
def test_text_is_never_written_into_a_folder(data: Dataset, tmp_path: Path, form: str) -> None:
    (tmp_path / "out").mkdir()
    for overwrite in (False, True):
        with pytest.raises(
            StoreExistsError, match="out is a folder: it is not replaced by text; name a file"
        ):
            predict_dataset(tied_model(), data, tmp_path / "out", format=form, overwrite=overwrite)
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_prediction_is_never_deleted(data: Dataset, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("...")
    with pytest.raises(StoreExistsError, match=r"mine (exists|is a folder)"):
        predict_dataset(tied_model(), data, folder, format=form)
    with pytest.raises(StoreExistsError, match=r"mine (is not a prediction|is a folder)"):
        predict_dataset(tied_model(), data, folder, format=form, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "..."
    beside = tmp_path / ("theirs" if form == "zarr" else "theirs.partial")
    before = contents(make_dataset(beside))
    with pytest.raises(StoreExistsError, match=f"{beside} is not a prediction: it is not overwritten"):
        predict_dataset(tied_model(), data, tmp_path / "theirs", format=form, overwrite=True)
    assert contents(beside) == before


@pytest.mark.parametrize("form", ["zarr", "csv"])
def test_a_removal_that_was_interrupted_is_finished(data: Dataset, tmp_path: Path, form: str) -> None:
    out, staged = tmp_path / "out", tmp_path / ("out" if form == "zarr" else "out.partial")
    zarr.create_group(str(staged), attributes={"complete": False})
    (staged / "left").write_text("...")
    for resume in (False, True):
        with pytest.raises(StoreExistsError, match=r"out.* exists.*--overwrite"):
            predict_dataset(tied_model(), data, out, format=form, resume=resume)
    predict_dataset(tied_model(), data, out, format=form, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize(
    "out",
    ["m.zarr", "d.zarr", "d.zarr/X", "d.zarr/new", ".", "link", "link/new", "m.zarr/../d.zarr/new", "a"],
)
def test_what_is_read_is_never_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, overwrite: bool, out: str
) -> None:
    tied_model().save(tmp_path / "m.zarr")
    make_dataset(tmp_path / "d.zarr")
    (tmp_path / "link").symlink_to(tmp_path / "d.zarr")
    if out == "a":  # the parts of text are beside it
        if form == "zarr":
            return
        (tmp_path / "d.zarr").rename(tmp_path / "a.partial")
    monkeypatch.chdir(tmp_path)
    before, store = contents(tmp_path), "a.partial" if out == "a" else "d.zarr"
    for place in (out, tmp_path / out, f"file://{tmp_path}/{out}", f"local://{tmp_path}/{out}"):
        with pytest.raises(StoreExistsError, match=r"is in, above or at .*, which is read"):
            predict_dataset("m.zarr", store, place, format=form, overwrite=overwrite)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("out", ["", "/m.zarr", "/d.zarr", "/d.zarr/X/indices", "//d.zarr/"])
def test_what_is_read_from_an_object_store_is_never_written_to(out: str) -> None:
    fs = fsspec.filesystem("memory")
    tied_model().save("memory://read/m.zarr")
    create_dataset("memory://read/d.zarr", X, Y)
    before = {name: fs.cat(name) for name in fs.find("/read")}
    for form in FORMATS:
        with pytest.raises(StoreExistsError, match=r"is in, above or at .*, which is read"):
            predict_dataset(
                "memory://read/m.zarr",
                "memory://read/d.zarr",
                f"memory://read{out}",
                format=form,
                overwrite=True,
            )
    assert {name: fs.cat(name) for name in fs.find("/read")} == before
    fs.rm("/read", recursive=True)


def test_resuming_nothing_begins(data: Dataset, tmp_path: Path) -> None:
    assert predict_dataset(tied_model(), data, tmp_path / "out.zarr", resume=True).n_rows_before == 0


def test_arguments_that_make_no_sense_are_refused(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the format 'xml' is not known: it is one of zarr, csv"):
        predict_dataset(tied_model(), data, tmp_path / "out", format="xml")
    with pytest.raises(UsageError, match="exclude each other"):
        predict_dataset(tied_model(), data, tmp_path / "out", resume=True, overwrite=True)
    with pytest.raises(UsageError, match=f"got {L + 1}"):
        predict_dataset(tied_model(), data, tmp_path / "out", top_k=L + 1)
    assert not (tmp_path / "out").exists()


# Many labels.


def test_many_labels_are_predicted_in_bounded_memory(tmp_path: Path) -> None:
    program = f"import prediction_cases; prediction_cases.predict_many({str(tmp_path)!r})"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert MANY_ROWS * MANY_LABELS * 8 / 2**20 > 1500, "all scores would take so many MiB"
    assert float(told.stdout) < 250
    scores = np.load(tmp_path / "first.npy")
    best = np.argsort(-scores, axis=1)[:, :5]
    found = read_csr(tmp_path / "0.zarr")
    assert found.shape == (MANY_ROWS, MANY_LABELS)
    np.testing.assert_array_equal(found.indices[:15].reshape(3, 5), np.sort(best, axis=1))
    selected = read_csr(tmp_path / "1.zarr")[:3].toarray()
    np.testing.assert_allclose(selected, np.where(scores >= 50, scores, 0))
