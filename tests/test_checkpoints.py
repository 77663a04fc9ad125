"""Checkpoints: a run that was interrupted anywhere ends with the bits of one that was not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import scipy.sparse as sp
from training_cases import planted

from dswml import solver_state
from dswml.checkpoint_file import newest_checkpoint
from dswml.checkpoints import Checkpoints
from dswml.errors import (
    ClusterError,
    DataError,
    DswmlError,
    StoppedEarlyError,
    StoreExistsError,
    UsageError,
)
from dswml.estimator import SparseWeightedClassifier
from dswml.executor import Executor, InProcessExecutor
from dswml.frank_wolfe import Options, Solution
from dswml.sources import as_dataset
from dswml.stored import Dataset
from dswml.training import Parameters, train
from dswml.tuning import Tuned, tune

pytestmark = pytest.mark.usefixtures("calm_blas")


@pytest.fixture
def executor() -> Iterator[Executor]:
    with InProcessExecutor(1) as executor:
        yield executor


def data(n_rows: int, n_features: int, n_labels: int, *, sparse: bool = False) -> Dataset:
    x, y = planted(n_rows, n_features, n_labels, density=0.1)
    return as_dataset(sp.csr_array(np.where(abs(x) > 0.5, x, 0)) if sparse else x, y)


WIDE, TALL, SPARSE = data(60, 30, 12), data(90, 10, 40), data(90, 12, 20, sparse=True)


def parameters(loss: str = "square", **options: Any) -> Parameters:
    weights = options.pop("weights", 0.2)
    return Parameters(radius=6.0, weights=weights, loss=loss, options=Options(**options))


#: Every step rule, loss and oracle; few directions at once, and once few in all, so that the basis turns.
RUNS = {
    "corrective assembled": (TALL, parameters(block_size=2, tol=1e-8, max_iter=2)),
    "corrective assembled, wide": (WIDE, parameters(block_size=3, tol=1e-8, max_iter=2)),
    "corrective uniform": (TALL, parameters(block_size=2, tol=1e-8, max_iter=2, weights=0.5)),
    "corrective capped": (WIDE, parameters(block_size=3, tol=1e-9, max_iter=4, memory_limit=20_000)),
    "corrective matrix-free": (TALL, parameters(assemble=False, block_size=3, tol=1e-3, max_iter=2)),
    "corrective sparse": (SPARSE, parameters(assemble=False, block_size=4, tol=1e-3, max_iter=2)),
    "line-search assembled": (TALL, parameters(step="line-search", max_iter=2, tol=0)),
    "line-search matrix-free": (WIDE, parameters(step="line-search", assemble=False, max_iter=1, tol=0)),
    "open-loop assembled": (WIDE, parameters(step="open-loop", max_iter=3, tol=0)),
    "open-loop matrix-free": (TALL, parameters(step="open-loop", assemble=False, max_iter=1, tol=0)),
    "exponential line-search": (TALL, parameters("exponential", step="line-search", max_iter=1, tol=0)),
    "exponential open-loop": (WIDE, parameters("exponential", step="open-loop", max_iter=2, tol=0)),
}

VARIANTS = (
    "corrective assembled, wide",
    "corrective uniform",
    "open-loop matrix-free",
    "exponential open-loop",
)


def bits(solution: Solution) -> tuple[Any, ...]:
    """All of a solution but the seconds."""
    history = [asdict(replace(record, seconds=0.0)) for record in solution.history]
    return solution.u.tobytes(), solution.m.tobytes(), solution.status, solution.passes, history


def without_passes(solution: Solution) -> Solution:
    history = tuple(replace(record, passes=0) for record in solution.history)
    return replace(solution, passes=0, history=history)


class After:
    """Asks to stop when asked so often."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.filterwarnings("ignore:W needs more than")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in RUNS]
)
def test_a_run_stopped_after_every_read_and_iteration_ends_with_the_same_bits(
    name: str, executor: Executor, tmp_path: Path
) -> None:
    rows, asked = RUNS[name]
    _, undisturbed = train(rows, asked, executor)
    place = Checkpoints(tmp_path / "run", every=1000, resume=True)
    stops = 0
    while True:
        try:
            _, solution = train(rows, asked, executor, checkpoint=place, stop=After(1))
            break
        except StoppedEarlyError:
            stops += 1
    assert stops >= min(len(undisturbed.history) - 1, undisturbed.passes)
    if name == "exponential line-search":  # its scores are made again, which takes a read
        assert solution.passes > undisturbed.passes
        solution, undisturbed = without_passes(solution), without_passes(undisturbed)
    assert bits(solution) == bits(undisturbed)


