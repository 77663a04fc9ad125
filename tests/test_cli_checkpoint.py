"""dswml train --checkpoint: real processes that are stopped and killed, and the command to go on with."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from training_cases import planted

from dswml import create_dataset, load_model
from dswml.cli import cli
from dswml.cli_checkpoint import resume_command
from dswml.model import Model
from dswml.stopping import stop_when

X, Y = planted(120, 10, 30, density=0.05)
FIT = ["--weights", "0.2", "--radius", "5", "--step", "open-loop", "--tol", "0", "--max-iter", "20"]
OFTEN = ["--checkpoint-every", "1"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("checkpoint") / "data.zarr"
    create_dataset(place, X, Y)
    return str(place)


@pytest.fixture(scope="module")
def undisturbed(store: str, tmp_path_factory: pytest.TempPathFactory) -> Model:
    place = tmp_path_factory.mktemp("undisturbed") / "m.zarr"
    assert run("train", store, "--model", str(place), *FIT).exit_code == 0
    return load_model(place)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="dswml")


def same_bits(one: Model, other: Model) -> bool:
    return (one.u.tobytes(), one.m.tobytes()) == (other.u.tobytes(), other.m.tobytes())


def signalled(number: int, *arguments: str) -> tuple[int, str]:
    """Run the command in a process of its own, and send it a signal after its third iteration."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from dswml.cli import main; main()", *arguments],
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
    _, rest = process.communicate(timeout=60)
    return process.returncode, seen + rest


def test_a_process_that_is_killed_is_gone_on_with(store: str, undisturbed: Model, tmp_path: Path) -> None:
    arguments = ["train", store, "--model", str(tmp_path / "m.zarr"), *FIT]
    arguments += ["--checkpoint", str(tmp_path / "run"), "--resume"]
    code, told = signalled(signal.SIGKILL, *arguments, *OFTEN)
    assert code == -signal.SIGKILL
    assert told.startswith(f"There is no checkpoint in {tmp_path / 'run'} yet: beginning from the start.")
    assert not (tmp_path / "m.zarr").exists()
    resumed = run(*arguments)
    assert resumed.exit_code == 0
    assert resumed.stderr.startswith("Going on from checkpoint ")
    assert "iteration   0 " not in resumed.stderr
    model = load_model(tmp_path / "m.zarr")
    assert same_bits(model, undisturbed)
    assert model.info["passes"] == undisturbed.info["passes"]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_with_5_and_the_command_to_go_on(
    number: int, store: str, undisturbed: Model, tmp_path: Path
) -> None:
    arguments = ["train", store, "--model", str(tmp_path / "a model.zarr"), *FIT, *OFTEN]
    code, told = signalled(number, *arguments, "--checkpoint", str(tmp_path / "run"))
    assert code == 5
    assert "Traceback" not in told
    assert f"Error: stopped as asked: the checkpoint in {tmp_path / 'run'} goes on from here\n" in told
    assert not (tmp_path / "a model.zarr").exists()
    program, *words = shlex.split(told.rpartition("Go on with: ")[2])
    assert program == "dswml"
    assert run(*words).exit_code == 0
    assert same_bits(load_model(tmp_path / "a model.zarr"), undisturbed)


def test_a_job_that_meets_its_time_limit_finishes_when_it_is_started_again_and_again(
    store: str, undisturbed: Model, tmp_path: Path
) -> None:
    arguments = ["train", store, "--model", str(tmp_path / "m.zarr"), *FIT, "--time-limit", "0.1"]
    arguments += ["--checkpoint", str(tmp_path / "run"), "--resume", "--quiet"]
    codes = [run(*arguments).exit_code]
    while codes[-1] == 5:
        codes.append(run(*arguments).exit_code)
    assert codes[-1] == 0
    assert same_bits(load_model(tmp_path / "m.zarr"), undisturbed)


