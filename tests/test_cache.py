"""What a process keeps of the row blocks: never more than its limit, and never anything but time is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import dswml.cache
from dswml.cache import (
    FEATURES_SHARE,
    FREE_SHARE,
    WORKER_SHARE,
    BlockCache,
    ReadAhead,
    forget_run,
    process_cache,
    read_ahead,
    task_nbytes,
)
from dswml.dataset import Dataset, open_dataset
from dswml.errors import DataError
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options
from dswml.result_sizes import result_nbytes
from dswml.synth import synthesize
from dswml.training import Parameters, train

LIMIT = 1000

operations = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 5),
        st.sampled_from(["x", "y", "z"]),
        st.integers(0, 1200),
        st.booleans(),
    ),
    max_size=60,
)


@given(operations)
@settings(deadline=None)
def test_never_more_than_the_limit_is_kept_and_what_is_kept_is_right(
    steps: list[tuple[str, int, str, int, bool]],
) -> None:
    cache = BlockCache(LIMIT)
    put: dict[tuple[str, int, str], int] = {}
    for run, block, kind, nbytes, forget in steps:
        if forget:
            cache.forget(run)
            assert cache.get(run, block, kind) is None
        before = cache.get(run, block, kind)
        if cache.put(run, block, kind, (run, block, kind, nbytes), nbytes):
            put[run, block, kind] = nbytes
            assert cache.get(run, block, kind) == (run, block, kind, nbytes)
        else:
            assert cache.get(run, block, kind) == before, "what was there is still there"
        kept = {key: cache.get(*key) for key in put}
        sizes = {key: value[3] for key, value in kept.items() if value is not None}
        assert all(value is None or value[:3] == key for key, value in kept.items())
        assert cache.used == sum(sizes.values()) <= LIMIT
        if kind == "x" and put.get((run, block, kind)) == nbytes:
            own = sum(size for key, size in sizes.items() if key[0] == run and key[2] == "x")
            assert own <= LIMIT * FEATURES_SHARE


def test_the_limit_holds_for_many_threads_at_once() -> None:
    cache = BlockCache(LIMIT)
    most = [0]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(500):
            cache.put(
                f"run {rng.integers(3)}",
                int(rng.integers(9)),
                "xyz"[rng.integers(3)],
                1,
                int(rng.integers(400)),
            )
            most[0] = max(most[0], cache.used)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < most[0] <= LIMIT


def test_a_run_takes_room_from_older_runs_but_not_for_what_it_could_not_keep_anyway() -> None:
    cache = BlockCache(LIMIT)
    assert cache.put("old", 0, "y", "y", 300)
    assert cache.put("older", 0, "y", "y", 300)
    assert cache.get("old", 0, "y") == "y"
    assert cache.put("old", 1, "y", "y", 300), "the one used last"
    assert not cache.put("new", 0, "y", "y", LIMIT + 1)
    assert cache.get("older", 0, "y") == "y"
    assert cache.put("new", 0, "y", "y", 200)
    assert cache.get("older", 0, "y") is None
    assert cache.get("old", 0, "y") == "y"
    assert not cache.put("new", 1, "x", "x", 500), "X leaves room for the rest"
    assert cache.put("new", 1, "z", "z", 800)
    assert cache.get("old", 0, "y") is None


def test_the_value_before_stays_if_a_larger_one_finds_no_room() -> None:
    cache = BlockCache(LIMIT)
    assert cache.put("run", 0, "z", "short", 600)
    assert not cache.put("run", 0, "z", "long", 1200)
    assert cache.get("run", 0, "z") == "short"
    assert cache.put("run", 0, "z", "longer", 900)
    assert cache.used == 900


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    store = tmp_path_factory.mktemp("cache") / "a.zarr"
    synthesize(store, rows=2000, features=40, labels=30, sparsity=4, chunk_rows=100)
    return open_dataset(store, block_bytes=100 * 200)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], BlockCache]:
    """Give this process a cache of some size."""

    def limit(nbytes: int) -> BlockCache:
        cache = BlockCache(nbytes)
        monkeypatch.setattr(dswml.cache, "_cache", cache)
        return cache

    return limit


def fitted(data: Dataset, step: str, cache: str, spy: Callable[[Any], None] = lambda record: None) -> Any:
    options = Options(
        step=step, tol=0.0, max_iter=4, seed=3, assemble=False if step == "corrective" else None
    )
    with InProcessExecutor(2) as executor:
        _, solution = train(
            data, Parameters(radius=20.0, cache=cache, options=options), executor, callbacks=[spy]
        )
    return solution


@pytest.mark.parametrize("step", ["corrective", "line-search", "open-loop"])
def test_what_finds_no_room_is_rebuilt_with_the_same_bits(
    data: Dataset, limited: Callable[[int], BlockCache], step: str
) -> None:
    assert len(data.blocks) > 8
    bits, used = set(), []
    square = step == "corrective"
    results = task_nbytes(0, result_nbytes(data.n_features, data.n_labels, square=square))
    for nbytes, kind in ((10**9, "none"), (0, "auto"), (20_000, "auto"), (150_000, "auto"), (10**9, "auto")):
        cache = limited(nbytes + results)
        most = [0]

        def spy(record: Any, cache: BlockCache = cache, most: list[int] = most) -> None:
            most[0] = max(most[0], cache.used)

        solution = fitted(data, step, kind, spy)
        bits.add((solution.u.tobytes(), solution.m.tobytes(), tuple(r.objective for r in solution.history)))
        used.append(most[0])
        assert most[0] <= nbytes
        assert cache.used == 0, "nothing is kept after the fit"
    assert len(bits) == 1
    assert used[:2] == [0, 0]
    assert 0 < used[2] < used[3] < used[4]


def test_all_of_x_in_memory_is_read_once_or_refused(
    data: Dataset, limited: Callable[[int], BlockCache]
) -> None:
    limited(10**9)
    solution = fitted(data, "corrective", "memory")
    assert solution.passes > 2
    limited(100_000)
    with pytest.raises(
        DataError, match=r"cache='memory' keeps all of X in memory, but the cache of 0 MiB is full"
    ):
        fitted(data, "corrective", "memory")


def cache_limit(_: int = 0) -> int:
    return process_cache().limit


def cache_limit_of_a_thread(_: int) -> int:
    """As for a fit inside a task, whose executor has threads of its own."""
    with InProcessExecutor(2) as executor:
        limits = executor.map(lambda item, payload: cache_limit(), range(4))
    return limits[0]


def test_the_cache_of_a_worker_follows_its_memory_limit_also_on_other_threads() -> None:
    limit = 900 * 2**20
    cluster = LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        memory_limit=limit,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    )
    with cluster, Client(cluster, set_as_default=False) as client:
        first = client.submit(cache_limit_of_a_thread, 0).result()
        assert 0 < first < limit * WORKER_SHARE
        assert client.submit(cache_limit, 1).result() == first
        assert client.run(forget_run, "no run") == dict.fromkeys(client.nthreads())


def test_the_cache_of_this_process_follows_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dswml.cache, "_cache", None)
    forget_run("before there is a cache")
    assert process_cache() is process_cache()
    assert 0 < process_cache().limit <= psutil.virtual_memory().total * FREE_SHARE


def test_a_thread_has_one_value_read_ahead_at_most_and_any_thread_may_take_it() -> None:
    ahead = ReadAhead()
    taken: list[str] = []
    ahead.start(("run", 1), lambda: "dropped")
    ahead.start(("run", 2), lambda: "read ahead")
    other = threading.Thread(target=lambda: taken.append(ahead.take(("run", 2), lambda: "read late")))
    other.start()
    other.join()
    assert taken == ["read ahead"]
    assert ahead.take(("run", 1), lambda: "read late") == "read late"
    assert ahead.take(("run", 2), lambda: "read late") == "read late"


def test_an_error_of_reading_ahead_comes_when_the_value_is_asked_for_and_only_once() -> None:
    ahead = ReadAhead()

    def damaged() -> str:
        raise DataError("chunk 1 is damaged")

    ahead.start(("run", 1), damaged)
    with pytest.raises(DataError, match="chunk 1 is damaged"):
        ahead.take(("run", 1), lambda: "read late")
    assert ahead.take(("run", 1), lambda: "read late") == "read late"


def test_what_was_read_ahead_for_a_run_is_forgotten_with_it() -> None:
    read_ahead().start(("a", 1), lambda: "read ahead")
    forget_run("b")
    assert read_ahead().take(("a", 1), lambda: "read late") == "read ahead"
    read_ahead().start(("a", 1), lambda: "read ahead")
    forget_run("a")
    assert read_ahead().take(("a", 1), lambda: "read late") == "read late"


@pytest.mark.parametrize("threads", [1, 2])
def test_every_block_is_read_once_a_pass_ahead_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    store = tmp_path / "data.zarr"
    with InProcessExecutor(threads) as executor:
        synthesize(store, rows=400, features=8, labels=12, sparsity=2, chunk_rows=40, executor=executor)
        data = open_dataset(store, block_bytes=1)
        reads: list[tuple[int, bool]] = []
        read_x = type(data).read_x

        def noted(self: Dataset, start: int, stop: int) -> Any:
            reads.append((start, threading.current_thread().name == "dswml-read-ahead"))
            return read_x(self, start, stop)

        monkeypatch.setattr(type(data), "read_x", noted)
        parameters = Parameters(radius=5.0, cache="none", options=Options(max_iter=2, tol=0.0))
        _, solution = train(data, parameters, executor)
    starts = [start for start, _ in reads]
    assert sorted(set(starts)) == [block.start for block in data.blocks]
    needed = solution.passes * len(data.blocks)
    assert needed <= len(reads) <= (needed if threads == 1 else 1.2 * needed)
    late = sum(not ahead for _, ahead in reads)
    assert solution.passes <= late <= needed // 2
