"""The verbs ``predict`` and ``evaluate``: what they say, what they write, and the codes they end with."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner, Result
from prediction_cases import D, L, N, contents, make_store, names, rows_and_labels, slow_data, tied_model

from dswml import evaluate, predict_dataset
from dswml.cli import cli

X, Y = rows_and_labels()


def dswml(*arguments: str | os.PathLike[str]) -> Result:
    return CliRunner().invoke(cli, [os.fspath(argument) for argument in arguments], prog_name="dswml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a data set."""
    folder = tmp_path_factory.mktemp("place")
    model = tied_model(
        label_names=tuple(names("label", L)), label_counts=Y.sum(axis=0), info={"data": {"n_rows": N}}
    )
    model.save(folder / "m.zarr")
    make_store(folder / "d.zarr", sparse=True)
    return folder


# predict


def test_predict_writes_what_python_writes(place: Path, tmp_path: Path) -> None:
    told = dswml(
        "predict", place / "m.zarr", place / "d.zarr", tmp_path / "a.zarr", "--top-k", "3", "--scores"
    )
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith(f"Predicted {3 * N:,} labels (the 3 best) of {N:,} rows, 3 a row, in ")
    assert told.stdout.rstrip().endswith(str(tmp_path / "a.zarr"))
    predict_dataset(place / "m.zarr", place / "d.zarr", tmp_path / "b.zarr", top_k=3, scores=True)
    assert contents(tmp_path / "a.zarr") == contents(tmp_path / "b.zarr")


def test_predict_as_json_says_what_it_did(place: Path, tmp_path: Path) -> None:
    told = dswml(
        "predict", place / "m.zarr", place / "d.zarr", tmp_path / "out.csv", "--format", "csv", "--json"
    )
    assert told.exit_code == 0, told.output
    assert told.stderr == ""
    found = json.loads(told.stdout)
    expected = int((X @ tied_model().u @ tied_model().m >= 0.5).sum())
    assert (found["rule"], found["n_predicted"], found["format"]) == ("score >= 0.5", expected, "csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == expected
    assert {line["label"] for line in lines} <= set(names("label", L))


def test_predict_on_worker_processes_writes_the_same_bytes(place: Path, tmp_path: Path) -> None:
    command = ("predict", str(place / "m.zarr"), str(place / "d.zarr"))
    assert dswml(*command, tmp_path / "here.jsonl", "--format", "jsonl", "-q").exit_code == 0
    told = dswml(*command, tmp_path / "there.jsonl", "--format", "jsonl", "--workers", "1")
    assert told.exit_code == 0, told.output
    assert "Dashboard: http://127.0.0.1:" in told.stderr
    assert contents(tmp_path / "here.jsonl") == contents(tmp_path / "there.jsonl")


def test_predicting_nothing_is_told(place: Path, tmp_path: Path) -> None:
    told = dswml("predict", place / "m.zarr", place / "d.zarr", tmp_path / "out.zarr", "--threshold", "99")
    assert told.exit_code == 0
    assert "no label was predicted: lower --threshold, or use --top-k" in told.stderr


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--top-k", "3", "--threshold", "0.5"], 2, "exclude each other"),
        (
            ["--top-k", str(L + 1)],
            2,
            f"(--top-k) must be between 1 and the number of labels, {L}; got {L + 1}",
        ),
        (["--resume", "--overwrite"], 2, "exclude each other"),
        (["--block-bytes", "many"], 2, "'many' is not a number of bytes"),
    ],
)
def test_predict_refuses_with_a_sentence(
    place: Path, tmp_path: Path, options: list[str], code: int, sentence: str
) -> None:
    told = dswml("predict", place / "m.zarr", place / "d.zarr", tmp_path / "out.zarr", *options)
    assert told.exit_code == code, told.output
    assert sentence in told.stderr
    assert not (tmp_path / "out.zarr").exists()


def test_predict_refuses_what_is_there_and_what_is_not(place: Path, tmp_path: Path) -> None:
    command = (
        "predict",
        *(str(name) for name in (place / "m.zarr", place / "d.zarr", tmp_path / "out.zarr")),
    )
    assert dswml(*command).exit_code == 0
    again = dswml(*command)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    assert dswml(*command, "--overwrite").exit_code == 0
    assert dswml("predict", tmp_path / "no.zarr", place / "d.zarr", tmp_path / "o").exit_code == 3
    swapped = dswml("predict", place / "d.zarr", place / "m.zarr", tmp_path / "o")
    assert swapped.exit_code == 3
    assert "is not a dswml model" in swapped.stderr


