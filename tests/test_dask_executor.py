"""The Dask executor: the bits of the in-process one, a flat scheduler, and survival of what dies."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
import zarr
from distributed import Client, LocalCluster, SchedulerPlugin, get_worker, wait, worker_client

from dswml.blocks import RowBlock
from dswml.broadcast import BUNDLE, Broadcast
from dswml.cache import check_room, process_cache
from dswml.current import current_executor
from dswml.dask_executor import DaskExecutor
from dswml.dask_graph import following_leaves
from dswml.dataset import Dataset, open_dataset
from dswml.errors import ClusterError, DataError, UsageError
from dswml.executor import ARITY, Executor, InProcessExecutor, Shared, following_item
from dswml.frank_wolfe import Options, Solution
from dswml.sources import as_dataset
from dswml.stored import StoredDataset
from dswml.synth import synthesize
from dswml.training import Parameters, train

LOOPBACK = "127.0.0.1"
#: A cluster that loses work says so before it tries again.
again = pytest.mark.filterwarnings("ignore:the cluster lost work:UserWarning")


def start(workers: int, **options: Any) -> LocalCluster:
    """Start worker processes; a worker that is killed comes back, however often."""
    settings = {
        "threads_per_worker": 1,
        "processes": True,
        "host": LOOPBACK,
        "memory_limit": "3 GB",
        **options,
    }
    return LocalCluster(n_workers=workers, dashboard_address=f"{LOOPBACK}:0", **settings)


@contextmanager
def running(cluster: LocalCluster, worker_timeout: float = 60) -> Iterator[DaskExecutor]:
    """An executor on a cluster that ends with it."""
    with cluster, Client(cluster, set_as_default=False) as client:
        executor = DaskExecutor(client, worker_timeout)
        yield executor
        executor.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1 h"}), start(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def executor(client: Client) -> Iterator[DaskExecutor]:
    client.wait_for_workers(2, timeout=60)
    executor = DaskExecutor(client, worker_timeout=60)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def threads_client() -> Iterator[Client]:
    """A scheduler and a worker of two threads in this process."""
    cluster = start(1, processes=False, threads_per_worker=2, host=None)
    with cluster, Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    synthesize(folder / "dense", rows=2000, features=25, labels=30, sparsity=4, chunk_rows=100)
    synthesize(
        folder / "csr",
        rows=2000,
        features=60,
        labels=40,
        sparsity=2,
        kind="extreme",
        features_per_row=8,
        chunk_rows=100,
    )
    return {"dense": folder / "dense", "csr": folder / "csr"}


@pytest.fixture(scope="module")
def data(stores: dict[str, Path]) -> dict[str, Dataset]:
    """The stores in a score of row blocks: a tree of two levels."""
    opened = {
        "dense": open_dataset(stores["dense"], block_bytes=15_000),
        "csr": open_dataset(stores["csr"], block_bytes=9_000),
    }
    assert all(len(each.blocks) >= 2 * ARITY for each in opened.values())
    return opened


def fit(
    data: Dataset, executor: Executor, step: str = "corrective", assemble: bool | None = None, **more: Any
) -> Solution:
    options = Options(step=step, tol=0.0, max_iter=3, seed=1, assemble=assemble)
    return train(data, Parameters(radius=20.0, weights=0.2, options=options), executor, **more)[1]


def bits(solution: Solution) -> tuple[Any, ...]:
    objectives = tuple((record.objective, record.gap, record.passes) for record in solution.history)
    return solution.u.tobytes(), solution.m.tobytes(), objectives


def here(data: Dataset, *arguments: Any) -> tuple[Any, ...]:
    with InProcessExecutor(1) as executor:
        return bits(fit(data, executor, *arguments))


def add(numbers: list[int]) -> int:
    return sum(numbers)


def add_arrays(arrays: list[Any]) -> Any:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def noise(item: int, scale: float, *more: float) -> Any:
    rng = np.random.default_rng(item)
    time.sleep(rng.random() / 100)
    return rng.standard_normal(50) * scale + sum(more)


def number(item: int, payload: int) -> int:
    return item + payload


def slow_number(item: int, payload: float) -> int:
    time.sleep(payload)
    return item


# The same bits

MODES = [
    ("dense", "corrective", None),
    ("dense", "corrective", False),
    ("dense", "line-search", None),
    ("dense", "open-loop", None),
    ("csr", "corrective", False),
    ("csr", "line-search", None),
    ("csr", "open-loop", None),
]


def test_sums_have_the_bits_of_the_in_process_ones(executor: DaskExecutor) -> None:
    shared = [Shared("a", 0.1), Shared("b", 0.2)]
    with InProcessExecutor(1) as alone:
        expected = alone.reduce(noise, add_arrays, range(30), 1.5, shared)
    done: list[int] = []
    here = threading.get_ident()

    def on_result(number: int) -> None:
        assert threading.get_ident() == here
        done.append(number)

    for _ in range(2):
        done.clear()
        result = executor.reduce(noise, add_arrays, range(30), 1.5, shared, on_result=on_result)
        assert result.tobytes() == expected.tobytes()
        assert done == sorted(done)
        assert 0 <= done[-1] <= 30
    assert executor.reduce(number, add, [7], 1, on_result=done.append) == 8


def test_results_come_in_the_order_of_the_items(executor: DaskExecutor) -> None:
    told: dict[int, int] = {}
    assert executor.map(number, range(20), 5, on_result=told.__setitem__) == list(range(5, 25))
    assert told == dict(enumerate(range(5, 25)))
    assert executor.map(number, [], 5) == []


@pytest.mark.parametrize(("kind", "step", "assemble"), MODES)
def test_a_fit_has_the_same_bits_in_process_and_on_any_workers(
    data: dict[str, Dataset],
    executor: DaskExecutor,
    threads_client: Client,
    kind: str,
    step: str,
    assemble: bool | None,
) -> None:
    expected = here(data[kind], step, assemble)
    for threads in (2, 4):
        with InProcessExecutor(threads) as alone:
            assert bits(fit(data[kind], alone, step, assemble)) == expected
    with DaskExecutor(threads_client) as threaded:
        assert bits(fit(data[kind], threaded, step, assemble)) == expected
    assert bits(fit(data[kind], executor, step, assemble)) == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_a_fit_has_the_same_bits_for_any_number_of_worker_processes(
    data: dict[str, Dataset], workers: int
) -> None:
    with running(start(workers)) as executor:
        assert executor.n_slots == workers
        for kind, step, assemble in (MODES[1], MODES[3], MODES[4]):
            assert bits(fit(data[kind], executor, step, assemble)) == here(data[kind], step, assemble)


def test_nothing_is_kept_on_the_workers_after_a_fit(data: dict[str, Dataset], executor: DaskExecutor) -> None:
    used: list[int] = []

    def look(record: Any) -> None:
        used.extend(executor.client.run(lambda: process_cache().used).values())

    fit(data["dense"], executor, callbacks=[look])
    assert max(used) > 0
    assert set(executor.client.run(lambda: process_cache().used).values()) == {0}


# Few and small tasks, and a scheduler that does not grow


class Seen(SchedulerPlugin):  # type: ignore[misc]
    """Every task that the scheduler was given, the size of its description, and what was computed."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.graphs = 0
        self.computed: Counter[str] = Counter()

    def update_graph(self, scheduler: Any, *, tasks: Sequence[Any], **kwargs: Any) -> None:
        self.graphs += 1
        for key in tasks:
            task = scheduler.tasks[key].run_spec
            if task is not None:
                self.sizes[str(key)] = len(pickle.dumps(task))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if (start, finish) == ("processing", "memory"):
            self.computed[str(key)] += 1


