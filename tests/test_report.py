"""The report: its numbers are the model's and NumPy's, its texts are text, and a real browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from dswml import (
    Model,
    SparseWeightedClassifier,
    SparseWeightedClassifierCV,
    create_dataset,
    load_model,
    write_report,
)
from dswml.charts import BOTTOM
from dswml.checkpoint_file import CheckpointFolder
from dswml.cli import cli
from dswml.errors import DataError, StoreExistsError
from dswml.frank_wolfe import Record
from dswml.hiding import public_name
from dswml.search_record import searched
from dswml.tuning import GridPoint, Tuned

Array = NDArray[Any]

HOSTILE = "<script>alert(1)</script>"
N, D, L = 240, 15, 40
NAMES = (HOSTILE, "\"quoted\" & 'more'", *(f"tag {i}" for i in range(2, L)))


#: No window, no sandbox (root may not have one), no talk with anybody; complaints on standard error.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]


class Reader(HTMLParser):
    """The texts, tables and tags of a page, whose tags must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.caption = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.rows, self.caption = [], len(self.texts.get("caption", []))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables.setdefault("".join(self.texts.get("caption", [])[self.caption :]), self.rows)

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def classes(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


def problem() -> tuple[Array, Array]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(N, D)) / np.sqrt(D)
    scores = x @ rng.normal(size=(D, 4)) @ rng.normal(size=(4, L))
    shares = np.linspace(0.5, 0.95, L)
    return x, (scores > [np.quantile(scores[:, i], shares[i]) for i in range(L)]).astype(np.uint8)


X, Y = problem()


@pytest.fixture(scope="module")
def fitted() -> SparseWeightedClassifierCV:
    clf = SparseWeightedClassifierCV((2, 10, 40), weights=(0.2, "uniform"), folds=3, tol=1e-2, random_state=0)
    clf.fit(X[:160], Y[:160])
    clf.model_ = replace(clf.model_, label_names=NAMES)
    return clf


