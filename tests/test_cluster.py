"""Where the work runs: in this process, on a local cluster of this machine alone, or on a named scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from dswml.cli import cli
from dswml.cluster import ClusterOptions, executor_from_options
from dswml.dask_executor import DaskExecutor
from dswml.dataset import open_dataset
from dswml.errors import ClusterError, UsageError
from dswml.executor import InProcessExecutor

NOWHERE = "tcp://127.0.0.1:9"
SYNTH = ["--rows", "3000", "--features", "10", "--labels", "40", "--sparsity", "4"]


def dswml(*arguments: str | os.PathLike[str]) -> Result:
    return CliRunner().invoke(cli, [os.fspath(argument) for argument in arguments], prog_name="dswml")


def worker_of(item: int, payload: str) -> tuple[int, str]:
    return os.getpid(), payload * item


def wait_long(item: int, payload: object) -> None:
    time.sleep(60)


@pytest.fixture(autouse=True)
def no_named_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)


@pytest.fixture
def scheduler_file(tmp_path: Path) -> Iterator[Path]:
    """A scheduler and a worker in processes of their own."""
    file = tmp_path / "scheduler.json"
    dask = Path(sys.executable).parent / "dask"
    local = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
    scheduler, worker = (
        subprocess.Popen(
            [dask, *arguments, *local],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for arguments in (["scheduler", "--port", "0"], ["worker", "--nthreads", "1", "--no-nanny"])
    )
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().endswith("}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield file
    finally:
        for process in (worker, scheduler):
            process.kill()
            process.wait()


def test_without_options_the_work_runs_in_this_process() -> None:
    with executor_from_options(ClusterOptions()) as executor:
        assert isinstance(executor, InProcessExecutor)
        assert executor.map(worker_of, [1, 2], "a") == [(os.getpid(), "a"), (os.getpid(), "aa")]


def listening(process: psutil.Process) -> set[str]:
    processes = [process, *process.children(recursive=True)]
    return {
        connection.laddr.ip
        for one in processes
        for connection in one.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def test_a_local_cluster_has_the_processes_asked_for_and_listens_to_this_machine_alone() -> None:
    said: list[str] = []
    options = ClusterOptions(workers=2, threads=1, memory_limit="512 MiB")
    with executor_from_options(options, announce=said.append) as executor:
        assert isinstance(executor, DaskExecutor)
        workers = {pid for pid, _ in executor.map(worker_of, list(range(8)), "a")}
        assert os.getpid() not in workers
        assert executor.n_slots == 2
        assert executor.memory_per_slot() == int(0.8 * 512 * 2**20) - 200 * 2**20
        assert listening(psutil.Process()) == {"127.0.0.1"}
        (link,) = (line.removeprefix("Dashboard: ") for line in said)
        with urllib.request.urlopen(link, timeout=10) as page:
            assert page.status == 200
    assert not any(psutil.pid_exists(pid) for pid in workers)


def test_threads_alone_make_a_dask_cluster_inside_this_process() -> None:
    said: list[str] = []
    with executor_from_options(ClusterOptions(threads=2), announce=said.append) as executor:
        assert isinstance(executor, DaskExecutor)
        assert executor.map(worker_of, [1], "a") == [(os.getpid(), "a")]
        assert listening(psutil.Process()) <= {"127.0.0.1"}
        assert said[0].startswith("Dashboard: http://127.0.0.1:")


def test_a_local_cluster_makes_the_same_data_as_this_process(tmp_path: Path) -> None:
    made = {
        name: dswml("synth", tmp_path / name, *SYNTH, *options)
        for name, options in {
            "here": [],
            "threads": ["--threads", "2"],
            "processes": ["--workers", "2"],
        }.items()
    }
    for result in made.values():
        assert result.exit_code == 0, result.stderr
    assert "Dashboard: http://127.0.0.1:" in made["processes"].stderr
    fingerprints = {open_dataset(tmp_path / name).fingerprint for name in made}
    assert len(fingerprints) == 1


def test_the_scheduler_of_a_file_does_the_work(tmp_path: Path, scheduler_file: Path) -> None:
    made = dswml("synth", tmp_path / "a.zarr", *SYNTH, "--scheduler-file", scheduler_file)
    assert made.exit_code == 0, made.stderr
    assert "Dashboard: " in made.stderr
    address = json.loads(scheduler_file.read_text())["address"]
    assert dswml("validate", tmp_path / "a.zarr", "--scheduler", address).exit_code == 0
    with executor_from_options(ClusterOptions(scheduler=address)) as executor:
        ((pid, _),) = executor.map(worker_of, [1], "a")
        assert pid != os.getpid()


def test_the_scheduler_of_the_environment_is_used(
    tmp_path: Path, scheduler_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
    made = dswml("synth", tmp_path / "a.zarr", *SYNTH)
    assert made.exit_code == 0, made.stderr
    assert "Dashboard: " in made.stderr


def test_a_scheduler_that_is_lost_on_the_way_is_a_sentence(scheduler_file: Path) -> None:
    scheduler = next(
        child
        for child in psutil.Process().children()
        if {"scheduler", os.fspath(scheduler_file)} <= set(child.cmdline())
    )
    with executor_from_options(ClusterOptions(scheduler_file=str(scheduler_file))) as executor:
        assert len(executor.map(worker_of, [1], "a")) == 1
        killer = threading.Timer(1.0, scheduler.kill)
        killer.start()
        with pytest.raises(ClusterError, match="cannot be reached any more"):
            executor.map(wait_long, [1, 2])
        killer.join()


@pytest.mark.parametrize("named_by", ["option", "file", "environment"])
def test_no_local_cluster_takes_the_place_of_a_scheduler_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_by: str
) -> None:
    monkeypatch.setattr("dswml.cluster.CONNECT_SECONDS", 0.5)
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": NOWHERE}))
    if named_by == "environment":
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", NOWHERE)
    options = {"option": ["--scheduler", NOWHERE], "file": ["--scheduler-file", os.fspath(file)]}
    told = dswml("synth", tmp_path / "a.zarr", *SYNTH, *options.get(named_by, []))
    assert told.exit_code == 4
    assert NOWHERE in told.stderr
    assert not (tmp_path / "a.zarr").exists()


def test_scheduler_files_that_are_missing_or_hold_no_address_are_told(tmp_path: Path) -> None:
    missing = ClusterOptions(scheduler_file=str(tmp_path / "none.json"))
    with pytest.raises(ClusterError, match="there is no scheduler file"), executor_from_options(missing):
        pass
    (tmp_path / "empty.json").write_text("{}")
    empty = ClusterOptions(scheduler_file=str(tmp_path / "empty.json"))
    with pytest.raises(ClusterError, match="holds no address"), executor_from_options(empty):
        pass


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--scheduler", NOWHERE, "--workers", "2"], "have no use with the scheduler"),
        (["--scheduler", NOWHERE, "--scheduler-file", "a.json"], "name one of them"),
        (["--scheduler", "somewhere"], "write it like tcp://HOST:8786"),
        (["--memory-limit", "lots"], "the memory limit 'lots' is not a number of bytes"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_options_that_cannot_be_meant_are_wrong_usage(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    told = dswml("synth", tmp_path / "a.zarr", *SYNTH, *options)
    assert told.exit_code == 2
    assert sentence in told.stderr


def test_local_options_next_to_a_scheduler_of_the_environment_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", NOWHERE)
    told = dswml("synth", tmp_path / "a.zarr", *SYNTH, "--workers", "1")
    assert told.exit_code == 2
    assert "DASK_SCHEDULER_ADDRESS" in told.stderr


def test_options_are_checked_in_python_too() -> None:
    with pytest.raises(UsageError, match="name one of them"):
        ClusterOptions(scheduler=NOWHERE, scheduler_file="a.json")