def test_a_certificate_that_is_interrupted_is_gone_on_with(executor: Executor, tmp_path: Path) -> None:
    asked = parameters(assemble=False, block_size=5, tol=0.1)
    _, undisturbed = train(TALL, asked, executor)
    assert undisturbed.certificate is not None
    assert undisturbed.certificate.method == "lanczos"
    place = Checkpoints(tmp_path / "run", resume=True)
    with pytest.raises(StoppedEarlyError):
        train(TALL, asked, executor, checkpoint=place, stop=After(undisturbed.passes - 3))
    _, solution = train(TALL, asked, executor, checkpoint=place)
    assert bits(solution) == bits(undisturbed)
    assert solution.certificate == undisturbed.certificate


def test_limits_may_be_others_and_the_rest_may_not(executor: Executor, tmp_path: Path) -> None:
    asked = parameters(block_size=2, tol=1e-8, max_iter=2)
    place = Checkpoints(tmp_path / "run", resume=True)
    train(TALL, asked, executor, checkpoint=place)
    longer = replace(asked, cache="none", options=replace(asked.options, max_iter=4))
    _, undisturbed = train(TALL, longer, executor)
    _, solution = train(TALL, longer, executor, checkpoint=place)
    assert solution.iterations == 4
    assert solution.u.tobytes() == undisturbed.u.tobytes()
    with pytest.raises(StoreExistsError, match=r"begun with radius 6\.0, and now it is 7\.0: give the same"):
        train(TALL, replace(asked, radius=7.0), executor, checkpoint=place)
    with pytest.raises(StoreExistsError, match="was begun with step corrective, and now it is open-loop"):
        train(TALL, parameters(step="open-loop", block_size=2), executor, checkpoint=place)
    with pytest.raises(StoreExistsError, match=r"was begun with data \w{12}\.\.\., and now it is \w{12}"):
        train(WIDE, asked, executor, checkpoint=place)
    with pytest.raises(StoreExistsError, match="holds a checkpoint: go on from it with --resume"):
        train(TALL, asked, executor, checkpoint=replace(place, resume=False))
    _, solution = train(TALL, asked, executor, checkpoint=replace(place, resume=False, overwrite=True))
    assert solution.iterations == 2


def test_reads_that_another_tolerance_would_not_have_made_are_not_used(
    executor: Executor, tmp_path: Path
) -> None:
    asked = parameters(assemble=False, block_size=5, tol=0.1)
    _, certified = train(TALL, asked, executor)
    place = Checkpoints(tmp_path / "run", resume=True)
    with pytest.raises(StoppedEarlyError):  # while the gap is certified
        train(TALL, asked, executor, checkpoint=place, stop=After(certified.passes - 3))
    finer = replace(asked, options=replace(asked.options, tol=1e-8, max_iter=certified.iterations + 1))
    _, solution = train(TALL, finer, executor, checkpoint=place)
    assert bits(solution) == bits(train(TALL, finer, executor)[1])


def test_a_finished_run_is_finished_when_it_is_resumed(executor: Executor, tmp_path: Path) -> None:
    asked = parameters(tol=1e-3)
    place = Checkpoints(tmp_path / "run", resume=True)
    _, first = train(TALL, asked, executor, checkpoint=place)
    seen: list[Any] = []
    _, second = train(TALL, asked, executor, checkpoint=place, callbacks=[seen.append])
    assert (first.status, bits(first), seen) == ("OPTIMAL", bits(second), [])
    assert second.certificate == first.certificate


