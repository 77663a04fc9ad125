"""dswml train: what it prints and where, its exit codes, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from training_cases import objective, planted

from dswml import SparseWeightedClassifier, create_dataset, load_model
from dswml.cli import cli

X, Y = planted(120, 10, 30, density=0.05)


def train(*arguments: str | os.PathLike[str]) -> Result:
    return CliRunner().invoke(cli, ["train", *(os.fspath(each) for each in arguments)], prog_name="dswml")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("train") / "data.zarr"
    create_dataset(place, X, Y, label_names=[f"l{number}" for number in range(30)])
    return place


def test_a_model_is_trained_and_the_fit_told_in_lines(store: Path, tmp_path: Path) -> None:
    told = train(store, "--model", tmp_path / "m.zarr", "--radius", "5", "--weights", "0.2", "--tol", "1e-4")
    assert told.exit_code == 0
    first, second, last = told.stdout.splitlines()
    assert first.startswith("OPTIMAL: objective ")
    assert "(certified, with the curvature of the loss)" in first
    assert "passes over X, rank " in second
    assert "p0 0.2" in second
    assert last == f"The model is in {tmp_path / 'm.zarr'}"
    lines = told.stderr.splitlines()
    assert lines[0].startswith("iteration   0  passes   1  objective ")
    assert all(" gap " in line and " rank " in line for line in lines)
    model = load_model(tmp_path / "m.zarr")
    assert model.label_names == tuple(f"l{number}" for number in range(30))
    assert len(lines) == len(model.history)


def test_json_is_one_object_with_everything_about_the_fit(store: Path, tmp_path: Path) -> None:
    told = train(
        store, "--model", tmp_path / "m.zarr", "--radius", "5", "--weights", "0.2", "--tol", "1e-4", "--json"
    )
    assert (told.exit_code, told.stderr) == (0, "")
    fit = json.loads(told.stdout)
    assert fit.keys() >= {
        "objective",
        "gap_estimate",
        "gap_certified",
        "relative_gap",
        "certificate",
        "passes",
        "iterations",
        "rank",
        "radius",
        "p0",
        "status",
        "seconds",
        "history",
    }
    assert (fit["status"], fit["radius"], fit["p0"]) == ("OPTIMAL", 5, 0.2)
    assert fit["certificate"] == {"method": "curvature", "gap": fit["gap_certified"], "confidence": 1}
    assert fit["relative_gap"] == pytest.approx(fit["gap_certified"] / fit["objective"])
    assert fit["relative_gap"] <= 1e-4
    assert [record["iteration"] for record in fit["history"]] == list(range(fit["iterations"] + 1))
    last = fit["history"][-1]
    assert (last["passes"], last["objective"]) == (fit["passes"], fit["objective"])
    u, m = load_model(tmp_path / "m.zarr").factors()
    assert u.shape[1] == fit["rank"]
    assert objective(X, Y, u @ m, 0.2) == pytest.approx(fit["objective"], rel=1e-10)


def test_the_command_and_the_estimator_fit_the_same_model(store: Path, tmp_path: Path) -> None:
    told = train(
        store,
        *("--model", tmp_path / "m.zarr", "--radius", "4", "--weights", "uniform", "--step", "line-search"),
        *(
            "--block-size",
            "2",
            "--tol",
            "0.05",
            "--max-iter",
            "9",
            "--max-passes",
            "30",
            "--time-limit",
            "60",
        ),
        *("--fit-intercept", "0.5", "--normalize", "l2", "--threshold", "0.3", "--seed", "5"),
        *("--dtype", "float32", "--cache", "none", "--block-bytes", "1 MiB", "--factor-memory", "1 GiB"),
        "--quiet",
    )
    assert (told.exit_code, told.stderr) == (0, "")
    clf = SparseWeightedClassifier(
        radius=4,
        weights="uniform",
        step="line-search",
        block_size=2,
        tol=0.05,
        max_iter=9,
        max_passes=30,
        time_limit=60,
        fit_intercept=0.5,
        normalize="l2",
        threshold=0.3,
        random_state=5,
        dtype="float32",
        cache="none",
        memory_limit="1 GiB",
    ).fit(store)
    model = load_model(tmp_path / "m.zarr")
    assert (model.u.tobytes(), model.m.tobytes()) == (clf.model_.u.tobytes(), clf.model_.m.tobytes())
    assert (model.threshold, model.normalize, model.intercept, model.p0) == (0.3, "l2", 0.5, 0.5)
    assert model.info["parameters"] == json.loads(json.dumps(clf.model_.info["parameters"]))


def test_every_parameter_of_the_estimator_has_an_option() -> None:
    shown = train("--help").output
    named = {name.replace("_", "-") for name in SparseWeightedClassifier().get_params()}
    renamed = {"random-state": "seed", "memory-limit": "factor-memory"}
    for name in named - {"callbacks"}:
        assert f"--{renamed.get(name, name)} " in shown


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--max-iter", "1", "--tol", "0"), "MAXITER"),
        (("--max-passes", "2", "--tol", "0"), "MAXPASSES"),
        (("--time-limit", "1e-9", "--tol", "0"), "TIMEOUT"),
    ],
)
def test_limits_leave_a_model_and_say_so(
    options: tuple[str, ...], status: str, store: Path, tmp_path: Path
) -> None:
    told = train(store, "--model", tmp_path / "m.zarr", "--weights", "0.2", *options)
    assert told.exit_code == 0
    assert told.stdout.startswith(f"{status}: ")
    assert load_model(tmp_path / "m.zarr").info["status"] == status


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--radius", "-1"), "'radius' parameter .* must be a float in the range (0.0, inf). Got -1.0"),
        (("--radius", "nan"), "'radius' parameter .* Got nan"),
        (("--weights", "1.5"), "'weights' parameter .* Got 1.5"),
        (("--weights", "sparse"), "neither 'sparsity' nor 'uniform' nor a number"),
        (("--tol", "-1"), "'tol' parameter"),
        (("--time-limit", "0"), "'time_limit' parameter"),
        (("--step", "newton"), "newton"),
        (("--loss", "exponential"), "step='corrective' needs the square loss"),
        (("--factor-memory", "much"), "'memory_limit' parameter"),
        (("--block-bytes", "much"), "'much' is not a number of bytes"),
        (("--block-bytes", "0"), "block"),
        (("--max-passes", "0"), "max-passes"),
    ],
)
def test_wrong_options_end_with_2_and_a_sentence(
    options: tuple[str, ...], sentence: str, store: Path, tmp_path: Path
) -> None:
    told = train(store, "--model", tmp_path / "m.zarr", *options)
    assert told.exit_code == 2
    for part in sentence.split(" .* "):
        assert part in told.stderr
    assert "Traceback" not in told.output
    assert not (tmp_path / "m.zarr").exists()


def test_a_model_that_is_there_is_kept_unless_it_may_be_overwritten(store: Path, tmp_path: Path) -> None:
    place = tmp_path / "m.zarr"
    common = ("--model", place, "--weights", "0.2", "--quiet")
    assert train(store, *common, "--radius", "2").exit_code == 0
    told = train(store, *common, "--radius", "3")
    assert told.exit_code == 2
    assert f"{place} exists" in told.stderr
    assert "--overwrite" in told.stderr
    assert load_model(place).info["parameters"]["radius"] == 2
    assert train(store, *common, "--radius", "3", "--overwrite").exit_code == 0
    assert load_model(place).info["parameters"]["radius"] == 3


def test_a_data_set_is_never_replaced_by_a_model(store: Path) -> None:
    told = train(store, "--model", store, "--weights", "0.2", "--overwrite")
    assert told.exit_code == 2
    assert f"{store} is not a model: it is not overwritten" in told.stderr
    assert told.stdout == ""
    assert train(store, "--model", store.parent / "m.zarr", "--weights", "0.2", "--quiet").exit_code == 0


def test_bad_data_end_with_3(store: Path, tmp_path: Path) -> None:
    told = train(tmp_path / "nothing.zarr", "--model", tmp_path / "m.zarr")
    assert told.exit_code == 3
    assert "nothing.zarr" in told.stderr
    damaged = Path(shutil.copytree(store, tmp_path / "damaged.zarr"))
    chunk = next(file for file in sorted((damaged / "X" / "c").rglob("*")) if file.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-8])
    told = train(damaged, "--model", tmp_path / "m.zarr", "--weights", "0.2")
    assert told.exit_code == 3
    assert "chunk 0 of array X in" in told.stderr
    assert "damaged" in told.stderr
    assert not (tmp_path / "m.zarr").exists()


def test_labels_that_leave_no_sparsity_weights_end_with_2(tmp_path: Path) -> None:
    create_dataset(tmp_path / "d.zarr", np.eye(4), np.ones((4, 3), dtype=int))
    told = train(tmp_path / "d.zarr", "--model", tmp_path / "m.zarr")
    assert told.exit_code == 2
    assert "use weights='uniform' or a number" in told.stderr


def test_weights_that_favour_zeros_are_a_line_of_warning(tmp_path: Path) -> None:
    create_dataset(tmp_path / "d.zarr", np.eye(4), np.eye(4, dtype=int))
    told = train(tmp_path / "d.zarr", "--model", tmp_path / "m.zarr", "--json")
    assert told.exit_code == 0
    assert told.stderr.startswith("Warning: with K = 1 and L = 4 the sparsity weights")
    assert json.loads(told.stdout)["p0"] == 0.5


def interrupted(store: Path, place: Path, number: int) -> tuple[int, str, str]:
    """Run the command in a process of its own, and send it a signal after its third iteration."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from dswml.cli import main; main()", "train", str(store)]
        + ["--model", str(place), "--weights", "0.2", "--step", "open-loop", "--tol", "0"]
        + ["--max-iter", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    while "iteration   3 " not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, seen + stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_fit_leaves_the_model_so_far(number: int, store: Path, tmp_path: Path) -> None:
    code, stdout, stderr = interrupted(store, tmp_path / "m.zarr", number)
    assert code == 1
    assert "Stopping in good order" in stderr
    assert f"{tmp_path / 'm.zarr'} holds the model so far" in stderr
    assert "Traceback" not in stderr
    assert stdout.startswith("INTERRUPTED: ")
    model = load_model(tmp_path / "m.zarr")
    assert model.info["status"] == "INTERRUPTED"
    iterations = model.info["iterations"]
    assert iterations >= 3
    clf = SparseWeightedClassifier(weights=0.2, step="open-loop", tol=0, max_iter=iterations).fit(store)
    np.testing.assert_allclose(model.u @ model.m, clf.model_.u @ clf.model_.m, atol=1e-10)