@pytest.fixture
def seen(cluster: LocalCluster) -> Iterator[Seen]:
    plugin = Seen()
    cluster.scheduler.add_plugin(plugin, name="seen")
    yield plugin
    cluster.scheduler.remove_plugin("seen")


def length(item: int, payload: Any, *shared: Any) -> int:
    return len(payload) + sum(map(len, shared))


def test_a_call_is_one_message_of_small_tasks_a_block_and_a_node_each(
    executor: DaskExecutor, seen: Seen
) -> None:
    executor.reduce(length, add, range(3), b"")  # the first call also makes the anchors
    seen.graphs = 0
    seen.sizes.clear()
    seen.computed.clear()
    megabyte = bytes(10**6)
    blocks = 3 * ARITY + 1
    shared = [Shared("a", megabyte), Shared("b", megabyte)]
    assert executor.reduce(length, add, range(blocks), megabyte, shared) == blocks * 3 * 10**6
    nodes = 3 + 1  # groups of ARITY, one left over, and the root
    assert seen.graphs == 1
    assert len(seen.sizes) == blocks + nodes
    assert seen.computed == dict.fromkeys(seen.sizes, 1)
    assert max(seen.sizes.values()) < 1000


def test_shared_values_are_sent_once_a_key(client: Client, cluster: LocalCluster) -> None:
    broadcast = Broadcast(client, client.nthreads)
    shared = [Shared("a", 1), Shared("b", 2)]
    first = broadcast.send_once(shared)
    assert [future.result() for future in first] == [[1], [2]]
    assert broadcast.send_once(shared) == first, "the same futures: nothing was sent"
    assert broadcast.send_once(shared[:1]) == first[:1]
    holders = client.who_has(first)
    assert all(len(workers) == 2 for workers in holders.values()), "every worker has a copy"
    broadcast.forget(["a"])
    again = broadcast.send_once(shared)
    assert again[0] is not first[0]
    assert again[1] is first[1]
    broadcast.close()