@pytest.fixture(scope="module")
def place(fitted: SparseWeightedClassifierCV, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tuned model, rows it has not seen, and the report of both."""
    folder = tmp_path_factory.mktemp("report")
    fitted.model_.save(folder / "m.zarr")
    create_dataset(folder / "d.zarr", X[160:], Y[160:], label_names=NAMES)
    told = dswml("report", folder / "m.zarr", folder / "r.html", "--data", folder / "d.zarr", "--exact", "-q")
    assert (told.exit_code, told.stderr) == (0, ""), told.output
    assert told.stdout == f"The report is in {folder / 'r.html'}\n"
    return folder


def dswml(*arguments: str | os.PathLike[str]) -> Result:
    return CliRunner().invoke(cli, [os.fspath(argument) for argument in arguments], prog_name="dswml")


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def facts_of(path: Path) -> dict[str, str]:
    return {row[0]: row[1] for row in read(path).tables[""] if len(row) == 2}


# What is in it


def test_everything_is_there_in_order(place: Path) -> None:
    found = read(place / "r.html")
    anchors = [attrs["id"] for tag, attrs in found.tags if tag == "section"]
    assert anchors == [
        "training",
        "convergence",
        "spectrum",
        "cross-validation",
        "thresholds",
        "metrics",
        "labels",
    ]
    assert [f"#{anchor}" for anchor in anchors] == [attrs["href"] for tag, attrs in found.tags if tag == "a"]
    assert len(found.classes("chart")) == 7
    assert found.texts["h1"] == ["Report of m.zarr"]
    assert found.texts["footer"] == [""]


def test_facts_are_those_of_the_model(place: Path) -> None:
    model = load_model(place / "m.zarr")
    facts = facts_of(place / "r.html")
    info = model.info
    assert facts["Data"].startswith(f"160 rows (N), {D} features (D), {L} labels (L)")
    assert facts["Data fingerprint"] == info["data"]["fingerprint"]
    assert facts["Model fingerprint"] == model.fingerprint
    assert facts["Radius"].startswith(f"{info['parameters']['radius']:g},")
    assert facts["p0"].startswith(f"{model.p0:.4g}")
    assert facts["K_hat"].startswith(f"{Y[:160].sum(axis=1).max()} ")
    assert facts["Status"] == "Optimal: the tolerance of 0.01 was reached"
    assert facts["Rank of W"] == str(model.rank)
    assert facts["Asked for"] == "relative gap 0.01, step corrective, seed 0"
    search = info["search"]
    assert facts["Search"] == f"6 points on 3 folds in {search['passes']} more passes over X, by micro F1"
    assert "certified" in facts["Relative gap"]
    assert f"{info['passes']} passes" in facts["Work"]
    assert f"zarr {info['versions']['zarr']}" in facts["Versions"]


def test_metrics_are_those_of_numpy(place: Path) -> None:
    model = load_model(place / "m.zarr")
    scores, truth = X[160:] @ model.u @ model.m, Y[160:].astype(bool)
    predicted = scores >= 0.5
    tables = read(place / "r.html").tables
    hits = (predicted & truth).sum()
    expected = [hits / predicted.sum(), hits / truth.sum(), 2 * hits / (predicted.sum() + truth.sum())]
    assert tables["Predicted labels"][1] == ["micro", *(f"{100 * value:.2f}" for value in expected)]
    first = truth[np.arange(len(truth)), scores.argmax(axis=1)].mean()
    assert tables["Rankings"][1][:2] == ["P", f"{100 * first:.2f}"]

    support = truth.sum(axis=0)
    f1 = 2 * (predicted & truth).sum(axis=0) / np.maximum(support + predicted.sum(axis=0), 1)
    there = np.flatnonzero(support >= 5)
    order = sorted(there, key=lambda i: (-f1[i], -support[i], i))[:10]
    assert [row[0] for row in tables["Best labels"][1:]] == [NAMES[i] for i in order]
    assert [row[1] for row in tables["Best labels"][1:]] == [f"{100 * f1[i]:.2f}" for i in order]
    order = sorted(there, key=lambda i: (f1[i], -support[i], i))[:10]
    assert [row[0] for row in tables["Worst labels"][1:]] == [NAMES[i] for i in order]


def test_thresholds_and_roc_are_those_of_numpy(place: Path) -> None:
    from sklearn.metrics import precision_recall_curve, roc_auc_score

    model = load_model(place / "m.zarr")
    scores, truth = (X[160:] @ model.u @ model.m).ravel(), Y[160:].ravel()
    captions = read(place / "r.html").texts["figcaption"]
    area = re.search(r"the area under the curve is ([\d.]+) %\.", " ".join(captions))
    assert area is not None
    assert float(area[1]) == pytest.approx(100 * roc_auc_score(truth, scores), abs=0.006)
    precision, recall, _ = precision_recall_curve(truth, scores)
    best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
    shown = re.search(r"F1 is best, ([\d.]+) %", " ".join(captions))
    assert shown is not None
    assert float(shown[1]) == pytest.approx(100 * best, abs=0.006)


def test_without_data_thresholds_are_those_of_the_held_out_rows(
    place: Path, fitted: SparseWeightedClassifierCV, tmp_path: Path
) -> None:
    write_report(place / "m.zarr", tmp_path / "r.html")
    captions = " ".join(read(tmp_path / "r.html").texts["figcaption"])
    curve = fitted.tuned_.best.curve
    assert curve is not None
    theta, best = curve.best()
    assert (
        f"held-out rows of 3 folds; F1 is best, {100 * best:.2f} %, at the threshold {theta:.4g}" in captions
    )
    area = np.trapezoid(curve.recall()[::-1], curve.false_positive_rate()[::-1])
    assert f"the area under the curve is {100 * area:.2f} % (error at most " in captions


def test_spectrum_is_that_of_w(place: Path) -> None:
    model = load_model(place / "m.zarr")
    values = np.linalg.svd(model.u @ model.m, compute_uv=False)[: model.rank]
    titles = read(place / "r.html").texts["title"]
    shown = [float(title.split(": ")[1]) for title in titles if re.match(r"number \d+: ", title)]
    np.testing.assert_allclose(shown, values, rtol=1e-3)


def test_every_point_of_the_grid_is_there_with_its_error(
    place: Path, fitted: SparseWeightedClassifierCV
) -> None:
    found = read(place / "r.html")
    tuned = fitted.tuned_
    rows = found.tables["Points of the grid"][1:]
    for row, point in zip(rows, tuned.points, strict=True):
        values = point.scores["micro_f1"]
        error = values.std(ddof=1) / np.sqrt(3)
        assert (row[0], row[1]) == (f"{point.radius:g}", str(point.weights))
        assert row[3] == f"{values.mean():#.4g} ± {error:#.2g}"
    assert len(found.classes("bar")) == len(tuned.points)
    (remark,) = (row[-1] for row in rows if "chosen" in row[-1])
    assert "best" in remark
    assert sum("one-standard-error choice" in row[-1] for row in rows) == 1
    rings = {id(tuned.best), id(tuned.one_standard_error)}
    assert len(found.classes("large")) == 2 * len(rings)  # in the chart and in its legend


def test_many_weightings_look_different(fitted: SparseWeightedClassifierCV, tmp_path: Path) -> None:
    search = fitted.model_.info["search"]
    some, weights = search["points"][0], [round(0.05 * i, 2) for i in range(1, 9)]
    points = [{**some, "radius": radius, "weights": each} for each in weights for radius in (1, 2)]
    model = replace(fitted.model_, info={"search": {**search, "points": points}})
    write_report(model, tmp_path / "r.html")
    lines = {attrs["class"] for attrs in read(tmp_path / "r.html").classes("line")}
    assert len(lines) == len(weights)


def test_estimated_gaps_look_different_from_certified_ones(tmp_path: Path) -> None:
    history = tuple(
        Record(i, 2 * i + 1, 2.0 - i / 4, 0.1, 10.0**-i, certified=i == 3, rank=i, directions=i, seconds=1.0)
        for i in range(4)
    )
    model = Model(u=np.eye(2), m=np.ones((2, 3)), p0=0.1, history=history)
    write_report(model, tmp_path / "r.html")
    found = read(tmp_path / "r.html")
    assert len(found.classes("hollow")) == 3 + 1  # three marks and the legend
    assert sum("(estimate)" in title for title in found.texts["title"]) == 3 + 3
    assert {"certified", "estimate"} <= set(found.texts["li"])


def with_history(*records: tuple[int, int, float, float]) -> Model:
    """A model whose records have such iterations, passes, objectives and gaps."""
    history = tuple(
        Record(iteration, passes, objective, gap, gap, certified=True, rank=1, directions=1, seconds=1.0)
        for iteration, passes, objective, gap in records
    )
    return Model(u=np.eye(2), m=np.ones((2, 3)), p0=0.1, history=history)


def lines_of(found: Reader) -> list[list[tuple[float, float]]]:
    points = [(attrs["points"] or "").split() for attrs in found.classes("line") if "points" in attrs]
    return [[(float(x), float(y)) for x, y in (each.split(",") for each in line)] for line in points]


def test_iterations_of_one_pass_are_told_apart(tmp_path: Path) -> None:
    write_report(with_history((0, 1, 2.0, 0.5), (1, 1, 1.5, 0.1), (2, 1, 1.2, 0.01)), tmp_path / "r.html")
    found = read(tmp_path / "r.html")
    assert len({x for x, _ in lines_of(found)[0]}) == 3
    assert "iterations, which need no other pass" in found.texts["text"]
    assert "passes over X" not in found.texts["text"]


def test_an_objective_that_falls_far_is_drawn_by_its_size(tmp_path: Path) -> None:
    write_report(with_history(*((i, i + 1, 10.0**-i, 0.1) for i in range(4))), tmp_path / "r.html")
    heights = np.diff([y for _, y in lines_of(read(tmp_path / "r.html"))[0]])
    np.testing.assert_allclose(heights, heights[0], atol=0.2)


def test_a_long_course_has_few_marks(tmp_path: Path) -> None:
    course = ((i, i + 1, 2 - i / 1000, 1 / (i + 1)) for i in range(900))
    write_report(with_history(*course), tmp_path / "r.html")
    assert len(read(tmp_path / "r.html").classes("mark")) <= 2 * 100 + 2 + 1  # spectrum and legend


def test_precision_of_nothing_is_not_drawn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = Model(u=np.eye(3), m=rng.normal(size=(3, 8)), p0=0.1, threshold=50.0)
    write_report(model, tmp_path / "r.html", rng.normal(size=(40, 3)), rng.integers(0, 2, (40, 8)))
    precision = lines_of(read(tmp_path / "r.html"))[2]
    assert max(y for _, y in precision) < BOTTOM - 20  # about half of what is predicted at random is right


def test_means_of_many_labels_stay_in_the_chart(tmp_path: Path) -> None:
    many, frequent = 5000, 3
    truth = np.zeros((60, many), np.uint8)
    truth[np.arange(many) % 60, np.arange(many)] = 1
    truth[:50, :frequent] = 1
    scores = np.zeros((60, many))
    scores[:, :frequent] = truth[:, :frequent]  # only the most frequent are predicted, and rightly
    model = Model(u=np.eye(60), m=scores, p0=0.1)
    write_report(model, tmp_path / "r.html", np.eye(60), truth)
    found = read(tmp_path / "r.html")
    assert sum(": 50 rows" in title for title in found.texts["title"]) == frequent
    assert len(lines_of(found)[-1]) == 2  # the mean of either kind


# What is not in it


def test_missing_sections_are_told_with_the_way_to_get_them(place: Path, tmp_path: Path) -> None:
    told = dswml("report", place / "m.zarr", tmp_path / "r.html", "--json")
    done = json.loads(told.stdout)
    # The curve of the held-out rows is in the model.
    assert done["sections"] == ["training", "convergence", "spectrum", "cross-validation", "thresholds"]
    assert (len(done["left_out"]), done["n_bytes"]) == (1, (tmp_path / "r.html").stat().st_size)
    assert "--data STORE" in read(tmp_path / "r.html").texts["footer"][0]

    bare = write_report(Model(u=np.zeros((2, 0)), m=np.zeros((0, 3)), p0=0.1), tmp_path / "bare.html")
    assert bare.sections == ("training",)
    assert [word in " ".join(bare.left_out) for word in ("dswml tune", "--data STORE")] == [True, True]
    assert len(read(tmp_path / "bare.html").classes("chart")) == 0
    assert any("No convergence: the model has 0 records" in sentence for sentence in bare.left_out)
    assert "No spectrum: W is zero." in bare.left_out


def test_texts_of_the_data_are_text(place: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "<b>&'.zarr"
    shutil.copytree(place / "m.zarr", hostile)
    assert dswml("report", hostile, tmp_path / "r.html", "--data", place / "d.zarr", "-q").exit_code == 0
    found = read(tmp_path / "r.html")
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "img", "iframe", "object"})
    assert found.texts["h1"] == ["Report of <b>&'.zarr"]
    assert any(title.startswith(f"{HOSTILE}: ") for title in found.texts["title"])
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)


def test_names_without_letters_and_turned_ones_do_not_disturb_their_neighbours(tmp_path: Path) -> None:
    names = ("", "\u202egnp.exe", "\u2066 \u2069", "\u05d0")
    model = Model(u=np.eye(2), m=np.ones((2, 4)), p0=0.1, label_names=names)
    write_report(model, tmp_path / "r.html", np.eye(2), np.ones((2, 4), np.uint8))
    text = (tmp_path / "r.html").read_text()
    rows = Reader(text).tables["Labels, best first"][1:]
    assert [row[0] for row in rows] == ["(empty) label 0", "gnp.exe", "(empty) label 2", "\u05d0"]
    assert text.count("<bdi>") == 4 + 1  # and the title of their column
    assert not re.search("[\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)


def test_nothing_comes_from_elsewhere_and_nothing_runs(place: Path) -> None:
    text = (place / "r.html").read_text()
    found = Reader(text)
    assert "http:" not in text
    assert "https:" not in text
    links = [attrs[name] for _, attrs in found.tags for name in ("href", "src") if name in attrs]
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    policy = [attrs for tag, attrs in found.tags if tag == "meta" and "http-equiv" in attrs]
    assert (policy[0]["content"] or "").startswith("default-src 'none'")
    assert "@import" not in text
    assert "url(" not in text


def test_tables_and_charts_are_accessible(place: Path) -> None:
    found = read(place / "r.html")
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in found.tags if tag == "th")
    assert all(text.strip() for text in found.texts["th"])
    assert all(attrs.get("aria-label") for attrs in found.classes("facts"))
    assert all(attrs.get("role") == "img" for attrs in found.classes("chart"))
    assert len(found.texts["desc"]) == len(found.classes("chart"))
    assert ("html", {"lang": "en"}) in found.tags


def test_no_secret_and_no_folder_is_told(tmp_path: Path) -> None:
    import fsspec

    secrets = {"token": "hunter2"}
    model, data = "memory://user:hunter3@bucket/m.zarr", "memory://user:hunter3@bucket/d.zarr"
    Model(u=np.eye(2), m=np.ones((2, 3)), p0=0.1).save(model, storage_options=secrets)
    create_dataset(data, np.eye(2), np.ones((2, 3), np.uint8), storage_options=secrets)
    try:
        done = write_report(model, "memory://bucket/r.html", data, storage_options=secrets)
        text = fsspec.filesystem("memory", **secrets).cat_file("/bucket/r.html").decode()
    finally:
        fsspec.filesystem("memory").store.clear()
    assert (done.url, done.n_bytes) == ("memory://bucket/r.html", len(text.encode()))
    assert "m.zarr" in text
    assert "d.zarr" in text
    assert not re.search("hunter|bucket|user", text)
    assert public_name("s3://key:a/b@c/d@e.zarr?x=/y#z") == "e.zarr"
    assert public_name(tmp_path / "a b.zarr") == "a b.zarr"


def test_of_the_place_of_the_data_only_the_name_is_kept(tmp_path: Path) -> None:
    import fsspec

    from dswml import Checkpoints, open_dataset

    url, secrets = "memory://user:hunter3@bucket/folder/d.zarr", {"token": "hunter2"}
    create_dataset(url, X, Y, storage_options=secrets)
    try:
        data = open_dataset(url, storage_options=secrets)
        place = Checkpoints("memory://folder/run", storage_options=secrets)
        clf = SparseWeightedClassifier(5, weights=0.2, checkpoint=place).fit(data)
        write_report(place.url, tmp_path / "r.html", storage_options=secrets)
        kept = [file.getvalue() for path, file in fsspec.filesystem("memory").store.items() if "run/" in path]
    finally:
        fsspec.filesystem("memory").store.clear()
    assert clf.model_.info["data"]["name"] == "d.zarr"
    assert facts_of(tmp_path / "r.html")["Data"].startswith(f"d.zarr: {N} rows (N)")
    told = [json.dumps(clf.model_.info).encode(), (tmp_path / "r.html").read_bytes(), *kept]
    assert len(kept) > 10
    assert not any(re.search(b"hunter|bucket|folder/|user:", each) for each in told)


def test_many_labels_make_a_small_page(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    many = 60_000
    columns = np.concatenate([np.arange(many), rng.integers(0, 200, 4000)])
    truth = sp.csr_array((np.ones(columns.size, np.uint8), (rng.integers(0, 64, columns.size), columns)))
    truth.sum_duplicates()
    truth.data[:] = 1
    names = tuple(f"{i} {'long ' * 40}" for i in range(many))
    model = Model(u=np.eye(3), m=rng.normal(size=(3, many)), p0=0.1, label_names=names)
    done = write_report(model, tmp_path / "r.html", rng.normal(size=(64, 3)), truth)
    assert done.n_bytes < 400_000
    assert "The 100 most frequent and 700 others of 60,000 labels" in (tmp_path / "r.html").read_text()


def test_rows_the_model_has_seen_are_told(fitted: SparseWeightedClassifierCV, tmp_path: Path) -> None:
    write_report(fitted.model_, tmp_path / "seen.html", X[:160], Y[:160])
    write_report(fitted.model_, tmp_path / "new.html", X[160:], Y[160:])
    for name, seen in (("seen", True), ("new", False)):
        text = (tmp_path / f"{name}.html").read_text()
        assert ("which the model was trained on" in text) == seen
        assert text.count(", of rows trained on</span>") == 3 * seen  # the figures to be seen first


@pytest.mark.parametrize(
    ("truth", "missing", "sentence"),
    [(0, {"thresholds", "labels"}, "have no label at all"), (1, set(), "have every label")],
)
def test_what_is_not_defined_is_said(truth: int, missing: set[str], sentence: str, tmp_path: Path) -> None:
    model = Model(u=np.eye(3), m=np.random.default_rng(0).normal(size=(3, 5)), p0=0.1)
    done = write_report(model, tmp_path / "r.html", np.eye(3), np.full((3, 5), truth, np.uint8))
    assert {"thresholds", "metrics", "labels"} - set(done.sections) == missing
    assert sum(sentence in each for each in done.left_out) == 1
    text = (tmp_path / "r.html").read_text()
    assert "nan" not in text.lower()
    assert "<b>not defined</b><span>micro AUC</span>" in text
    assert "<h3>ROC</h3>" not in text


def test_only_ways_out_that_there_are_are_told(tmp_path: Path) -> None:
    write_report(Model(u=np.eye(2), m=np.eye(2), p0=0.1), tmp_path / "r.html", np.eye(2), np.eye(2))
    (text,) = read(tmp_path / "r.html").texts["body"]
    assert "left out: the model does not know" in text
    options = set(re.findall(r"--[a-z-]+", text))
    assert options <= {"--model", *re.findall(r"--[a-z-]+", dswml("report", "--help").stdout)}


# Of a run


def begun(folder: Path, *arguments: str) -> Result:
    """Train on rows in a folder with a checkpoint after every pass."""
    create_dataset(folder / "t.zarr", X[:160], Y[:160], label_names=NAMES)
    where = ["--checkpoint", str(folder / "run"), "--checkpoint-every", "1"]
    return dswml(arguments[0], folder / "t.zarr", "--model", folder / "m.zarr", *where, *arguments[1:], "-q")


def test_a_run_is_reported_as_the_model_that_it_has_reached(place: Path, tmp_path: Path) -> None:
    fit = ["--radius", "10", "--weights", "0.2", "--step", "open-loop", "--tol", "0", "--max-iter", "5"]
    assert begun(tmp_path, "train", *fit).exit_code == 0
    for name in ("run", "m.zarr"):
        out = tmp_path / f"{name}.html"
        assert dswml("report", tmp_path / name, out, "--data", place / "d.zarr", "-q").exit_code == 0
    of_run, of_model = read(tmp_path / "run.html"), read(tmp_path / "m.zarr.html")
    for caption in ("Predicted labels", "Rankings", "Best labels", "Worst labels"):
        assert of_run.tables[caption] == of_model.tables[caption]
    assert of_run.texts["figcaption"] == of_model.texts["figcaption"]
    told, ended = facts_of(tmp_path / "run.html"), facts_of(tmp_path / "m.zarr.html")
    status = told.pop("Status")
    assert re.fullmatch(r"Unfinished: stopped at checkpoint \d+, the tolerance of 0 was not reached", status)
    assert ended.pop("Status") == "Stopped: at its most iterations, the tolerance of 0 was not reached"
    same = ("Model fingerprint", "Time")  # W is the same up to rounding
    assert {told[name] == ended[name] for name in told if name not in same} == {True}
    assert told["Data"].startswith("t.zarr: 160 rows (N)")


def test_a_run_is_optimal_only_where_its_gap_is_certified_and_small(tmp_path: Path) -> None:
    assert begun(tmp_path, "train", "--radius", "10", "--weights", "0.2", "--tol", "0.01").exit_code == 0
    write_report(tmp_path / "run", tmp_path / "r.html")
    assert facts_of(tmp_path / "r.html")["Status"] == "Optimal: the tolerance of 0.01 was reached"
    assert "Unfinished" not in (tmp_path / "r.html").read_text()


def test_a_run_without_an_iteration_is_told_in_a_sentence(tmp_path: Path) -> None:
    stopped = begun(tmp_path, "train", "--radius", "10", "--weights", "0.2", "--time-limit", "1e-9")
    assert stopped.exit_code == 5
    told = dswml("report", tmp_path / "run", tmp_path / "r.html")
    assert (told.exit_code, "holds no iteration yet" in told.stderr, "--resume" in told.stderr) == (
        3,
        True,
        True,
    )
    for number in (tmp_path / "run").glob("checkpoint-*"):
        shutil.rmtree(number)
    told = dswml("report", tmp_path / "run", tmp_path / "r.html")
    assert (told.exit_code, "holds no checkpoint yet" in told.stderr) == (3, True)


def test_a_checkpoint_that_tells_nothing_of_its_data_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    folder.take()
    folder.write({"verb": "train"}, {"reads": [], "seconds": 1.0})
    with pytest.raises(DataError, match=r"older dswml.*--resume"):
        write_report(tmp_path / "run", tmp_path / "r.html")


def test_a_search_is_reported_point_by_point(tmp_path: Path) -> None:
    grid = ["--radii", "2,10,40", "--weights", "0.2,uniform", "--folds", "3", "--json"]
    ended = json.loads(begun(tmp_path, "tune", *grid).stdout)
    done = write_report(tmp_path / "run", tmp_path / "r.html")
    assert done.sections == ("search", "grid")
    facts = facts_of(tmp_path / "r.html")
    assert facts["Data"].startswith("t.zarr: 160 rows (N)")
    assert (facts["Radii"], facts["Weights"], facts["Folds"]) == ("2, 10, 40", "0.2, uniform", "3")
    points = {(f"{point['radius']:g}", str(point["weights"])): point for point in ended["points"]}
    assert re.fullmatch(r"checkpoint \d+, every point is solved", facts["State"])
    rows = read(tmp_path / "r.html").tables["Means over folds"][1:]
    assert len(rows) == len(points)
    for radius, weights, p0, solved, objective, gap, rank in rows:
        assert solved == "3 of 3"
        point = points[radius, weights]
        assert float(objective) == pytest.approx(np.mean(point["objective"]), rel=1e-5)
        assert float(gap) == pytest.approx(np.mean(point["relative_gap"]), rel=0.06)
        assert (p0, rank) == (f"{point['p0']:.4g}", f"{np.mean(point['rank']):.0f}")
    refused = dswml("report", tmp_path / "run", tmp_path / "r2.html", "--data", tmp_path / "t.zarr")
    assert (refused.exit_code, "a search that has no model yet" in refused.stderr) == (2, True)


def test_a_search_without_a_point_says_so(tmp_path: Path) -> None:
    from dswml import Checkpoints
    from dswml.errors import StoppedEarlyError
    from dswml.executor import InProcessExecutor
    from dswml.sources import as_dataset
    from dswml.tuning import tune

    data, place = as_dataset(X, Y), Checkpoints(tmp_path / "run")
    with InProcessExecutor(1) as executor, pytest.raises(StoppedEarlyError):
        tune(data, executor, radii=[2.0], weights=[0.2], folds=2, checkpoint=place, stop=lambda: True)
    done = write_report(tmp_path / "run", tmp_path / "r.html")
    assert done.sections == ("search",)
    assert "No point of the grid has been looked at yet." in read(tmp_path / "r.html").texts["footer"][0]


def test_one_of_a_kind_is_one(tmp_path: Path) -> None:
    clf = SparseWeightedClassifier(1, weights="uniform", max_iter=1, tol=0).fit(
        np.ones((1, 1)), np.ones((1, 1))
    )
    write_report(clf.model_, tmp_path / "r.html", np.ones((1, 1)), np.ones((1, 1), np.uint8))
    texts = " ".join(text for texts in read(tmp_path / "r.html").texts.values() for text in texts)
    assert "1 row (N), 1 feature (D), 1 label (L)" in texts
    assert not re.search(r"\b1 (passes|iterations|labels|rows|features)\b", texts)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_passes": 2}, "Stopped: at its most passes, the tolerance of 0 was not reached"),
        ({"max_iter": 0}, "Stopped: at its most iterations, the tolerance of 0 was not reached"),
    ],
)
def test_how_a_fit_ended_is_told_in_words(limits: dict[str, int], words: str, tmp_path: Path) -> None:
    clf = SparseWeightedClassifier(5, weights=0.2, tol=0, step="open-loop", **limits).fit(X, Y)  # type: ignore[arg-type]
    write_report(clf.model_, tmp_path / "r.html")
    assert facts_of(tmp_path / "r.html")["Status"] == words
    assert not re.search("MAX[A-Z]+|Max[a-z]+", (tmp_path / "r.html").read_text())


def test_what_a_threshold_was_tuned_for_is_told(tmp_path: Path) -> None:
    for score, words in (("macro_f1", "macro F1"), ("P@1", "micro F1")):
        clf = SparseWeightedClassifierCV(
            (2, 10), weights=(0.2,), folds=3, tol=1e-2, threshold="tuned", scoring=score, random_state=0
        )
        write_report(clf.fit(X, Y).model_, tmp_path / "r.html", X, Y, overwrite=True)
        found = read(tmp_path / "r.html")
        assert facts_of(tmp_path / "r.html")["Predicted"].endswith(f"tuned on held-out rows for {words}")
        assert sum(f"tuned for {words}, " in text for text in found.texts["li"]) == 1


# Where it is


def test_what_is_there_is_replaced_only_when_asked(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "r.html"
    assert dswml("report", place / "m.zarr", out, "-q").exit_code == 0
    before = out.read_bytes()
    again = dswml("report", place / "m.zarr", out, "--data", place / "d.zarr", "-q")
    assert (again.exit_code, "--overwrite" in again.stderr, out.read_bytes() == before) == (2, True, True)
    assert (
        dswml("report", place / "m.zarr", out, "--data", place / "d.zarr", "-q", "--overwrite").exit_code == 0
    )
    assert len(out.read_bytes()) > len(before)
    assert os.listdir(out.parent) == ["r.html"]
    with pytest.raises(StoreExistsError, match="is a folder"):
        write_report(place / "m.zarr", place / "d.zarr", overwrite=True)


@pytest.mark.parametrize("out", ["file/r.html", "http://127.0.0.1:9/r.html"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    place: Path, tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    told = dswml("report", place / "m.zarr", out, "--data", place / "d.zarr")
    assert told.exit_code == 3
    (line,) = told.stderr.splitlines()  # and no progress of an evaluation
    assert re.fullmatch(r"Error: the report .*r\.html cannot be written \(.*\): name a file in a .*", line)
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_no_model_is_refused_with_the_way_out(place: Path, tmp_path: Path) -> None:
    for model, data, way_out in (
        ("d.zarr", "d.zarr", "'dswml train'"),
        ("m.zarr", "m.zarr", "'dswml import'"),
    ):
        told = dswml("report", place / model, tmp_path / "r.html", "--data", place / data)
        assert (told.exit_code, "format attribute is" in told.stderr, way_out in told.stderr) == (
            3,
            True,
            True,
        )
    told = dswml("report", tmp_path / "none.zarr", tmp_path / "r.html")
    assert (told.exit_code, "none.zarr: check the path or URL" in told.stderr) == (3, True)


def test_the_same_model_makes_the_same_page(place: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_report(place / "m.zarr", tmp_path / name, place / "d.zarr")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# What a model remembers of its search


def test_the_record_of_a_search_is_bounded_and_keeps_the_choices(fitted: SparseWeightedClassifierCV) -> None:
    some = fitted.tuned_.points[0]

    def point(place: int) -> GridPoint:
        score = np.full(3, 0.5 - abs(place - 1777) / 1e5) + [0.0, 1e-6, 2e-6]
        return replace(
            some, radius=float(place + 1), scores={"micro_f1": score, "best_f1": score, "micro_auc": score}
        )

    tuned = Tuned(tuple(point(place) for place in range(5000)), "micro_f1", 0.5, 9, 3)
    model = searched(fitted.model_, tuned, tuned.best)
    record = model.info["search"]
    assert len(json.dumps(record)) < 150_000
    assert record["points"][record["chosen"]]["radius"] == tuned.best.radius == 1778.0
    assert record["points"][record["one_standard_error"]]["radius"] == tuned.one_standard_error.radius


def test_a_point_that_was_never_solved_can_be_saved_and_shown(
    fitted: SparseWeightedClassifierCV, tmp_path: Path
) -> None:
    points = list(fitted.tuned_.points)
    points[0] = replace(points[0], relative_gap=np.full(3, np.inf))
    tuned = replace(fitted.tuned_, points=tuple(points))
    searched(fitted.model_, tuned, tuned.best).save(tmp_path / "m.zarr")
    assert "Infinity" not in (tmp_path / "m.zarr" / "zarr.json").read_text()
    assert "cross-validation" in write_report(tmp_path / "m.zarr", tmp_path / "r.html").sections


# In a browser


@pytest.fixture(scope="module")
def chromium() -> str:
    """The program of Chromium; the tests that need it are skipped where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("Chromium is not installed: install the Debian package chromium")
    return found


def show(chromium: str, page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [chromium, *FLAGS, f"--user-data-dir={profile}", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )


def test_a_browser_shows_the_page_without_complaint(chromium: str, place: Path, tmp_path: Path) -> None:
    shown = show(chromium, place / "r.html", tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in shown.stderr
    found = Reader(shown.stdout)
    assert len(found.classes("chart")) == 7
    assert len(found.tables["Best labels"]) == 11
    assert all("NaN" not in (attrs.get("points") or "") + (attrs.get("d") or "") for _, attrs in found.tags)


def test_a_script_that_got_in_would_not_run(chromium: str, place: Path, tmp_path: Path) -> None:
    tampered = tmp_path / "r.html"
    script = "<script>document.body.innerHTML='taken over'</script></body>"
    tampered.write_text((place / "r.html").read_text().replace("</body>", script))
    shown = show(chromium, tampered, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" in shown.stderr  # so complaints are seen where there are any
    assert "Content Security Policy" in shown.stderr
    assert "<h1>" in shown.stdout


def measured(chromium: str, page: Path, folder: Path, width: int, script: str, media: str = "") -> Any:
    """What a script finds in a page of such a width, where it may run; ``media`` holds in its styles."""
    text = re.sub("<meta http-equiv[^>]*>", "", page.read_text())
    text = text.replace(f"@media {media}", "@media all") if media else text
    text = text.replace("<body>", f'<body style="width:{width}px">')
    tail = f"<script>document.body.textContent=JSON.stringify((()=>{{{script}}})())</script></body>"
    (folder / "measured.html").write_text(text.replace("</body>", tail))
    size = f"--window-size={max(width, 500)},900"
    shown = show(chromium, folder / "measured.html", folder / "profile", size, "--dump-dom")
    body = re.search("<body[^>]*>(.*)</body>", shown.stdout, re.DOTALL)
    assert body is not None
    return json.loads(body[1])


@pytest.fixture(scope="module")
def long_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of labels whose names have no place to break them."""
    names = tuple(f"TAG_{'electrochemistry' * 3}_{i}" for i in range(L))
    model = Model(u=np.eye(D), m=np.random.default_rng(0).normal(size=(D, L)), p0=0.1, label_names=names)
    out = tmp_path_factory.mktemp("long") / "r.html"
    write_report(model, out, X, Y)
    return out


@pytest.mark.parametrize("width", [672, 695])  # A4 and Letter within their margins
def test_on_paper_tables_have_room(chromium: str, long_names: Path, tmp_path: Path, width: int) -> None:
    boxes = "return [...document.querySelectorAll('table')].map(t=>{let r=t.getBoundingClientRect();"
    boxes += "return [r.left,r.top,r.right,r.bottom]})"
    found = measured(chromium, long_names, tmp_path, width, boxes, media="print")
    assert len(found) == 6
    assert max(right for _, _, right, _ in found) <= width
    for i, (left, top, right, bottom) in enumerate(found):
        for other in found[i + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_a_phone_shows_what_labels_are_sorted_by(chromium: str, long_names: Path, tmp_path: Path) -> None:
    cells = "return [...document.querySelectorAll('.long + td')].map(c=>c.getBoundingClientRect().right)"
    found = measured(chromium, long_names, tmp_path, 360, cells)
    assert len(found) == 20
    assert max(found) <= 344


def test_a_wide_screen_shows_all_columns_of_labels(chromium: str, long_names: Path, tmp_path: Path) -> None:
    script = "return [...document.querySelectorAll('.scroll')].map(b=>b.scrollWidth-b.clientWidth)"
    assert max(measured(chromium, long_names, tmp_path, 1280, script)) == 0


@pytest.mark.parametrize("width", [390, 1100])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_picture_of_the_page_is_not_blank(
    chromium: str, place: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    scheme_option = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    size = f"--window-size={width},2400"
    shown = show(
        chromium, place / "r.html", tmp_path / "profile", size, scheme_option, f"--screenshot={picture}"
    )
    assert "CONSOLE" not in shown.stderr
    pixels = np.rint(255 * np.asarray(imread(picture))[:, :, :3]).astype(np.int64)
    assert pixels.shape == (2400, width, 3)
    paper, line = {
        "light": ((255, 255, 255), (0x1F, 0x6F, 0xD6)),
        "dark": ((0x12, 0x17, 0x1E), (0x6A, 0xAE, 0xFF)),
    }[scheme]
    assert (pixels[0, 0] == paper).all()
    assert 0.5 < (pixels == paper).all(axis=2).mean() < 0.97
    assert (np.abs(pixels - line).max(axis=2) < 12).sum() > 300  # the lines of the charts
    assert (pixels[:, -12:] == paper).all()  # nothing is cut off at the right, wide tables scroll in a box
