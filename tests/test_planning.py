"""The plan of a fit: the blocks, the memory and the time that it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dswml.cli import cli
from dswml.dask_executor import WORKER_BYTES
from dswml.dataset import open_dataset
from dswml.errors import UsageError
from dswml.planning import plan_training
from dswml.synth import synthesize

MIB = 2**20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "data.zarr"
    synthesize(path, rows=6000, features=200, labels=50, sparsity=4, chunk_rows=500)
    return path


def test_the_blocks_are_those_of_the_data_set(store: Path) -> None:
    data = open_dataset(store, block_bytes=MIB)
    plan = plan_training(data)
    assert plan.row_blocks == len(data.blocks) > 3
    assert plan.block_rows == data.blocks[0].n_rows
    assert plan.block_nbytes == pytest.approx(plan.block_rows * (200 * 4 + 4 * 5), rel=0.01)


def test_memory_follows_from_the_formula(store: Path) -> None:
    data = open_dataset(store, block_bytes=MIB)
    plan = plan_training(data, workers=2, threads=3)
    gradient = 8 * (200 * (50 + 200) + 50 * (200 + 50))  # with X^T X, and what 50 new directions bring
    assert plan.worker_nbytes == int((WORKER_BYTES + 3 * (4 * plan.block_nbytes + 9 * gradient)) / 0.8)
    assert plan.keeping_nbytes > plan.worker_nbytes
    assert plan_training(data, factor_memory=20 * MIB).directions < plan.directions


def test_more_workers_take_less_time(store: Path) -> None:
    data = open_dataset(store, block_bytes=MIB)
    plan = plan_training(data)
    assert plan.seconds_per_pass > 0
    assert plan.seconds == tuple(count * plan.seconds_per_pass for count in plan.passes)
    with pytest.raises(UsageError, match="must be at least 1; got 0 and 1"):
        plan_training(data, workers=0)


def test_the_command_tells_people_and_machines(store: Path) -> None:
    told = CliRunner().invoke(cli, ["plan", str(store), "--workers", "2", "--block-bytes", "1 MiB"])
    assert told.exit_code == 0, told.output
    assert "row blocks   6 of up to 1,000 rows" in told.output
    assert "2 x 1 threads, with a memory limit of at least" in told.output
    found = json.loads(CliRunner().invoke(cli, ["plan", str(store), "--json"]).output)
    assert found["row_blocks"] == len(open_dataset(store).blocks)
    assert found["workers"] == found["threads"] == 1