def test_values_that_come_one_by_one_are_a_few_bundles(threads_client: Client) -> None:
    broadcast = Broadcast(threads_client, threads_client.nthreads)
    shared: list[Shared] = []
    sent: set[str] = set()
    for number in range(BUNDLE**2 // 2 + 3):
        shared.append(Shared(str(number), number))
        futures = broadcast.send_once(shared)
        sent.update(future.key for future in futures)
        assert len(futures) < 2 * BUNDLE
    values = [value for future in futures for value in future.result()]
    assert values == list(range(len(shared)))
    assert len(sent) <= len(shared) + len(shared) // BUNDLE, "each was sent at most twice"
    assert [value for future in broadcast.send_once(shared[5:]) for value in future.result()] == values[5:]
    broadcast.close()


def test_the_scheduler_does_not_grow_with_the_iterations(tmp_path: Path) -> None:
    synthesize(tmp_path / "a.zarr", rows=300, features=250, labels=12, sparsity=2, chunk_rows=100)
    data = open_dataset(tmp_path / "a.zarr", block_bytes=110_000)
    assert len(data.blocks) == 3
    seen: dict[int, dict[str, int]] = {}

    def look(record: Any) -> None:
        if record.iteration in (50, 125, 200):
            gc.collect()
            alive = Counter(type(each).__name__ for each in gc.get_objects())
            seen[record.iteration] = {
                "tasks": len(scheduler.tasks),
                "groups": len(scheduler.task_groups),
                "prefixes": len(scheduler.task_prefixes),
                "spans": len(scheduler.extensions["spans"].spans),
                "TaskGroup objects": alive["TaskGroup"],
                "memory blocks": sys.getallocatedblocks(),
            }

    options = Options(step="open-loop", tol=0.0, max_iter=200, seed=1)
    # Logs of a fixed length are full at once, so that they do not count as growth.
    with (
        dask.config.set({"distributed.admin.low-level-log-length": 50}),
        running(start(1, processes=False, threads_per_worker=2, host=None)) as executor,
    ):
        scheduler = executor.client.cluster.scheduler
        solution = train(data, Parameters(radius=20.0, options=options), executor, callbacks=[look])[1]
    assert solution.iterations == 200
    first, middle, last = seen.values()
    assert last["tasks"] <= 2 * BUNDLE + 20
    for name in ("groups", "prefixes", "spans", "TaskGroup objects"):
        assert first[name] == last[name], name
    assert last["groups"] <= 8
    blocks = [each["memory blocks"] for each in (first, middle, last)]
    # What grows with the iterations grows in both halves; a table that is enlarged once does not.
    assert min(np.diff(blocks)) < 75 * 100, "little but the names of tasks, which Dask keeps for a while"


# Errors


def fail_at_times(item: int, payload: float) -> int:
    if item % 10 == 3:
        raise DataError(f"item {item} is bad: mend it")
    time.sleep(payload)
    return item


def test_an_error_in_a_task_comes_through_as_itself_and_ends_the_work(
    executor: DaskExecutor, seen: Seen, cluster: LocalCluster
) -> None:
    for call in (
        lambda: executor.reduce(fail_at_times, add, range(200), 0.01),
        lambda: executor.map(fail_at_times, range(200), 0.01),
        lambda: executor.reduce(fail_at_times, add, range(200), 0.01, on_result=lambda done: None),
    ):
        seen.computed.clear()
        with pytest.raises(DataError, match=r"^item \d*3 is bad: mend it$"):
            call()
        time.sleep(0.3)
        assert sum(seen.computed.values()) < 150, "what had not begun was dropped"
        waiting = [
            task for task in cluster.scheduler.tasks.values() if task.state in ("processing", "waiting")
        ]
        assert waiting == []
    assert executor.map(number, [1], 1) == [2]


def test_damaged_data_are_told_with_their_place(
    data: dict[str, Dataset], executor: DaskExecutor, tmp_path: Path
) -> None:
    store = tmp_path / "damaged.zarr"
    synthesize(store, rows=500, features=25, labels=30, sparsity=4, chunk_rows=100)
    (chunk,) = (store / "X" / "c" / "3").glob("*")
    content = bytearray(chunk.read_bytes())
    content[17] ^= 1
    chunk.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"chunk 3 of array X in .*damaged.zarr is damaged"):
        fit(open_dataset(store, block_bytes=15_000), executor)


