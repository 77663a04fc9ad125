"""Time of a pass and memory as the data grow: rows, features, labels, labels a row, workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import GB, MIB, Chart, Curve, Goal, Result, Setting, Table, local_workers, seconds, spread
from out_of_core import evict, read_block

from dswml.dataset import Dataset, open_dataset
from dswml.executor import Executor, InProcessExecutor
from dswml.features import BlockSource
from dswml.problem import Problem
from dswml.synth import synthesize

COLUMNS = 20


def make(setting: Setting, name: str, **law: Any) -> Dataset:
    """Make a data set, once."""
    store = setting.scratch / f"growth-{name}.zarr"
    if not store.exists():
        with InProcessExecutor() as executor:
            synthesize(store, executor=executor, **law)
        os.sync()  # what is not yet on the disk cannot be forgotten
    return open_dataset(store)


def pass_seconds(
    data: Dataset, executor: Executor, repeats: int, prepare: Callable[[], object] = bool
) -> list[float]:
    """Return the time of passes that multiply the gradient from both sides, as a power round does."""
    problem = Problem(executor, _source(data), np.asarray(data.label_counts), radius=1.0, p0=0.1)
    rng = np.random.default_rng(0)
    right = rng.normal(size=(data.n_labels, COLUMNS))
    left = rng.normal(size=(data.n_features, COLUMNS))
    nothing = np.zeros((data.n_labels, 0))
    problem.sweep(nothing, right=right)
    times = []
    for _ in range(repeats):
        prepare()
        times.append(seconds(lambda: problem.sweep(nothing, right=right, left=left)))
    return times


def read_seconds(
    data: Dataset, executor: Executor, repeats: int, prepare: Callable[[], object]
) -> list[float]:
    """Return the time of only reading the row blocks, ahead of their use as passes do."""
    times = []
    for _ in range(repeats):
        prepare()
        times.append(seconds(lambda: executor.reduce(read_block, sum, data.blocks, _source(data))))
    return times


def _source(data: Dataset) -> BlockSource:
    return BlockSource(data, f"growth {time.monotonic_ns()}", dtype="float32", cache="none")


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Note the largest sum of the resident memory of this process and all that it starts."""
    seen = {"peak": 0}
    stop = threading.Event()
    own = psutil.Process()

    def look() -> None:
        total = 0
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        seen["peak"] = max(seen["peak"], total)

    def go_on() -> None:
        while not stop.wait(0.2):
            look()

    look()
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        look()
        stop.set()
        thread.join()


def run(setting: Setting) -> Result:
    """One thing after the other grows."""
    found = Result(
        "growth",
        "As the work grows",
        "How do the time of a pass and the memory follow rows, features, labels and workers?",
    )
    _rows(found, setting)
    _features(found, setting)
    _labels(found, setting)
    _labels_a_row(found, setting)
    _workers(found, setting)
    return found


def _curve(
    found: Result,
    setting: Setting,
    title: str,
    x_title: str,
    xs: list[float],
    sets: list[Dataset],
    *,
    from_disk: bool = False,
) -> tuple[list[float], list[float]]:
    """Return the times of a pass and of only reading, from the disk or from the system's memory."""
    lines, middles, readings = [], [], []
    with InProcessExecutor() as executor:
        for x, data in zip(xs, sets, strict=True):
            prepare = partial(evict, Path(data.url)) if from_disk else bool
            with watched() as memory:
                times = spread(pass_seconds(data, executor, setting.repeats, prepare))
            entries = data.nnz_x + data.nnz_y
            middles.append(times.middle)
            readings.append(spread(read_seconds(data, executor, setting.repeats, prepare)).middle)
            lines.append(
                [
                    f"{x:g}",
                    str(times),
                    f"{entries:,}",
                    f"{1e9 * times.middle / entries:.2f}",
                    f"{readings[-1]:.3g}",
                    f"{memory['peak'] / MIB:.0f}",
                ]
            )
    found.tables.append(
        Table(
            title,
            [
                x_title,
                "seconds a pass",
                "entries of X and Y",
                "ns an entry",
                "only reading, s",
                "peak memory, MiB",
            ],
            lines,
        )
    )
    found.charts.append(
        Chart(
            title,
            f"Time of a pass, read from {'the disk' if from_disk else 'the memory of the system'}.",
            x_title,
            "seconds",
            [
                Curve("pass", list(map(float, xs)), middles),
                Curve("only reading", list(map(float, xs)), readings),
            ],
        )
    )
    found.raw[title] = lines
    return middles, readings


