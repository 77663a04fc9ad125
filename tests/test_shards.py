"""Labels held by the workers: the bits of one process, whoever holds them, whatever dies; and the memory."""

from __future__ import annotations

import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from distributed import Client
from numpy.typing import NDArray
from training_cases import objective, optimum, planted

from dswml import shards, small_problem
from dswml.checkpoints import Checkpoints
from dswml.dask_executor import DaskExecutor
from dswml.errors import StoppedEarlyError, UsageError
from dswml.executor import Executor, InProcessExecutor
from dswml.frank_wolfe import Options, Solution
from dswml.problem import Problem
from dswml.sources import as_dataset
from dswml.training import Parameters, train

pytestmark = pytest.mark.usefixtures("calm_blas", "many_parts")

N, D, L = 400, 30, 300
P0 = 0.2
RADIUS = 8.0


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels fall into several parts although they are few."""
    monkeypatch.setattr(small_problem, "PART_WORK", 500)


@pytest.fixture
def dask_executor(dask_client: Client) -> Iterator[DaskExecutor]:
    dask_client.wait_for_workers(2, timeout=60)
    executor = DaskExecutor(dask_client, worker_timeout=60)
    yield executor
    executor.close()


def fit(executor: Executor, shard_labels: bool | None, **options: Any) -> Solution:
    x, y = planted(N, D, L, density=0.02)
    checkpoint, stop = options.pop("checkpoint", None), options.pop("stop", None)
    settings = {"assemble": False, "block_size": 6, "tol": 1e-5, "max_iter": 3, **options}
    parameters = Parameters(RADIUS, weights=P0, options=Options(shard_labels=shard_labels, **settings))
    return train(as_dataset(x, y), parameters, executor, checkpoint=checkpoint, stop=stop)[1]


def same_bits(a: Solution, b: Solution) -> bool:
    pairs = [(a.u, b.u), (a.m, b.m)]
    return all(one.tobytes() == other.tobytes() for one, other in pairs) and a.objective == b.objective


@pytest.mark.filterwarnings("ignore:W needs more than:UserWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"memory_limit": 400_000}, {"assemble": True, "max_iter": 2}],
    ids=["free", "full", "assembled"],
)
def test_shards_give_the_bits_of_one_process(dask_executor: DaskExecutor, options: dict[str, Any]) -> None:
    with InProcessExecutor(2) as threads, InProcessExecutor(1) as one:
        central = fit(threads, False, **options)
        assert same_bits(central, fit(one, False, **options))
        assert same_bits(central, fit(threads, True, **options))
        assert same_bits(central, fit(dask_executor, True, **options))
    assert not shards._shards, "a run leaves nothing behind"
    assert set(dask_executor.client.run(lambda: len(shards._shards)).values()) == {0}


def test_the_solution_is_the_optimum() -> None:
    x, y = planted(N, D, L, density=0.02)
    with InProcessExecutor(2) as executor:
        found = fit(executor, True, tol=1e-4, max_iter=40)
    assert found.status == "OPTIMAL"
    best = objective(x, y, optimum(x, y, P0, RADIUS, tol=1e-6), P0)
    assert found.objective <= best * (1 + 1.1e-4)
    np.testing.assert_allclose(found.objective, objective(x, y, found.u @ found.m, P0), rtol=1e-12)


def test_only_small_matrices_cross_the_network_within_a_solution(
    dask_executor: DaskExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = {"ask": 0, "answer": 0}
    at_homes = DaskExecutor.at_homes

    def size(value: Any) -> int:
        if isinstance(value, np.ndarray):
            return value.size
        return max((size(each) for each in value), default=0) if isinstance(value, tuple | list) else 0

    def watched(
        self: DaskExecutor, function: Callable[..., Any], homes: Any, payload: Any, *values: Any
    ) -> Any:
        results = at_homes(self, function, homes, payload, *values)
        if payload[1] in ("slope_and_gram", "ahead_gram", "move"):
            largest["ask"] = max(largest["ask"], size(payload))
            largest["answer"] = max(largest["answer"], size(results))
        return results

    monkeypatch.setattr(DaskExecutor, "at_homes", watched)
    rank = fit(dask_executor, True, max_iter=2).history[-1].directions
    assert 0 < largest["ask"] <= rank**2
    assert rank <= largest["answer"] <= rank**2 + 2 < L * rank // 4


@pytest.mark.filterwarnings("ignore:the small problem is begun again:UserWarning")
@pytest.mark.filterwarnings("ignore:the cluster lost work:UserWarning")
@pytest.mark.parametrize("moment", ["move", "gradient_times"])
def test_a_worker_that_dies_with_its_shards_changes_no_bit(
    dask_executor: DaskExecutor, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    calm = fit(dask_executor, True)
    ask, asked = shards.ShardedStatistics.ask, []

    def deadly(self: shards.ShardedStatistics, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        asked.append(name)
        if asked.count(moment) == 3 and name == moment:
            pids = dask_executor.client.run(os.getpid)
            os.kill(pids[self._homes[-1]], signal.SIGKILL)
        return ask(self, name, arguments)

    monkeypatch.setattr(shards.ShardedStatistics, "ask", deadly)
    assert same_bits(calm, fit(dask_executor, True))
    assert asked.count(moment) > 3


@pytest.mark.parametrize("before", [False, True])
def test_a_run_goes_on_from_a_checkpoint_with_its_labels_elsewhere(tmp_path: Path, before: bool) -> None:
    reads = iter(range(100))
    with InProcessExecutor(2) as executor:
        whole = fit(executor, False)
        with pytest.raises(StoppedEarlyError):
            fit(executor, before, checkpoint=Checkpoints(tmp_path / "c"), stop=lambda: next(reads) > 4)
        rest = fit(executor, not before, checkpoint=Checkpoints(tmp_path / "c", resume=True))
    assert same_bits(whole, rest)


def test_labels_are_sharded_when_they_are_most_of_the_memory(
    dask_executor: DaskExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    keep = Problem.keep_statistics

    def watched(self: Problem, place: NDArray[Any], shards: int = 0) -> None:
        kept.append(shards)
        keep(self, place, shards)

    monkeypatch.setattr(Problem, "keep_statistics", watched)
    for limit in (2**31, 400_000):  # plenty; less than all directions need
        fit(dask_executor, None, memory_limit=limit, max_iter=1)
    with InProcessExecutor(2) as executor:  # nobody to share with
        fit(executor, None, memory_limit=400_000, max_iter=1)
    assert [bool(nbytes) for nbytes in kept] == [False, True, False]


def test_what_cannot_be_sharded_is_refused() -> None:
    data = as_dataset(*planted(N, D, L, density=0.02))
    parameters = Parameters(RADIUS, weights="uniform", options=Options(shard_labels=True, assemble=False))
    with InProcessExecutor(1) as executor, pytest.raises(UsageError, match="labels can be sharded only"):
        train(data, parameters, executor)


@pytest.mark.filterwarnings("ignore:.* labels in Y have no positive row:UserWarning")
def test_memory_stays_within_its_limit_and_shards_take_it_from_this_process(
    dask_executor: DaskExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_problem, "PART_WORK", 50_000)
    rng = np.random.default_rng(0)
    n_rows, n_features, n_labels, limit = 4000, 300, 40_000, 96 * 2**20
    x = sp.random_array((n_rows, n_features), density=0.1, format="csr", rng=rng)
    y = sp.csr_array(
        (
            np.ones(3 * n_rows, dtype=np.uint8),
            rng.integers(0, n_labels, 3 * n_rows),
            3 * np.arange(n_rows + 1),
        ),
        shape=(n_rows, n_labels),
    )
    y.sum_duplicates()
    y.data[:] = 1
    data = as_dataset(x, y)

    def peak(executor: Executor, shard_labels: bool) -> tuple[int, Solution]:
        options = Options(
            shard_labels=shard_labels, assemble=False, max_iter=3, block_size=8, memory_limit=limit, tol=1e-12
        )
        tracemalloc.start()
        try:
            solution = train(data, Parameters(RADIUS, weights=1e-3, options=options), executor)[1]
            return tracemalloc.get_traced_memory()[1], solution
        finally:
            tracemalloc.stop()

    with InProcessExecutor(2) as executor:
        alone, central = peak(executor, False)
    whole, _ = peak(dask_executor, False)
    here, sharded = peak(dask_executor, True)
    assert same_bits(central, sharded)
    assert central.history[-1].directions >= 25, "the limit is met"
    assert alone <= limit
    assert here <= 0.85 * whole