# Death


def pids(cluster: LocalCluster) -> list[int]:
    return [state.pid for state in list(cluster.scheduler.workers.values())]


class Fatal(StoredDataset):
    """A data set that kills the worker that reads a certain row for the first time."""

    def __init__(self, url: str, block_bytes: int, row: int, note: str) -> None:
        super().__init__(url, block_bytes)
        self.row, self.note = row, note

    def __reduce__(self) -> tuple[Any, ...]:
        return Fatal, (self.url, self.block_bytes, self.row, self.note)

    def read_x(self, start: int, stop: int) -> Any:
        if start <= self.row < stop and not os.path.exists(self.note):
            Path(self.note).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read_x(start, stop)


@again
@pytest.mark.parametrize(("kind", "step"), [("dense", "corrective"), ("csr", "open-loop")])
def test_a_worker_killed_in_the_middle_of_a_task_changes_no_bit(
    data: dict[str, Dataset],
    executor: DaskExecutor,
    cluster: LocalCluster,
    tmp_path: Path,
    kind: str,
    step: str,
) -> None:
    before = set(pids(cluster))
    healthy = data[kind]
    assert isinstance(healthy, StoredDataset)
    fatal = Fatal(healthy.url, healthy.block_bytes, 1030, str(tmp_path / "killed"))
    solution = fit(fatal, executor, step, False)
    assert (tmp_path / "killed").exists()
    assert len(before - set(pids(cluster))) == 1
    assert bits(solution) == here(healthy, step, False)


@again
def test_all_workers_killed_at_once_in_the_middle_of_a_pass_change_no_bit(
    data: dict[str, Dataset], executor: DaskExecutor, cluster: LocalCluster
) -> None:
    killed: list[int] = []

    def on_sweep(share: float) -> None:
        if not killed and 0 < share < 1:
            killed.extend(pids(cluster))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    slow = Slow.of(data["dense"])
    assert bits(fit(slow, executor, on_sweep=on_sweep)) == here(data["dense"])
    assert len(killed) == 2
    assert not set(killed) & set(pids(cluster))


class Slow(StoredDataset):
    """A data set whose rows take their time."""

    @classmethod
    def of(cls, data: Dataset) -> Slow:
        assert isinstance(data, StoredDataset)
        return cls(data.url, data.block_bytes)

    def read_x(self, start: int, stop: int) -> Any:
        time.sleep(0.05)
        return super().read_x(start, stop)


