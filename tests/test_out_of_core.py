"""Data many times the memory of the workers: a fit reads them, stays below the limit, has the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from distributed import Client, LocalCluster, SchedulerPlugin

from dswml.dask_executor import DaskExecutor
from dswml.dataset import Dataset, DatasetWriter, open_dataset
from dswml.executor import Executor, InProcessExecutor
from dswml.frank_wolfe import Options, Solution
from dswml.synth import synthesize
from dswml.training import Parameters, train

MIB = 2**20
CHECKOUT = Path(__file__).resolve().parent.parent
FEATURES, LABELS, ACTIVE = 512, 40, 3
CHUNK_ROWS = 2 * MIB // (4 * FEATURES)
#: Chunks of X that differ; the others are further names of the same files.
DISTINCT = 16


def patterned_store(store: Path, nbytes: int) -> Dataset:
    """Make a dense data set of a given size whose chunks repeat, in a moment and on little disk."""
    chunks = -(-nbytes // (2 * MIB))
    n_rows = chunks * CHUNK_ROWS
    rng = np.random.default_rng(0)
    labels = np.sort(np.argsort(rng.random((n_rows, LABELS)), axis=1)[:, :ACTIVE], axis=1)
    writer = DatasetWriter.create(
        store,
        n_rows=n_rows,
        n_features=FEATURES,
        n_labels=LABELS,
        nnz_y=labels.size,
        x_dtype="float32",
        chunk_rows=CHUNK_ROWS,
    )
    for chunk in range(chunks):
        rows = slice(chunk * CHUNK_ROWS, (chunk + 1) * CHUNK_ROWS)
        y = sp.csr_array(
            (
                np.ones(labels[rows].size, np.uint8),
                labels[rows].ravel(),
                np.arange(0, labels[rows].size + 1, ACTIVE),
            ),
            shape=(CHUNK_ROWS, LABELS),
        )
        if chunk < DISTINCT:
            x = rng.standard_normal((CHUNK_ROWS, FEATURES), dtype=np.float32)
            writer.write_rows(rows.start, x, y, first_y=rows.start * ACTIVE)
        else:
            folder = store / "X" / "c" / str(chunk)
            folder.mkdir()
            os.link(store / "X" / "c" / str(chunk % DISTINCT) / "0", folder / "0")
            writer._write_csr_rows("Y", rows.start, rows.start * ACTIVE, y, None)
    writer.finish(k_hat=ACTIVE, label_counts=np.bincount(labels.ravel(), minlength=LABELS))
    return open_dataset(store, block_bytes=4 * MIB)


def fit(data: Dataset, executor: Executor, cache: str) -> Solution:
    options = Options(tol=0.0, max_iter=1, seed=0, memory_limit=64 * MIB)
    parameters = Parameters(radius=30.0, cache=cache, options=options)
    return train(data, parameters, executor)[1]


class Events(SchedulerPlugin):  # type: ignore[misc]
    """Workers that went and workers that were paused."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self.removed.append(worker)


def start(memory_limit: int) -> LocalCluster:
    return LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=True,
        memory_limit=memory_limit,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    )


def peak_memory(pid: int) -> int:
    """The most resident bytes that a process ever had."""
    (line,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def own_footprint(folder: Path) -> int:
    """What a worker needs for itself: its memory after a fit on next to nothing."""
    small = patterned_store(folder / "small.zarr", DISTINCT * 2 * MIB)
    with start(4 * 2**30) as cluster, Client(cluster, set_as_default=False) as client:
        with DaskExecutor(client) as executor:
            fit(small, executor, "none")
        (worker,) = cluster.scheduler.workers.values()
        return int(psutil.Process(worker.pid).memory_info().rss)


def out_of_core(folder: Path, limit: int, nbytes: int) -> None:
    """Fit more data than there is memory for, and compare with a fit that has all of them in memory."""
    data = patterned_store(folder / "data.zarr", nbytes)
    x_bytes = data.n_rows * data.n_features * data.x_dtype.itemsize
    assert x_bytes >= nbytes
    events = Events()
    with start(limit) as cluster, Client(cluster, set_as_default=False) as client:
        (worker,) = cluster.scheduler.workers.values()
        pid = worker.pid
        cluster.scheduler.add_plugin(events, name="events")
        with DaskExecutor(client) as executor:
            solution = fit(data, executor, "auto")
        assert events.removed == [], "no worker was restarted"
        (worker,) = cluster.scheduler.workers.values()
        assert (worker.pid, worker.status.name) == (pid, "running")
        assert peak_memory(pid) < limit
        cluster.scheduler.remove_plugin("events")
    assert solution.passes >= 3
    with InProcessExecutor(2) as executor:
        in_memory = fit(data, executor, "memory")
    assert solution.u.tobytes() == in_memory.u.tobytes()
    assert solution.m.tobytes() == in_memory.m.tobytes()
    assert [r.objective for r in solution.history] == [r.objective for r in in_memory.history]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
def test_data_eight_times_the_memory_that_a_worker_has_for_them(tmp_path: Path) -> None:
    own = own_footprint(tmp_path)
    limit = int(own / 0.7)  # Dask pauses a worker at 80 %
    out_of_core(tmp_path, limit, 8 * (limit - own))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
def test_data_eight_times_the_whole_memory_of_a_worker(tmp_path: Path) -> None:
    limit = int(own_footprint(tmp_path) / 0.65)
    out_of_core(tmp_path, limit, 8 * limit)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
def test_fifty_thousand_features_and_labels_within_a_gibibyte_a_worker(tmp_path: Path) -> None:
    """A features x labels array would take 20 GB; worker and driver stay below one GiB each."""
    limit = 2**30
    store = tmp_path / "wide.zarr"
    synthesize(store, kind="extreme", rows=40_000, features=50_000, labels=50_000, sparsity=5)
    data = open_dataset(store)
    events = Events()
    with start(limit) as cluster, Client(cluster, set_as_default=False) as client:
        (worker,) = cluster.scheduler.workers.values()
        cluster.scheduler.add_plugin(events, name="events")
        with DaskExecutor(client) as executor:
            options = Options(tol=1e-3, max_iter=3, seed=0)
            solution = train(data, Parameters(radius=100.0, options=options), executor)[1]
        assert events.removed == [], "no worker was restarted"
        assert peak_memory(worker.pid) < limit
        cluster.scheduler.remove_plugin("events")
    assert solution.history[-1].objective < 0.5 * solution.history[0].objective
