"""Jobs: handed to a scheduler of real processes they go on alone, outlive workers, and tell no secret."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from distributed import Client, LocalCluster
from job_cases import FarCluster, far_cluster

import dswml
from dswml.cli import cli
from dswml.dataset import open_dataset
from dswml.errors import DswmlError, StoppedEarlyError, UsageError
from dswml.executor import InProcessExecutor
from dswml.job_board import ENDED, FRUITLESS_STARTS, JobBoard
from dswml.jobs import all_jobs
from dswml.model import load_model
from dswml.synth import synthesize

#: Enough iterations to be met in the middle of.
LONG: dict[str, Any] = {"radius": 60.0, "step": "line-search", "tol": 1e-12, "max_iter": 60}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarCluster]:
    with far_cluster(tmp_path_factory.mktemp("cluster"), workers=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: FarCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.address)
    with Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data") / "a.zarr"
    synthesize(place, rows=3000, features=20, labels=40, sparsity=4, chunk_rows=500)
    return place


def command(*arguments: str | os.PathLike[str]) -> Result:
    return CliRunner().invoke(cli, [os.fspath(argument) for argument in arguments], prog_name="dswml")


def until(met: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def weights(place: Path) -> tuple[bytes, bytes]:
    u, m = load_model(place).factors()
    return u.tobytes(), m.tobytes()


def trained_here(store: Path, place: Path, **options: Any) -> tuple[bytes, bytes]:
    """Train in this process, on one thread, through the command."""
    told = command("train", store, "--model", place, "--json", *flags(options))
    assert told.exit_code == 0, told.stderr
    return weights(place)


def flags(options: dict[str, Any]) -> list[str]:
    return [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def pid_of(client: Client, worker: str) -> int:
    return int(client.run(os.getpid, workers=[worker])[worker])


# From the command line


def test_a_job_ends_with_the_bits_of_a_direct_run_when_its_client_has_left(
    client: Client, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are those of the client's folder; its process ends before the job does."""
    program = Path(sys.executable).parent / "dswml"
    options = ["--name", "mine", "--wait-workers", "2"]
    submitted = subprocess.run(
        [program, "submit", *options, "train", store.name, "--model", tmp_path / "model.zarr"],
        cwd=store.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    assert f"dswml status {job} --follow" in submitted.stderr
    early = command("result", job)
    assert early.exit_code == 1
    assert "wait for it with --wait" in early.stderr
    followed = command("status", "mine", "--follow")
    assert followed.exit_code == 0, followed.stderr
    assert f"{job}: done" in followed.stdout
    assert "iteration   1  passes" in followed.stderr
    assert command("logs", job).stdout == followed.stderr
    (listed,) = (each for each in json.loads(command("jobs", "--json").stdout)["jobs"] if each["id"] == job)
    assert (listed["state"], listed["name"], listed["starts"]) == ("done", "mine", 1)
    assert f"{job} " in command("jobs").stdout
    found = json.loads(command("result", job, "--json").stdout)
    assert found["passes"] == listed["figures"]["passes"]
    assert f"objective        {found['objective']}" in command("result", job).stdout
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS")
    assert weights(tmp_path / "model.zarr") == trained_here(store, tmp_path / "here.zarr")


def test_a_job_that_fails_leaves_with_its_exit_code_and_tells_no_secret(
    cluster: FarCluster, client: Client, store: Path, tmp_path: Path
) -> None:
    """A bit is flipped, so that a task fails on a worker and Dask logs what it was called with."""
    damaged = tmp_path / "damaged.zarr"
    shutil.copytree(store, damaged)
    chunk = damaged / "X" / "c" / "2" / "0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    secrets = ["AKIAOPENSESAME", "wJalrXUtnFEMI/K7MDENG"]
    options = ["-o", f"key={secrets[0]}", "-o", f'client_kwargs={{"token": "{secrets[1]}"}}']
    handed = command("submit", "train", damaged, "--model", tmp_path / "model.zarr", *options, "--json")
    assert handed.exit_code == 0, handed.stderr
    job = json.loads(handed.stdout)["id"]
    told = command("result", job, "--wait")
    assert told.exit_code == 3
    assert "chunk 2 of array X" in told.stderr
    assert command("status", job, "--follow").exit_code == 3
    assert "failed" in command("status", job).stdout

    board = json.dumps([all_jobs(client), dswml.Job(client, job).logs()])
    client.dump_cluster_state(os.fspath(tmp_path / "state"), format="yaml")
    shown = board + told.output + cluster.said() + (tmp_path / "state.yaml").read_text()
    assert shown.count(job) > 5
    assert "Compute Failed" in cluster.said()
    for secret in secrets:
        assert secret not in shown


def test_a_job_is_cancelled_in_good_order_and_then_by_force(
    client: Client, store: Path, tmp_path: Path
) -> None:
    job = dswml.submit(client, "train", store, model=tmp_path / "model.zarr", **{**LONG, "max_iter": 10**6})
    until(lambda: job.status()["figures"])
    assert job.status()["state"] == "running"
    with pytest.raises(TimeoutError, match=f"job {job.id} is running"):
        job.result(timeout=0.1)
    assert "once more kills it" in command("cancel", job.id).stdout
    assert until(lambda: job.status()["state"] in ENDED)
    status = job.status()
    assert status["state"] == "cancelled"
    assert status["exit_code"] in (1, 5)
    with pytest.raises(DswmlError, match=r"interrupted|stopped"):
        job.result()
    assert command("cancel", job.id).stdout.strip() == f"Job {job.id} is cancelled."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["status", "nobody"], "knows no job nobody"),
        (["result", "nobody", "--wait"], "knows no job nobody"),
        (["cancel", "nobody"], "knows no job nobody"),
        (["logs", "nobody"], "knows no job nobody"),
        (["submit", "train", "a.zarr"], "--model"),
        (["submit", "train", "a.zarr", "--model", "m", "--radius", "far"], "'far' is not a valid float"),
        (["submit", "synth", "a.zarr"], "synth"),
        (["submit", "train", "a.zarr", "--model", "m", "--workers", "2"], "have no use with the scheduler"),
    ],
)
def test_what_cannot_be_meant_is_told_at_once(client: Client, arguments: list[str], sentence: str) -> None:
    told = command(*arguments)
    assert told.exit_code == 2
    assert sentence in told.stderr