def die(item: int, payload: Any) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_task_that_always_dies_ends_in_one_sentence(executor: DaskExecutor) -> None:
    begin = time.monotonic()
    with pytest.warns(UserWarning, match="the cluster lost work"), pytest.raises(ClusterError) as told:
        executor.reduce(die, add, range(6))
    assert "lost the same work 3 times" in str(told.value)
    assert "--block-bytes" in str(told.value)
    assert "\n" not in str(told.value)
    assert time.monotonic() - begin < 120
    executor.client.wait_for_workers(2, timeout=60)
    assert executor.map(number, range(4), 1) == [1, 2, 3, 4], "the cluster is as good as before"


class DeadlyToFetch:
    """A result that takes its worker with it when it is asked for."""

    def __reduce__(self) -> tuple[Any, ...]:
        os._exit(1)


def deadly(item: int, payload: Any) -> DeadlyToFetch:
    return DeadlyToFetch()


def first(results: list[Any]) -> Any:
    return results[0]


@again
def test_a_worker_that_is_lost_while_a_value_is_sent_to_it_holds_nobody_up() -> None:
    """It is stopped first, so that the scheduler waits for it."""
    with running(start(2)) as executor:
        assert executor.map(number, range(4), 1) == [1, 2, 3, 4]
        pid = pids(executor.client.cluster)[0]
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(1, os.kill, (pid, signal.SIGKILL))
        timer.start()
        begin = time.monotonic()
        for _ in range(2):
            assert executor.map(number, range(4), 1) == [1, 2, 3, 4]
        assert time.monotonic() - begin < 25, "the scheduler tries for 30 s to connect to the worker"
        timer.join()


def test_a_cluster_without_workers_is_told_after_the_time_given() -> None:
    with running(start(0), worker_timeout=0.5) as executor:
        assert executor.n_slots == 1
        with pytest.raises(ClusterError, match=r"has had no worker for 0 s: start workers with 'dask worker"):
            executor.map(number, [1], 1)


def test_a_cluster_whose_workers_are_all_paused_is_told_after_the_time_given() -> None:
    limit = int(psutil.Process().memory_info().rss / 0.87)  # beyond the 80 % at which workers pause
    with running(start(1, processes=False, host=None, memory_limit=limit), worker_timeout=1) as executor:
        deadline = time.monotonic() + 30
        while executor._workers() and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(ClusterError, match=r"all 1 workers .* have taken no task for 1 s, as workers do"):
            executor.reduce(number, add, [1], 1)