def test_info_tells_of_what_a_checkpoint_is_and_how_far(store: str, tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    told = run("train", store, "--model", str(tmp_path / "m.zarr"), *FIT, "--checkpoint", place)
    assert told.exit_code == 0
    lines = run("info", place).stdout.splitlines()
    assert lines[0] == f"{place}: checkpoint 1 of dswml train"
    assert lines[1].startswith("  state       20 iterations, reads since the last: 0, ")
    assert "step open-loop" in lines[-1]
    found = json.loads(run("info", place, "--json").stdout)
    assert (found["kind"], found["iterations"], found["request"]["radius"]) == ("checkpoint", 20, 5)


def test_resuming_from_nowhere_and_senseless_intervals_end_with_2(store: str, tmp_path: Path) -> None:
    arguments = ["train", store, "--model", str(tmp_path / "m.zarr"), *FIT]
    told = run(*arguments, "--resume")
    assert (told.exit_code, "say where it is with --checkpoint DIR" in told.stderr) == (2, True)
    told = run(*arguments, "--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "often")
    assert (told.exit_code, "checkpoints every 'often': give a number" in told.stderr) == (2, True)


def test_other_parameters_and_other_data_end_with_2_and_the_difference(store: str, tmp_path: Path) -> None:
    place = ["--model", str(tmp_path / "m.zarr"), "--checkpoint", str(tmp_path / "run"), "--overwrite"]
    assert run("train", store, *place, *FIT).exit_code == 0
    told = run("train", store, *place, *FIT, "--radius", "6", "--resume")
    assert (told.exit_code, "was begun with radius 5.0, and now it is 6.0" in told.stderr) == (2, True)
    other = str(tmp_path / "other.zarr")
    create_dataset(other, 2 * X, Y)
    told = run("train", other, *place, *FIT, "--resume")
    assert (told.exit_code, "was begun with data " in told.stderr) == (2, True)


@pytest.mark.parametrize(
    "secret",
    [["-o", "secret=abc"], ["-osecret=abc"], ["--storage-option", "key=abc"], ["--storage-option=token=abc"]],
    ids=" ".join,
)
def test_the_command_to_go_on_with_has_no_secrets(secret: list[str]) -> None:
    command = resume_command(["train", "ftp://me:abc@host/x", *secret, "-o", "endpoint_url=http://e"])
    assert "abc" not in command
    assert "<hidden>" in command
    assert command.endswith("-o endpoint_url=http://e --resume")


@pytest.mark.parametrize("limit", [(), ("--time-limit", "1e-6")])
def test_a_search_goes_on_from_its_checkpoint_through_to_the_model(
    store: str, limit: tuple[str, ...], tmp_path: Path
) -> None:
    grid = ["tune", store, "--radii", "1,5", "--weights", "0.2", "--folds", "2", "--json"]
    whole = run(*grid, "--model", str(tmp_path / "whole.zarr"))
    assert whole.exit_code == 0
    grid += ["--model", str(tmp_path / "m.zarr"), "--checkpoint", str(tmp_path / "run"), "--resume", *limit]
    stops = 0
    with nullcontext() if limit else stop_when(lambda: True):  # after every read
        told = run(*grid)
        while told.exit_code == 5:
            assert "Go on with: dswml tune " in told.stderr
            stops += 1
            told = run(*grid)
    assert told.exit_code == 0
    assert stops >= 4
    assert json.loads(told.stdout) | {"passes": 0} == json.loads(whole.stdout) | {"passes": 0}
    assert same_bits(load_model(tmp_path / "m.zarr"), load_model(tmp_path / "whole.zarr"))
    assert run("info", str(tmp_path / "run")).stdout.startswith(f"{tmp_path / 'run'}: checkpoint ")


def test_a_search_begun_again_forgets_the_fit_of_the_one_before(store: str, tmp_path: Path) -> None:
    place = ["--model", str(tmp_path / "m.zarr"), "--checkpoint", str(tmp_path / "run"), "--overwrite"]
    grid = ["tune", store, "--weights", "0.2", "--folds", "2", "--json", *place]
    assert run(*grid, "--radii", "1").exit_code == 0
    with stop_when(lambda: True):
        assert run(*grid, "--radii", "5").exit_code == 5
    told = run(*grid, "--radii", "5", "--resume")
    assert (told.exit_code, told.stderr) == (0, "")
    assert load_model(tmp_path / "m.zarr").info["parameters"]["radius"] == 5