def test_a_job_needs_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    told = command("submit", "train", "a.zarr", "--model", "m.zarr")
    assert told.exit_code == 2
    assert "name it with --scheduler" in told.stderr


def test_nothing_that_is_sent_to_workers_shows_its_storage_options() -> None:
    for module in pkgutil.iter_modules(dswml.__path__, "dswml."):
        for each in vars(importlib.import_module(module.name)).values():
            if dataclasses.is_dataclass(each):
                shown = [field.name for field in dataclasses.fields(each) if field.repr]
                assert "storage_options" not in shown, each


# Before it starts


def test_every_worker_must_read_the_data_and_write_beside_the_output(
    client: Client, store: Path, tmp_path: Path
) -> None:
    told = command("submit", "train", tmp_path / "none.zarr", "--model", tmp_path / "m.zarr")
    assert told.exit_code == 3
    assert "2 of 2 workers cannot do the work" in told.stderr
    assert all(worker in told.stderr for worker in client.nthreads())
    told = command("submit", "train", store, "--model", "/proc/nowhere/m.zarr")
    assert told.exit_code == 3
    assert "cannot write /proc/nowhere/m.zarr" in told.stderr
    assert list(tmp_path.iterdir()) == []


def test_workers_that_do_not_come_are_told(client: Client, store: Path, tmp_path: Path) -> None:
    wait = ["--wait-workers", "3", "--timeout", "0.5"]
    told = command("submit", *wait, "train", store, "--model", tmp_path / "m.zarr")
    assert told.exit_code == 4
    assert "has 2 of 3 workers after 0.5 s" in told.stderr


# From Python