@pytest.fixture
def far_cluster(tmp_path: Path) -> Iterator[tuple[str, psutil.Popen]]:
    """A scheduler and a worker in processes of their own: the scheduler's file and the scheduler."""
    file = tmp_path / "scheduler.json"
    dask_command = Path(sys.executable).parent / "dask"
    local = ["--host", LOOPBACK, "--dashboard-address", f"{LOOPBACK}:0", "--scheduler-file", str(file)]
    processes = [
        psutil.Popen(
            [dask_command, *arguments, *local],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for arguments in (["scheduler", "--port", "0"], ["worker", "--nthreads", "1", "--no-nanny"])
    ]
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().endswith("}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield str(file), processes[0]
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@again
@pytest.mark.slow
def test_a_result_that_is_lost_with_the_last_worker_is_not_waited_for_in_vain(
    far_cluster: tuple[str, psutil.Popen],
) -> None:
    with (
        Client(scheduler_file=far_cluster[0], set_as_default=False, timeout=60) as client,
        DaskExecutor(client, worker_timeout=1) as executor,
    ):
        client.wait_for_workers(1, timeout=60)
        begin = time.monotonic()
        with pytest.raises(ClusterError, match="has had no worker for 1 s"):
            executor.reduce(deadly, first, [1])
        assert time.monotonic() - begin < 60


def test_a_scheduler_that_dies_in_the_middle_of_a_call_is_told_within_seconds(
    far_cluster: tuple[str, psutil.Popen],
) -> None:
    file, scheduler = far_cluster
    with (
        Client(scheduler_file=file, set_as_default=False, timeout=60) as client,
        DaskExecutor(client) as executor,
    ):
        assert executor.reduce(slow_number, add, range(3), 0.0) == 3
        killed: list[float] = []

        def kill() -> None:
            scheduler.kill()
            killed.append(time.monotonic())

        timer = threading.Timer(1.0, kill)
        timer.start()
        with pytest.raises(ClusterError, match="cannot be reached any more: check it, and start again"):
            executor.reduce(slow_number, add, range(100), 0.5)
        assert time.monotonic() - killed[0] < 20
        executor.everywhere(print)  # nobody is left to be told
        with pytest.raises(ClusterError, match="cannot be reached any more"):
            executor.map(number, [1], 1)


def test_a_scheduler_that_only_stops_answering_is_told_too(
    far_cluster: tuple[str, psutil.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, scheduler = far_cluster
    with (
        Client(scheduler_file=file, set_as_default=False, timeout=60) as client,
        DaskExecutor(client) as executor,
    ):
        assert executor.reduce(slow_number, add, range(3), 0.0) == 3
        monkeypatch.setattr("dswml.dask_executor.ANSWER_SECONDS", 3.0)
        timer = threading.Timer(1.0, scheduler.suspend)
        timer.start()
        try:
            with pytest.raises(ClusterError, match="cannot be reached any more"):
                executor.reduce(slow_number, add, range(100), 0.5)
        finally:
            scheduler.resume()


# Whose cluster, and what kinds of data


def fitted_where(*data: Any) -> tuple[str, tuple[Any, ...]]:
    """Fit where `current_executor` says; return which executor that was, and the bits."""
    dataset = as_dataset(*data)
    with warnings.catch_warnings(), current_executor(dataset) as executor:
        warnings.simplefilter("ignore")
        return type(executor).__name__, bits(fit(dataset, executor))


def fitted_within_worker_client(*data: Any) -> tuple[str, tuple[Any, ...]]:
    get_worker()
    with worker_client():
        return fitted_where(*data)


def test_a_fit_inside_a_task_works_on_its_own_or_through_worker_client(
    data: dict[str, Dataset], executor: DaskExecutor
) -> None:
    client = executor.client
    expected = here(data["dense"])
    assert client.submit(fitted_where, data["dense"]).result(timeout=120) == ("InProcessExecutor", expected)
    within = client.submit(fitted_within_worker_client, data["dense"]).result(timeout=120)
    assert within == ("DaskExecutor", expected)


def test_a_fit_inside_a_task_does_not_block_the_only_thread_of_a_cluster(data: dict[str, Dataset]) -> None:
    expected = here(data["dense"])
    with start(1) as cluster, Client(cluster, set_as_default=False) as client:
        futures = [client.submit(fitted_within_worker_client, data["dense"], pure=False) for _ in range(3)]
        assert [future.result(timeout=200) for future in futures] == [("DaskExecutor", expected)] * 3


@pytest.fixture(scope="module")
def arrays(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """The dense store as NumPy, Zarr and dask arrays, with the same row chunks."""
    data = open_dataset(stores["dense"])
    x, y = data.read_x(0, data.n_rows), data.read_y(0, data.n_rows).toarray()
    labels = zarr.create_array(
        str(tmp_path_factory.mktemp("arrays") / "y.zarr"),
        shape=y.shape,
        chunks=(100, y.shape[1]),
        dtype=y.dtype,
    )
    labels[:] = y
    features = zarr.open_array(str(stores["dense"] / "X"), mode="r")
    return {
        "numpy": (x, y),
        "zarr": (features, labels),
        "dask": (da.from_array(x, chunks=(100, -1)), da.from_array(y, chunks=(100, -1))),
        "dask of zarr": (da.from_zarr(features), da.from_zarr(labels)),
    }


@pytest.mark.parametrize(
    "kind", ["numpy", "zarr", "dask", "dask of zarr", "dask persisted", "dask on persisted"]
)
def test_a_users_client_works_on_data_of_every_kind(
    executor: DaskExecutor, arrays: dict[str, tuple[Any, Any]], kind: str
) -> None:
    client = executor.client
    x, y = arrays[kind if kind in arrays else "dask"]
    alone = fitted_where(x, y)
    assert alone[0] == "InProcessExecutor", "without a client"
    if "persisted" in kind:
        x, y = client.persist([x, y])
    if kind == "dask on persisted":
        x = (x * 2) / 2
    with client.as_current():
        where, found = fitted_where(x, y)
    assert where == ("InProcessExecutor" if kind == "numpy" else "DaskExecutor")
    assert found == alone[1]


def test_persisted_arrays_do_not_block_a_cluster_of_one_thread_and_outlive_its_worker(
    arrays: dict[str, tuple[Any, Any]],
) -> None:
    expected = fitted_where(*arrays["dask"])[1]
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 h"}),
        start(1) as cluster,
        Client(cluster) as client,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "the cluster lost work")
        x, y = client.persist(list(arrays["dask"]))
        assert fitted_where(x, y) == ("DaskExecutor", expected), "also while it is being computed"
        within = client.submit(fitted_within_worker_client, x, y).result(timeout=120)
        assert within == ("DaskExecutor", expected)
        with pytest.raises(
            UsageError, match=r"a cluster holds the result .* within distributed.worker_client"
        ):
            client.submit(fitted_where, x, y).result(timeout=120)
        wait([x, y])
        for pid in pids(cluster):
            os.kill(pid, signal.SIGKILL)
        assert fitted_where(x, y) == ("DaskExecutor", expected), "chunks that are lost are computed again"


def test_rows_of_persisted_arrays_are_read_by_their_own_client_alone(
    executor: DaskExecutor, arrays: dict[str, tuple[Any, Any]]
) -> None:
    x, y = arrays["dask"]
    held = as_dataset(executor.client.persist(x), y)
    assert held.travels
    np.testing.assert_array_equal(held.read_x(150, 420), arrays["numpy"][0][150:420])
    copy = pickle.loads(pickle.dumps(held))  # noqa: S301
    with pytest.raises(UsageError, match="a cluster holds the result"):
        copy.read_x(150, 420)
    assert copy.needs(RowBlock(0, 150, 420)) == held.needs(RowBlock(0, 150, 420))  # type: ignore[attr-defined]


def test_dask_arrays_of_much_memory_are_worked_on_where_they_are() -> None:
    large = da.from_array(np.zeros((3000, 1000), np.float32), chunks=(100, -1))
    lazy = da.zeros((3000, 1000), chunks=(100, -1))
    labels = da.zeros((3000, 3), chunks=(100, -1), dtype=np.uint8)
    assert not as_dataset(large, labels).travels
    assert as_dataset(lazy, labels).travels


def test_a_task_knows_what_comes_next_on_its_worker_unless_another_has_taken_it_over() -> None:
    workers = {"a": 1, "b": 2}
    homes = ("a", "a", "b", "b", "b", "b", "a")
    assert following_leaves(homes, workers) == [("a", 1), ("a", 6), ("b", 4), ("b", 5), None, None, None]


def test_the_next_item_is_known_on_the_workers(executor: DaskExecutor) -> None:
    def look(item: int, payload: None) -> tuple[str, Any]:
        time.sleep(0.01)
        return get_worker().address, following_item()

    seen = executor.map(look, range(20))
    for index, (home, following) in enumerate(seen):
        assert following is None or following > index
        if following is not None:
            assert executor._homes[20][following] == home
    assert sum(following is not None for _, following in seen) >= 10


def test_memory_and_slots_are_those_of_the_workers(executor: DaskExecutor) -> None:
    assert executor.memory_per_slot() == 2_400_000_000 - 200 * 2**20
    assert executor.n_slots == 2


def test_row_blocks_too_large_for_the_workers_are_refused_with_a_size_that_fits(
    executor: DaskExecutor,
) -> None:
    check_room(500 * 2**20, executor)
    with pytest.raises(UsageError, match=r"blocks of 800 MiB .* has 2089 MiB.*'522 MiB'") as told:
        check_room(800 * 2**20, executor)
    with pytest.raises(UsageError, match=r"results of 100 MiB take 2900 MiB .* has 2089 MiB") as other:
        check_room(500 * 2**20, executor, 100 * 2**20)
    assert "'297 MiB'" in str(other.value)
    assert "\n" not in str(told.value)


def test_a_call_everywhere_reaches_every_worker(executor: DaskExecutor, tmp_path: Path) -> None:
    def leave_a_note(folder: str) -> None:
        Path(folder, str(os.getpid())).touch()

    executor.everywhere(leave_a_note, str(tmp_path))
    left = {int(note.name) for note in tmp_path.iterdir()}
    assert left == set(executor.client.run(os.getpid).values())