def _dense_law(setting: Setting) -> dict[str, int]:
    return {"features": setting.pick(1000, 50), "labels": 100, "sparsity": 6}


def _rows(found: Result, setting: Setting) -> None:
    counts = setting.pick([10_000, 100_000, 1_000_000, 10_000_000], [500, 1000])
    sets = [make(setting, f"rows-{count}", rows=count, **_dense_law(setting)) for count in counts]
    with_memory = len(found.tables)
    title = "Rows, dense X, from the disk"
    times, readings = _curve(found, setting, title, "rows", counts, sets, from_disk=True)
    peaks = [float(line[-1]) for line in found.tables[with_memory].lines]
    growth, slower = ((each[-1] / each[-2]) / (counts[-1] / counts[-2]) for each in (times, readings))
    found.goals.append(
        Goal(
            "rows: last tenfold growth of time / of rows",
            growth,
            1.25,
            note=f"that of only reading is {slower:.2f}",
        )
    )
    found.goals.append(Goal("rows: peak memory, largest / second largest", peaks[-1] / peaks[-2], 1.5))


def _features(found: Result, setting: Setting) -> None:
    counts = setting.pick([1000, 10_000, 100_000, 1_000_000], [200, 400])
    law = {"rows": setting.pick(200_000, 500), "labels": 1000, "sparsity": 5, "kind": "extreme"}
    sets = [make(setting, f"features-{count}", features=count, **law) for count in counts]
    _curve(found, setting, "Features, 76 a row", "features", counts, sets)


def _labels(found: Result, setting: Setting) -> None:
    counts = setting.pick([1000, 10_000, 100_000, 1_000_000], [100, 200])
    law = {
        "rows": setting.pick(500_000, 500),
        "features": setting.pick(20_000, 200),
        "sparsity": 5,
        "kind": "extreme",
    }
    sets = [make(setting, f"labels-{count}", labels=count, **law) for count in counts]
    times, _ = _curve(found, setting, "Labels, 5 a row", "labels", counts, sets)
    found.goals.append(
        Goal("labels from 1000 to 100 000: time of a pass", times[min(2, len(times) - 1)] / times[0], 1.5)
    )


def _labels_a_row(found: Result, setting: Setting) -> None:
    counts = setting.pick([2, 8, 32], [2, 4])
    law = {
        "rows": setting.pick(200_000, 500),
        "features": setting.pick(20_000, 200),
        "labels": setting.pick(10_000, 100),
    }
    sets = [make(setting, f"active-{count}", sparsity=count, kind="extreme", **law) for count in counts]
    _curve(found, setting, "Labels a row", "labels a row", counts, sets)


def _workers(found: Result, setting: Setting) -> None:
    """More processes than cores cost; a machine of its own for each would bring."""
    rows = setting.pick(1_000_000, 1000)
    data = make(setting, f"rows-{rows}", rows=rows, **_dense_law(setting))
    counts = setting.pick([1, 2, 4], [1, 2])
    middles, lines = [], []
    for count in counts:
        with local_workers(count) as executor:
            times = spread(pass_seconds(data, executor, setting.repeats))
        middles.append(times.middle)
        lines.append([str(count), str(times)])
    with InProcessExecutor(1) as alone:
        one = spread(pass_seconds(data, alone, setting.repeats)).middle
    found.tables.append(
        Table("Worker processes of one thread on this machine", ["workers", "seconds a pass"], lines)
    )
    found.goals.append(
        Goal("4 workers / 2 workers on 2 cores: time of a pass", middles[-1] / middles[-2], 1.25)
    )
    # A model of more machines: blocks are shared out evenly; every level of the tree sends a result once.
    size = COLUMNS * (data.n_features + data.n_labels) * 8
    machines = [1, 2, 4, 8, 16, 32, 64]
    network = 1.25 * GB
    model = [one / m + (np.log2(m) + 1) * size / network + 0.02 for m in machines]
    found.charts.append(
        Chart(
            "A model of more machines",
            f"A thread each: {one:.2f} s of work measured on one, {size / 1e6:.2f} MB of results through "
            "a tree at 10 Gbit/s, 20 ms for the scheduler.",
            "machines",
            "seconds a pass",
            [
                Curve("model", list(map(float, machines)), model),
                Curve("ideal", list(map(float, machines)), [one / m for m in machines]),
            ],
        )
    )
    found.raw["workers"] = {"counts": counts, "seconds": middles, "one thread": one, "model": model}