@pytest.mark.parametrize(
    ("verb", "options", "sentence"),
    [
        ("synth", {}, "'synth' cannot be submitted: it is one of train, tune, predict, evaluate"),
        ("train", {"model": "m", "colour": "red"}, "train has no option 'colour': it has"),
        ("train", {"model": "m", "step": "hop"}, "submit train: Invalid value for '--step'"),
    ],
)
def test_options_are_checked_in_python(
    client: Client, verb: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        dswml.submit(client, verb, "a.zarr", **options)


# The board


@pytest.fixture
def board() -> Iterator[JobBoard]:
    """The board of a scheduler without workers, with one job on it."""
    board = JobBoard()
    nothing = dict.fromkeys(("name", "output", "checkpoint"))
    board.answer("open", record={"id": "a", "verb": "train", "reads": [], "submitted": 0.0, **nothing})
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster:
        cluster.sync(board.start, cluster.scheduler)
        yield board


def test_a_scheduler_that_other_processes_cannot_reach_takes_no_jobs(store: Path) -> None:
    with (
        Client(n_workers=1, processes=False, dashboard_address=None, set_as_default=False) as client,
        pytest.raises(UsageError, match="only this process can reach the scheduler inproc://"),
    ):
        dswml.submit(client, "train", store, model="m.zarr")


def test_a_driver_that_was_replaced_is_told_to_end(board: JobBoard) -> None:
    first = board.answer("start", job="a", worker="one")
    second = board.answer("start", job="a", worker="two")
    assert (first["start"], second["start"]) == (1, 2)
    assert board.answer("post", job="a", start=1, lines=[], figures=None)["asked"] == "kill"
    assert board.answer("post", job="a", start=2, lines=[], figures=None)["asked"] is None
    board.answer("finish", job="a", start=1, exit_code=0, error=None, result="{}")
    assert board.answer("show", job="a")["job"]["state"] == "running"


def test_a_job_that_loses_worker_after_worker_and_gets_nowhere_fails(board: JobBoard) -> None:
    for _ in range(3):  # lost, but each time after some progress
        start = board.answer("start", job="a", worker="w")["start"]
        board.answer("post", job="a", start=start, lines=["line"], figures={"passes": start})
    for _ in range(FRUITLESS_STARTS):
        assert board.answer("start", job="a", worker="w")["go"]
    assert not board.answer("start", job="a", worker="w")["go"]
    job = board.answer("show", job="a")["job"]
    assert (job["state"], job["exit_code"]) == ("failed", 4)
    assert "run out of memory" in job["error"]


# Slow: what dies on the way


@pytest.mark.slow
def test_a_job_outlives_the_workers_that_run_its_driver(client: Client, store: Path, tmp_path: Path) -> None:
    """More of them than Dask itself allows a task to lose; at last the driver alone is killed."""
    job = dswml.submit(client, "train", store, model=tmp_path / "model.zarr", **LONG)
    for start in range(1, 6):

        def has_got_somewhere(start: int = start) -> bool:
            status = job.status()
            assert status["state"] not in ENDED, status
            news = any(line.startswith("iteration") for line in lines_since(job.logs(), start))
            return status["starts"] == start and news

        until(has_got_somewhere)
        worker = pid_of(client, job.status()["worker"])
        if start < 5:
            os.kill(worker, signal.SIGKILL)
        else:
            drivers(worker)[0].kill()
    assert job.result(timeout=240)["iterations"] == LONG["max_iter"]
    assert job.status()["starts"] == 6
    expected = tmp_path / "here.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DASK_SCHEDULER_ADDRESS")
        assert weights(tmp_path / "model.zarr") == trained_here(store, expected, **LONG)
    assert not list(tmp_path.glob("*checkpoint*"))


def lines_since(lines: list[str], start: int) -> list[str]:
    """Return the lines of a log that come after the beginning of a start."""
    marks = [number for number, line in enumerate(lines) if line.startswith(f"Start {start},")]
    return lines[marks[-1] :] if marks else (lines if start == 1 else [])


@pytest.mark.slow
def test_two_jobs_at_once_have_the_bits_of_one_alone(client: Client, store: Path, tmp_path: Path) -> None:
    jobs = [
        dswml.submit(client, "train", store, model=tmp_path / f"{seed}.zarr", seed=seed, **LONG)
        for seed in (0, 1)
    ]
    for job in jobs:
        job.result(timeout=240)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DASK_SCHEDULER_ADDRESS")
        for seed in (0, 1):
            here = trained_here(store, tmp_path / f"here-{seed}.zarr", seed=seed, **LONG)
            assert weights(tmp_path / f"{seed}.zarr") == here