@pytest.mark.parametrize(("every", "written"), [(1, 5), (2, 3), ("0.000001s", 9), ("300s", 1)])
def test_checkpoints_are_written_as_often_as_asked_and_the_last_two_are_kept(
    every: int | str, written: int, executor: Executor, tmp_path: Path
) -> None:
    place = Checkpoints(tmp_path / "run", every=every)
    train(TALL, parameters(step="open-loop", tol=0, max_iter=4), executor, checkpoint=place)
    found = newest_checkpoint(str(tmp_path / "run"))
    assert found is not None
    assert found.number in (written, written + 1)  # the end is written in any case
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == min(2, found.number)
    assert found.values["iteration"] == 4


@pytest.mark.parametrize("every", [0, -1, "0s", "often", "3 passes", 1.5])
def test_senseless_intervals_are_refused(every: Any) -> None:
    with pytest.raises(UsageError, match="checkpoints every"):
        Checkpoints("run", every=every)


def test_the_time_limit_stops_between_reads_and_counts_anew(executor: Executor, tmp_path: Path) -> None:
    asked = parameters(step="open-loop", tol=0, max_iter=2, time_limit=1e-9)
    place = Checkpoints(tmp_path / "run", resume=True)
    for _ in range(3):  # a read each
        with pytest.raises(StoppedEarlyError, match="stopped at the time limit: the checkpoint in"):
            train(TALL, asked, executor, checkpoint=place)
    _, solution = train(TALL, asked, executor, checkpoint=place)
    assert (solution.status, solution.passes) == ("MAXITER", 3)


def test_credentials_are_never_written(executor: Executor) -> None:
    options = {"skip_instance_cache": True, "secret": "TOPSECRET"}
    place = Checkpoints("memory://secretive/run", storage_options=options)
    with pytest.raises(StoppedEarlyError):
        train(TALL, parameters(), executor, checkpoint=place, stop=After(0))
    fs = fsspec.filesystem("memory")
    written = [fs.cat_file(file) for file in fs.find("/secretive")]
    assert len(written) > 2
    assert not any(b"TOPSECRET" in content for content in written)
    assert "TOPSECRET" not in repr(place)


def test_object_stores_hold_checkpoints_too(executor: Executor) -> None:
    place = Checkpoints("memory://checkpoints/run", resume=True)
    asked = parameters(block_size=2, tol=1e-8, max_iter=2)
    with pytest.raises(StoppedEarlyError):
        train(TALL, asked, executor, checkpoint=place, stop=After(3))
    _, solution = train(TALL, asked, executor, checkpoint=place)
    assert bits(solution) == bits(train(TALL, asked, executor)[1])