@pytest.mark.parametrize("out", ["d.zarr", "m.zarr", "other.zarr"])
def test_overwrite_deletes_nothing_but_predictions(place: Path, tmp_path: Path, out: str) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    make_store(tmp_path / "other.zarr", sparse=False)
    before = contents(tmp_path)
    told = dswml(
        "predict", *(tmp_path / name for name in ("m.zarr", "d.zarr", out)), "--overwrite", "--top-k", "1"
    )
    assert told.exit_code == 2
    assert "choose another place" in told.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_keeps_what_is_done_for_resume(number: signal.Signals, tmp_path: Path) -> None:
    slow_data(tmp_path / "d.zarr")
    tied_model().save(tmp_path / "m.zarr")
    places = (str(tmp_path / name) for name in ("m.zarr", "d.zarr", "out.zarr"))
    command = (*places, "--block-bytes", "2000", "--json")
    program = Path(sys.executable).parent / "dswml"
    process = subprocess.Popen([program, "predict", *command], stderr=subprocess.PIPE, text=True)
    marks = tmp_path / "out.zarr" / "_progress" / "done"
    while process.poll() is None and (not marks.is_dir() or len(list(marks.iterdir())) < 3):
        time.sleep(0.002)
    process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 5, told
    assert "Stopping in good order" in told
    assert "go on with the same command and --resume" in told
    assert dswml("info", tmp_path / "out.zarr").exit_code == 3
    resumed = dswml("predict", *command, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(resumed.stdout)["n_rows_before"] > 0


@pytest.mark.parametrize("form", ["zarr", "jsonl"])
def test_the_same_command_again_ends_well(place: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    command = (
        "predict",
        place / "m.zarr",
        place / "d.zarr",
        out,
        "--top-k",
        "2",
        "--format",
        form,
        "--resume",
    )
    assert dswml(*command).exit_code == 0
    before = contents(out)
    again = dswml(*command)
    assert again.exit_code == 0, again.output
    there = f"{out} is there: all {N} rows had been predicted before, {2 * N} labels (the 2 best), 2 a row"
    assert again.stdout.strip() == (there if form == "zarr" else f"{out} is there already")
    assert ("text does not say of which model" in again.stderr) == (form == "jsonl")
    assert json.loads(dswml(*command, "--json").stdout)["n_predicted"] == (2 * N if form == "zarr" else None)
    assert contents(out) == before


# evaluate


def test_evaluate_as_json_has_every_figure_of_python(place: Path) -> None:
    told = dswml("evaluate", place / "m.zarr", place / "d.zarr", "--json", "--k", "3", "--threshold", "0.25")
    assert told.exit_code == 0, told.output
    assert told.stderr == ""
    found: dict[str, Any] = json.loads(told.stdout)
    expected = evaluate(place / "m.zarr", place / "d.zarr", k=3, threshold=0.25).as_dict()
    assert {**found, "seconds": 0} == {
        "model": str(place / "m.zarr"),
        "store": str(place / "d.zarr"),
        **expected,
        "seconds": 0,
    }
    assert {
        "micro_f1",
        "macro_f1",
        "samples_f1",
        "hamming_loss",
        "weighted_hamming_loss",
        "micro_auc",
    } <= set(found)
    assert {"micro_auc_error_bound", "edges", "best_threshold", "best_micro_f1", "coverage"} <= set(found)
    assert {"P@3", "nDCG@3", "PSP@3", "PSnDCG@3", "output_sparsity"} <= set(found)


def test_evaluate_for_people_is_a_table(place: Path) -> None:
    told = dswml("evaluate", place / "m.zarr", place / "d.zarr")
    assert told.exit_code == 0, told.output
    found = evaluate(place / "m.zarr", place / "d.zarr").scores
    lines = {
        line.split()[0]: line.split()[1:] for line in told.stdout.split("micro AUC")[0].splitlines() if line
    }
    assert lines["micro"] == [f"{100 * found[f'micro_{name}']:.2f}" for name in ("precision", "recall", "f1")]
    assert lines["P"] == [f"{100 * found[f'P@{k}']:.2f}" for k in (1, 3, 5)]
    assert lines["PSnDCG"] == [f"{100 * found[f'PSnDCG@{k}']:.2f}" for k in (1, 3, 5)]
    assert "predicted: score >= 0.5" in told.stdout
    assert "edges, uniform)" in told.stdout


def test_evaluate_exactly(place: Path) -> None:
    told = dswml("evaluate", place / "m.zarr", place / "d.zarr", "--exact", "-q", "--k", "2", "--top-k", "2")
    assert " exact (" in told.stdout
    assert "predicted: the 2 best" in told.stdout
    assert told.stderr == ""


def test_evaluate_says_how_to_get_what_is_left_out(place: Path, tmp_path: Path) -> None:
    tied_model().save(tmp_path / "bare.zarr")
    told = dswml("evaluate", tmp_path / "bare.zarr", place / "d.zarr")
    assert "left out: name the training data with --propensity-from" in told.stdout
    named = dswml("evaluate", tmp_path / "bare.zarr", place / "d.zarr", "--propensity-from", place / "d.zarr")
    assert "PSnDCG " in named.stdout
    assert "left out" not in named.stdout


def test_evaluate_refuses_other_data(place: Path, tmp_path: Path) -> None:
    tied_model(m=np.ones((3, 5))).save(tmp_path / "other.zarr")
    told = dswml("evaluate", tmp_path / "other.zarr", place / "d.zarr")
    assert told.exit_code == 3
    assert "but the model was trained on 5" in told.stderr


# info


def test_info_describes_predictions(place: Path, tmp_path: Path) -> None:
    dswml(
        "predict", place / "m.zarr", place / "d.zarr", tmp_path / "out.zarr", "--top-k", "2", "--scores", "-q"
    )
    found = json.loads(dswml("info", tmp_path / "out.zarr", "--json").stdout)
    assert (found["kind"], found["n_rows"], found["n_labels"]) == ("prediction", N, L)
    assert (found["n_predicted"], found["values"], found["rule"]) == (2 * N, "scores", "the 2 best")
    assert found["label_names"] is True
    told = dswml("info", tmp_path / "out.zarr").stdout
    assert f"{2 * N} scores, 2 a row" in told
    assert found["model"] == tied_model().fingerprint


def test_info_tells_how_a_model_chooses_labels(tmp_path: Path) -> None:
    tied_model().with_threshold(np.zeros(L)).save(tmp_path / "own.zarr")
    tied_model().with_threshold(top_k=4).save(tmp_path / "ranked.zarr")
    assert "predicted: score >= the label's own threshold" in dswml("info", tmp_path / "own.zarr").stdout
    found = json.loads(dswml("info", tmp_path / "ranked.zarr", "--json").stdout)
    assert (found["rule"], found["top_k"], found["label_thresholds"]) == ("the 4 best", 4, False)


# Rows without labels


def unlabelled(form: str, folder: Path) -> Path:
    """The features alone, in a file."""
    file = folder / f"rows.{form}"
    if form == "npy":
        np.save(file, X)
    elif form == "npz":
        sp.save_npz(file, sp.csr_array(X))
    elif form == "zarr":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            anndata.AnnData(X=X).write_zarr(file)
    else:
        header = f"{N} {D} {L}\n" if form == "txt" else ""
        lines = (" ".join(f"{j + (form == 'svm')}:{x:g}" for j, x in enumerate(row) if x) for row in X)
        file.write_text(header + "".join(f" {line}\n" for line in lines))
    return file


@pytest.mark.parametrize("form", ["npy", "npz", "txt", "svm", "zarr"])
def test_rows_without_labels_are_imported_when_asked_for_and_predicted(
    place: Path, tmp_path: Path, form: str
) -> None:
    file, store = unlabelled(form, tmp_path), tmp_path / "u.zarr"
    refused = dswml("import", file, store)
    assert (refused.exit_code in (2, 3), "--no-labels" in refused.stderr) == (True, True), refused.output
    told = dswml("import", file, store, "--no-labels", "--dtype", "float64")
    assert told.exit_code == 0, told.output
    assert dswml("validate", store).exit_code == 0
    for data in ("d.zarr", "u.zarr"):
        source = (place if data == "d.zarr" else tmp_path) / data
        done = dswml("predict", place / "m.zarr", source, tmp_path / f"{data}.csv", "--format", "csv")
        assert done.exit_code == 0, done.output
    assert (tmp_path / "u.zarr.csv").read_bytes() == (tmp_path / "d.zarr.csv").read_bytes()
    if form != "txt":  # whose header tells how many labels there are
        assert "labels      none: the rows can be predicted" in dswml("info", store).stdout
        for verb in (("train", store, "--model", tmp_path / "x.zarr"), ("tune", store)):
            learnt = dswml(*verb, "--weights", "uniform")
            assert (learnt.exit_code, "the data have no labels" in learnt.stderr) == (2, True)