@pytest.mark.slow
def test_every_verb_can_be_a_job(client: Client, store: Path, tmp_path: Path) -> None:
    tuned = dswml.submit(client, "tune", store, model=tmp_path / "m.zarr", radii="5,20", folds=2)
    assert tuned.result(timeout=240)["chosen"]["radius"] in (5, 20)
    predicted = dswml.submit(client, "predict", tmp_path / "m.zarr", store, tmp_path / "y.zarr", top_k=3)
    assert predicted.result(timeout=240)["n_predicted"] == 3 * 3000
    measured = dswml.submit(client, "evaluate", tmp_path / "m.zarr", store, name="how good")
    here = dswml.evaluate(tmp_path / "m.zarr", store, executor=InProcessExecutor(1))
    assert measured.result(timeout=240)["P@1"] == here.scores["P@1"]
    with pytest.raises(UsageError, match="exists"):
        dswml.submit(client, "tune", store, model=tmp_path / "m.zarr", folds=2).result(timeout=240)
    assert open_dataset(store).n_rows == 3000


@pytest.mark.slow
def test_a_job_that_is_asked_twice_is_killed(client: Client, store: Path, tmp_path: Path) -> None:
    options = {**LONG, "max_iter": 10**6}
    job = dswml.submit(client, "train", store, model=tmp_path / "model.zarr", **options)
    worker = until(lambda: job.status()["figures"] and job.status()["worker"])
    assert drivers(pid_of(client, worker))
    assert job.cancel()["state"] == "stopping"
    assert job.cancel()["state"] == "cancelled"
    with pytest.raises(DswmlError, match="killed"):
        job.result()
    until(lambda: not any(drivers(pid_of(client, worker)) for worker in client.nthreads()), 30)


def drivers(worker: int) -> list[psutil.Process]:
    """Those that run: one that was killed may still be there, without a command line."""
    found = []
    for child in psutil.Process(worker).children():
        with suppress(psutil.NoSuchProcess):
            found += [child] if "dswml.driver" in child.cmdline() else []
    return found


@pytest.mark.slow
def test_a_worker_with_another_version_is_named(cluster: FarCluster, store: Path, tmp_path: Path) -> None:
    """The worker finds the record of another SciPy before that of its own."""
    record = tmp_path / "site" / "scipy-1.2.3.dist-info" / "METADATA"
    record.parent.mkdir(parents=True)
    record.write_text("Metadata-Version: 2.1\nName: scipy\nVersion: 1.2.3\n")
    path = os.pathsep.join([os.fspath(record.parents[1]), os.environ.get("PYTHONPATH", "")])
    folder = tmp_path / "cluster"
    folder.mkdir()
    with far_cluster(folder, workers=1) as other:
        other.start("worker", "--nthreads", "1", PYTHONPATH=path)
        there = ["--scheduler", other.address, "--wait-workers", "2"]
        told = command("submit", *there, "train", store, "--model", tmp_path / "m.zarr")
    assert told.exit_code == 4
    assert "has scipy 1.2 (" in told.stderr


@pytest.mark.slow
def test_a_job_goes_on_from_its_checkpoint(client: Client, store: Path, tmp_path: Path) -> None:
    """After the loss of its driver by itself, after a cancellation when asked to."""
    job = dswml.submit(client, "train", store, model=tmp_path / "model.zarr", checkpoint_every="1", **LONG)
    until(lambda: job.status()["figures"].get("iteration", 0) > 5)
    os.kill(pid_of(client, job.status()["worker"]), signal.SIGKILL)
    again = until(lambda: [line for line in lines_since(job.logs(), 2) if line.startswith("iteration")])
    assert int(again[0].split()[1]) > 3
    until(lambda: job.status()["figures"]["iteration"] > 10)
    assert job.cancel()["checkpoint"].startswith(f"{tmp_path}/model.zarr.")
    with pytest.raises(StoppedEarlyError):
        job.result(timeout=120)
    status = job.status()
    assert (status["state"], status["exit_code"], status["starts"]) == ("cancelled", 5, 2)
    assert f"--checkpoint {status['checkpoint']} --resume" in command("status", job.id).stdout
    resumed = dswml.submit(
        client,
        "train",
        store,
        model=tmp_path / "model.zarr",
        checkpoint=status["checkpoint"],
        resume=True,
        **LONG,
    )
    assert resumed.result(timeout=240)["iterations"] == LONG["max_iter"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DASK_SCHEDULER_ADDRESS")
        assert weights(tmp_path / "model.zarr") == trained_here(store, tmp_path / "here.zarr", **LONG)
