"""Checkpoints: a run that was interrupted anywhere ends with the bits of one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from training_cases import planted

from dswml.checkpoints import Checkpoints
from dswml.errors import StoppedEarlyError
from dswml.executor import Executor, InProcessExecutor
from dswml.frank_wolfe import Options, Solution
from dswml.sources import as_dataset
from dswml.stored import Dataset
from dswml.training import Parameters, train

pytestmark = pytest.mark.usefixtures("calm_blas")


@pytest.fixture
def executor() -> Iterator[Executor]:
    with InProcessExecutor(1) as executor:
        yield executor


def data(n_rows: int = 90, n_features: int = 12, n_labels: int = 20, *, sparse: bool = False) -> Dataset:
    x, y = planted(n_rows, n_features, n_labels, density=0.1)
    return as_dataset(sp.csr_array(np.where(abs(x) > 0.5, x, 0)) if sparse else x, y)


WIDE, TALL = data(60, 30, 12), data(90, 10, 40)


def parameters(loss: str = "square", **options: Any) -> Parameters:
    weights = options.pop("weights", 0.2)
    return Parameters(radius=6.0, weights=weights, loss=loss, options=Options(**options))


#: Every step rule, loss and oracle; small blocks and caps, so that there are many iterations and rotations.
RUNS = {
    "corrective assembled": (TALL, parameters(block_size=2, tol=1e-8, max_iter=7)),
    "corrective assembled, more features than labels": (WIDE, parameters(block_size=3, tol=1e-8, max_iter=7)),
    "corrective uniform": (TALL, parameters(block_size=2, tol=1e-8, max_iter=5, weights=0.5)),
    "corrective capped": (WIDE, parameters(block_size=2, tol=1e-9, max_iter=9, memory_limit=20_000)),
    "corrective matrix-free": (TALL, parameters(assemble=False, block_size=3, tol=3e-2, max_iter=9)),
    "corrective sparse": (data(sparse=True), parameters(assemble=False, block_size=4, tol=1e-2, max_iter=6)),
    "line-search assembled": (TALL, parameters(step="line-search", max_iter=5, tol=0)),
    "line-search matrix-free": (WIDE, parameters(step="line-search", assemble=False, max_iter=3, tol=0)),
    "open-loop assembled": (WIDE, parameters(step="open-loop", max_iter=6, tol=0)),
    "open-loop matrix-free": (TALL, parameters(step="open-loop", assemble=False, max_iter=3, tol=0)),
    "exponential line-search": (TALL, parameters("exponential", step="line-search", max_iter=3, tol=0)),
    "exponential open-loop": (WIDE, parameters("exponential", step="open-loop", max_iter=5, tol=0)),
}


def bits(solution: Solution) -> tuple[Any, ...]:
    """All of a solution but the seconds."""
    history = [tuple(replace(record, seconds=0.0).__dict__.items()) for record in solution.history]
    return solution.u.tobytes(), solution.m.tobytes(), solution.status, solution.passes, history


class After:
    """Asks to stop after so many reads."""

    def __init__(self, reads: int) -> None:
        self.left = reads

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("name", RUNS)
def test_a_run_stopped_after_every_read_ends_with_the_same_bits(
    name: str, executor: Executor, tmp_path: Path
) -> None:
    rows, asked = RUNS[name]
    _, undisturbed = train(rows, asked, executor)
    stops = 0
    while True:
        place = Checkpoints(tmp_path / "run", every=1000, resume=True)
        try:
            _, solution = train(rows, asked, executor, checkpoint=place, stop=After(1))
            break
        except StoppedEarlyError:
            stops += 1
    assert stops >= len(undisturbed.history) - 1
    assert bits(solution) == bits(undisturbed)
