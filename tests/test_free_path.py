"""The search without assembled gradients: every point's optimum, shared reads, no leak, bounded results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from click.testing import CliRunner
from distributed import Client
from tuning_cases import assert_no_leak

from dswml import result_sizes, tuning
from dswml.checkpoints import Checkpoints
from dswml.cli import cli
from dswml.dask_executor import DaskExecutor
from dswml.dataset import Dataset, create_dataset
from dswml.errors import StoppedEarlyError, UsageError
from dswml.estimator import SparseWeightedClassifier
from dswml.executor import Executor, InProcessExecutor
from dswml.folds import fold_of_rows
from dswml.frank_wolfe import Options
from dswml.search_plan import plan_search
from dswml.search_record import searched
from dswml.sources import as_dataset
from dswml.sweep import sweep_block_together
from dswml.training import Parameters, train
from dswml.tuning import Tuned, tune

RADII = (2.0, 10.0, 40.0)
WEIGHTS = (0.1, "uniform")
FOLDS, SEED = 2, 7

pytestmark = pytest.mark.usefixtures("calm_blas")
with_unused_labels = pytest.mark.filterwarnings("ignore:.* labels in Y have no positive row")


def problem(rows: int = 500, features: int = 90, labels: int = 70) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(rows, features)) / np.sqrt(features)
    scores = X @ rng.normal(size=(features, 6)) @ rng.normal(size=(6, labels))
    scores += 0.3 * rng.normal(size=scores.shape)
    return X, (scores > np.quantile(scores, 0.9, axis=0)).astype(np.uint8)


def large(rows: int = 2000, features: int = 20_000, labels: int = 30_000) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)

    def ones(columns: int, each: int) -> Any:
        chosen = (columns * rng.random(rows * each) ** 3).astype(np.int64)
        found = sp.csr_array((np.ones(rows * each), (np.repeat(np.arange(rows), each), chosen)))
        found.resize((rows, columns))
        found.data[:] = 1.0
        return found

    return ones(features, 20) / np.sqrt(20), ones(labels, 3).astype(np.uint8)


def search(X: Any, Y: Any, executor: Executor | None = None, **options: Any) -> Tuned:
    # Blocks of a few rows, so that folds are spread over many of them.
    data = as_dataset(X, Y, block_bytes=2**15)
    asked: dict[str, Any] = {
        "radii": RADII,
        "weights": WEIGHTS,
        "folds": FOLDS,
        "seed": SEED,
        "assemble": False,
    }
    with InProcessExecutor(2) as threads:
        return tune(data, executor or threads, **(asked | options))


def bits(tuned: Tuned) -> list[Any]:
    """All numbers of a search but its passes."""
    numbers = [
        [each.tobytes() for each in (point.objective, point.relative_gap, point.rank)]
        + [(name, values.tobytes()) for name, values in point.scores.items()]
        for point in tuned.points
    ]
    return [tuned.iterations, *numbers]


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return search(*problem())


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of all results of tasks that read the data."""
    sizes: list[int] = []

    def measured(*arguments: Any) -> Any:
        sums = sweep_block_together(*arguments)
        sizes.append(sum(value.nbytes for value in sums.values()))
        return sums

    monkeypatch.setattr(tuning, "sweep_block_together", measured)
    yield sizes
    assert sizes


def test_every_point_reaches_the_objective_of_a_separate_fit(tuned: Tuned) -> None:
    X, Y = problem()
    folds = fold_of_rows(0, len(X), FOLDS, SEED)
    assert not tuned.certified
    for point in tuned.points:
        assert point.relative_gap.max() <= 1e-3
        assert not point.certified
        for fold in range(FOLDS):
            single = SparseWeightedClassifier(point.radius, weights=point.p0, tol=1e-5)
            single.fit(X[folds != fold], Y[folds != fold])
            assert point.objective[fold] == pytest.approx(single.objective_, rel=1e-3)


def test_every_point_of_a_real_set_reaches_the_optimum_in_the_reads_of_a_fit(
    real_set: Callable[[str], Dataset],
) -> None:
    data = real_set("stackex_philosophy")
    grid: dict[str, Any] = {"radii": (10.0, 60.0), "weights": ("sparsity", "uniform"), "folds": 2}
    with InProcessExecutor(2) as executor:
        free = tune(data, executor, **grid, assemble=False)
        exact = tune(data, executor, **grid, tol=1e-5)
        fits = [
            train(data, Parameters(60.0, weights, options=Options(assemble=False)), executor)[1]
            for weights in grid["weights"]
        ]
    assert exact.certified
    for point, other in zip(free.points, exact.points, strict=True):
        assert point.relative_gap.max() <= 1e-3
        np.testing.assert_allclose(point.objective, other.objective, rtol=1e-3)
        assert point.mean("micro_f1") == pytest.approx(other.mean("micro_f1"), abs=0.01)
    assert free.passes <= max(fit.passes for fit in fits)