class Lost(InProcessExecutor):
    """A cluster that is lost after four reads."""

    left = 4

    def reduce(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ClusterError("the cluster is lost")
        return super().reduce(*arguments, **options)


def test_the_loss_of_the_cluster_leaves_a_checkpoint(executor: Executor, tmp_path: Path) -> None:
    asked = parameters(block_size=2, tol=1e-8, max_iter=3)
    place = Checkpoints(tmp_path / "run", resume=True)
    with pytest.raises(ClusterError), Lost(1) as lost:
        train(TALL, asked, lost, checkpoint=place)
    found = newest_checkpoint(str(place.url))
    assert found is not None
    assert found.values["iteration"] == 1
    assert len(found.values["reads"]) == 1
    _, solution = train(TALL, asked, executor, checkpoint=place)
    assert bits(solution) == bits(train(TALL, asked, executor)[1])


def test_the_estimator_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    x, y = planted(90, 10, 40)
    place = Checkpoints(tmp_path / "run", resume=True)
    clf = SparseWeightedClassifier(6, weights=0.2, time_limit=1e-9, checkpoint=place)
    with pytest.raises(StoppedEarlyError):
        clf.fit(x, y)
    clf.set_params(time_limit=None).fit(x, y)
    whole = SparseWeightedClassifier(6, weights=0.2).fit(x, y)
    assert clf.model_.u.tobytes() == whole.model_.u.tobytes()
    assert clf.n_passes_ == whole.n_passes_
    with pytest.raises(UsageError, match=r"'checkpoint' parameter .* must be a Checkpoints or None"):
        clf.set_params(checkpoint="run").fit(x, y)


def test_a_full_disk_is_a_warning_and_the_checkpoint_before_is_kept(
    tiny_disk: Path, executor: Executor
) -> None:
    asked = parameters(step="open-loop", tol=0, max_iter=3)
    _, undisturbed = train(TALL, asked, executor)
    place = Checkpoints(tiny_disk / "run", every=1, resume=True)
    with pytest.raises(StoppedEarlyError):
        train(TALL, asked, executor, checkpoint=place, stop=After(2))
    before = newest_checkpoint(str(place.url))
    assert before is not None
    filler = tiny_disk / "filler"
    # The folder's own mark, written when the work is taken up, still finds room; a checkpoint does not.
    filler.write_bytes(bytes(shutil.disk_usage(tiny_disk).free - 3 * 4096))
    with pytest.warns(UserWarning, match="No space left.*the one before it is kept, and the work goes on"):
        _, solution = train(TALL, asked, executor, checkpoint=place)
    assert bits(solution) == bits(undisturbed)
    kept = newest_checkpoint(str(place.url))
    assert kept is not None
    assert kept.number == before.number
    filler.unlink()
    _, solution = train(TALL, asked, executor, checkpoint=place)
    assert bits(solution) == bits(undisturbed)


def test_a_stop_without_any_checkpoint_is_no_stop_that_can_be_resumed(
    tmp_path: Path, executor: Executor
) -> None:
    place = Checkpoints(tmp_path / "run")

    def lose_the_folder() -> bool:
        shutil.rmtree(tmp_path / "run")
        return True

    with (
        pytest.warns(UserWarning, match="no checkpoint could be written .*: there is none yet"),
        pytest.raises(DswmlError, match="stopped, and no checkpoint could be written") as raised,
    ):
        train(TALL, parameters(), executor, checkpoint=place, stop=lose_the_folder)
    assert raised.value.exit_code == 1


def table(tuned: Tuned) -> list[Any]:
    """All numbers of a search but its passes."""
    numbers = [
        (point.radius, point.p0, point.threshold)
        + tuple(each.tobytes() for each in (point.objective, point.relative_gap, point.rank))
        + tuple((name, values.tobytes()) for name, values in point.scores.items())
        for point in tuned.points
    ]
    return [tuned.iterations, *numbers]


def test_a_search_stopped_after_every_read_ends_with_the_same_bits(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = SPARSE
    grid: dict[str, Any] = {"radii": (1.0, 4.0), "weights": (0.2, "uniform"), "folds": 2, "tol": 1e-2}
    undisturbed = tune(rows, executor, **grid)
    place = Checkpoints(tmp_path / "run", resume=True)
    stops = 0
    while True:
        try:
            tuned = tune(rows, executor, **grid, checkpoint=place, stop=After(0))
            break
        except StoppedEarlyError:
            stops += 1
    assert stops >= undisturbed.passes - 2
    assert table(tuned) == table(undisturbed)
    assert tuned.passes >= undisturbed.passes  # scores that the workers had kept are made again
    assert table(tune(rows, executor, **grid, checkpoint=place)) == table(undisturbed)
    monkeypatch.setattr(solver_state, "STEPS", (*solver_state.STEPS, "what later versions hold"))
    with pytest.raises(DataError, match=r"not one that this version .*: begin again with --overwrite"):
        tune(rows, executor, **grid, checkpoint=place)
    with pytest.raises(StoreExistsError, match="was begun with folds 2, and now it is 3"):
        tune(rows, executor, **(grid | {"folds": 3}), checkpoint=place)
    with pytest.raises(StoreExistsError, match="was begun with verb tune, and now it is train"):
        train(rows, parameters(), executor, checkpoint=place)
