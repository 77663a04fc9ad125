"""What Dask adds to a pass: milliseconds, tasks, memory of the scheduler, bytes over the network."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import psutil
from common import MIB, Chart, Curve, Goal, Result, Setting, Table, local_workers, seconds, spread
from distributed import SchedulerPlugin

from dswml.dataset import Dataset, open_dataset
from dswml.executor import ARITY, Executor, InProcessExecutor
from dswml.features import BlockSource
from dswml.frank_wolfe import Options
from dswml.problem import Problem
from dswml.synth import synthesize
from dswml.training import Parameters, train


class _Tasks(SchedulerPlugin):
    """Counts the tasks that end."""

    def __init__(self) -> None:
        self.done = 0

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        self.done += start == "processing" and finish == "memory"


def _problem(data: Dataset, executor: Executor) -> Problem:
    source = BlockSource(data, f"scheduler {id(executor)}", dtype="float64")
    return Problem(executor, source, np.asarray(data.label_counts), radius=1.0, p0=0.1)


def _pass_times(problem: Problem, right: Any, count: int) -> list[float]:
    nothing = np.zeros((problem.n_labels, 0))
    problem.sweep(nothing, right=right)
    return [seconds(lambda: problem.sweep(nothing, right=right)) for _ in range(count)]


def run(setting: Setting) -> Result:
    """Small blocks that are in memory, so that next to nothing but the overhead is left."""
    found = Result(
        "scheduler",
        "The scheduler",
        "What does Dask add to a pass, and does anything of it grow with the iterations?",
    )
    rows, blocks = setting.pick((64_000, 64), (800, 8))
    store = setting.scratch / f"scheduler-{rows}.zarr"
    if not store.exists():
        synthesize(
            store, rows=rows, features=100, labels=50, sparsity=4, dtype="float64", chunk_rows=rows // blocks
        )
    data = open_dataset(store, block_bytes=1)
    right = np.random.default_rng(0).normal(size=(data.n_labels, 20))
    count = setting.pick(30, 3)
    with InProcessExecutor(2) as alone:
        here = spread(_pass_times(_problem(data, alone), right, count))
    with local_workers(2) as executor:
        cluster = executor.client.cluster
        tasks = _Tasks()
        cluster.scheduler.add_plugin(tasks, name="count")
        problem = _problem(data, executor)
        _pass_times(problem, right, 2)
        done, sent = tasks.done, _network(executor)
        there = spread(_pass_times(problem, right, count))
        a_pass = (tasks.done - done) / (count + 1)
        network = (_network(executor) - sent) / (count + 1)
        problem.close()
        # Every worker but one sends its part to another, at each level of the tree at most once, and the
        # root goes to the client; the payload goes to every worker.
        result = data.n_features * 20 * 8
        depth = int(np.ceil(np.log(len(data.blocks)) / np.log(ARITY)))
        bound = result * (depth + 1) + 2 * right.nbytes
        iterations, memory = setting.pick(500, 20), []
        process = psutil.Process()

        def look(record: Any) -> None:
            if record.iteration % max(iterations // 25, 1) == 0:
                gc.collect()
                memory.append(
                    (record.iteration, process.memory_info().rss / MIB, len(cluster.scheduler.tasks))
                )

        options = Options(step="open-loop", block_size=1, tol=0.0, max_iter=iterations)
        train(data, Parameters(radius=5.0, options=options), executor, callbacks=[look])
    overhead = 1000 * (there.middle - here.middle)
    half = memory[len(memory) // 2 :]
    # The tasks of the last pass may or may not be forgotten yet, so the most of either half are compared.
    before, after = (max(each[2] for each in part) for part in (memory[: len(memory) // 2], half))
    growth = (half[-1][1] - half[0][1]) if len(half) > 1 else 0.0
    found.tables.append(
        Table(
            f"A pass over {len(data.blocks)} row blocks in memory",
            ["what", "figure"],
            [
                ["in process, ms", str(spread([1000 * here.middle, 1000 * here.low, 1000 * here.high]))],
                [
                    "2 worker processes, ms",
                    str(spread([1000 * there.middle, 1000 * there.low, 1000 * there.high])),
                ],
                ["Dask's part, ms", f"{overhead:.1f}"],
                ["Dask's part a row block, ms", f"{overhead / len(data.blocks):.2f}"],
                ["tasks", f"{a_pass:.0f} for {len(data.blocks)} row blocks"],
                ["bytes over the network", f"{network:,.0f}, at least {bound:,.0f} are needed"],
            ],
        )
    )
    found.goals += [
        Goal("tasks of a pass / row blocks", a_pass / len(data.blocks), 1.5),
        Goal(
            f"growth of the memory of scheduler and client over the last {iterations // 2} iterations, MiB",
            growth,
            20.0,
        ),
        Goal("tasks that the scheduler knows at most, second half / first half", after / max(before, 1), 1.1),
        Goal("bytes over the network / the least that the reduction needs", network / bound, 4.0),
    ]
    found.charts.append(
        Chart(
            "Memory of scheduler and client",
            f"{iterations} iterations of open-loop.",
            "iteration",
            "MiB",
            [Curve("resident", [m[0] for m in memory], [m[1] for m in memory])],
            log_x=False,
            log_y=False,
        )
    )
    found.raw = {"in process": here.__dict__, "workers": there.__dict__, "memory": memory, "network": network}
    return found


def _network(executor: Any) -> int:
    """Bytes that the workers have sent, to each other and to the client."""

    def sent(dask_worker: Any) -> int:
        return int(dask_worker.transfer_outgoing_bytes_total)

    return sum(executor.client.run(sent).values())