def test_the_search_takes_at_most_three_times_the_reads_of_its_dearest_fit(tuned: Tuned) -> None:
    data = as_dataset(*problem())
    with InProcessExecutor(2) as executor:
        dearest = max(
            train(data, Parameters(radius, weights, options=Options(assemble=False)), executor)[1].passes
            for radius in RADII
            for weights in WEIGHTS
        )
    assert tuned.passes <= 3 * dearest


def test_labels_of_held_out_rows_cannot_influence_their_fold(tuned: Tuned) -> None:
    assert_no_leak(tuned, search, problem(), FOLDS, SEED)


def test_threads_and_a_cluster_give_the_same_bits(tuned: Tuned, dask_client: Client) -> None:
    with DaskExecutor(dask_client) as executor:
        assert bits(search(*problem(), executor)) == bits(tuned)


def test_a_search_stopped_after_every_read_ends_with_the_same_bits(tuned: Tuned, tmp_path: Path) -> None:
    place, stops = Checkpoints(tmp_path / "run", resume=True), 0
    while True:
        try:
            resumed = search(*problem(), checkpoint=place, stop=lambda: True)
            break
        except StoppedEarlyError:
            stops += 1
    assert stops >= tuned.passes - 1
    assert bits(resumed) == bits(tuned)


@pytest.mark.parametrize("limit", [2**31, 60_000_000])
def test_the_window_and_the_blocks_follow_from_the_memory_limit(
    limit: int, results: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_sizes, "ASSEMBLED_ENTRIES", 0)
    X, Y = problem()
    plan = plan_search(
        len(X), X.shape[1], Y.sum(axis=0), folds=FOLDS, weightings=2, memory_limit=limit, assemble=None
    )
    found = search(X, Y, memory_limit=limit, assemble=None)
    assert not found.certified
    assert max(point.relative_gap.max() for point in found.points) <= 1e-3
    numbers = 8 * 8 * 2 * FOLDS
    assert max(results) <= plan.result_nbytes + numbers
    assert plan.result_nbytes <= max(limit // 64, 4 * 8 * 20 * sum(X.shape[1:] + Y.shape[1:])) * 2


def test_paths_without_room_for_each_other_read_one_after_another(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dswml.search_plan.RESULTS_SHARE", 0.0)
    apart = search(*problem())
    assert apart.passes > tuned.passes
    assert bits(apart) == bits(tuned)


@with_unused_labels
def test_many_features_and_labels_are_searched_in_bounded_memory(results: list[int]) -> None:
    X, Y = large()
    limit = 2**29
    data = as_dataset(X, Y, block_bytes=2**18)
    grid: dict[str, Any] = {"radii": (5.0, 20.0), "weights": (0.01, "uniform"), "folds": 2, "tol": 1e-2}
    with InProcessExecutor(2) as executor:
        found = tune(data, executor, **grid, memory_limit=limit)
        fit = train(data, Parameters(20.0, 0.01, options=Options(tol=1e-2)), executor)[1]
    assert not found.certified
    assert max(point.relative_gap.max() for point in found.points) <= 1e-2
    assert found.passes <= 3 * fit.passes
    # A gradient alone has 4.8 GB.
    assert max(results) <= 4 * 8 * 20 * (20_000 + 30_000)


@with_unused_labels
def test_memory_for_hardly_any_directions_is_refused() -> None:
    X, Y = large(rows=200)
    message = r"has 32 MiB of the memory limit, room for \d+ directions, and a search needs 40: raise"
    with pytest.raises(UsageError, match=message):
        search(X, Y, memory_limit=2**27)


@with_unused_labels
def test_labels_of_nothing_but_zeros_are_solved_at_once() -> None:
    X, _ = problem()
    found = search(X, np.zeros((len(X), 4), dtype=np.uint8), weights=(0.1,), folds=0)
    assert [point.objective[0] for point in found.points] == [0.0] * len(RADII)


def test_estimated_gaps_are_called_estimated_wherever_they_are_shown(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = problem()
    model = SparseWeightedClassifier(2.0, weights=0.1).fit(X, Y).model_
    assert searched(model, tuned, tuned.best).info["search"]["gaps_certified"] is False
    create_dataset(tmp_path / "data.zarr", X, Y)
    command = ["tune", str(tmp_path / "data.zarr"), "--radii", "2", "--weights", "0.1", "--folds", "2"]
    assert "estimated" not in CliRunner().invoke(cli, command).stdout
    monkeypatch.setattr(result_sizes, "ASSEMBLED_ENTRIES", 0)
    table = CliRunner().invoke(cli, command).stdout
    assert "est. gap" in table
    assert "The gaps are estimated, not certified" in table
    described = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout)
    assert [point["certified"] for point in described["points"]] == [False]
