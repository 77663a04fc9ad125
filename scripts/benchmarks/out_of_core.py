"""Passes over data that do not fit into memory, next to only reading them: speed, memory, workers lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from common import GB, MIB, Goal, Result, Setting, Table, local_workers, spread
from distributed import LocalCluster, SchedulerPlugin

from dswml import sweep
from dswml.blocks import RowBlock
from dswml.dask_executor import DaskExecutor
from dswml.dataset import Dataset, open_dataset
from dswml.executor import Executor, InProcessExecutor
from dswml.features import BlockSource
from dswml.frank_wolfe import Options
from dswml.sweep import Sweep
from dswml.synth import synthesize
from dswml.training import Parameters, train

READING, BARE = "only reading", "reading and bare products"
#: What a pass cannot do without: columns of X U and of X^T V, whether X^T Y, and for how many new directions
#: the Gram matrices of labels.
Needed = tuple[int, int, bool, int]


class Watch(SchedulerPlugin):
    """Peak memory of the worker processes, workers that were lost, and time that workers were paused."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.peaks: dict[int, int] = {}
        self.lost = 0
        self.paused = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        if not self._stop.is_set():
            self.lost += 1

    @property
    def pids(self) -> list[int]:
        return [state.pid for state in self.cluster.scheduler.workers.values()]

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the workers have taken so far."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(each.user + each.system for each in times)

    @property
    def paused_now(self) -> int:
        return sum(state.status.name == "paused" for state in list(self.cluster.scheduler.workers.values()))

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self.paused += 0.05 * self.paused_now
            for pid in self.pids:
                try:
                    resident = psutil.Process(pid).memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                self.peaks[pid] = max(self.peaks.get(pid, 0), resident)

    def __enter__(self) -> Watch:
        self.cluster.scheduler.add_plugin(self, name="watch")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


class Pass(NamedTuple):
    """One pass over all row blocks: what it was for, how long it took, and the workers' processor time."""

    kind: str
    seconds: float
    cpu: float
    needed: Needed = (0, 0, False, 0)


class Bare(NamedTuple):
    """What a pass cannot do without, and the labels that workers make Gram matrices of (see `Sweep`)."""

    source: BlockSource
    needed: Needed
    place: Any


def multiply_block(block: RowBlock, bare: Bare) -> int:
    """Read a row block as `read_block` does, make the products and Gram matrices, and drop them."""
    features, active = bare.source.features(block), bare.source.labels(block)
    right, left, labels, summed = bare.needed
    if right:
        z = features.times(np.ones((features.n_features, right)))
        if summed and bare.place.max() >= 0:
            sweep._label_grams(active, bare.place, z, right, summed)
    if left:
        features.transpose_times(np.ones((features.n_rows, left)))
    if labels:
        features.transpose_times_labels(active, np.ones(active.nnz))
    return features.nbytes


class Timed(Executor):
    """An executor that notes every pass."""

    def __init__(self, executor: DaskExecutor, watch: Watch, prepare: Callable[[], None]) -> None:
        self.executor, self.watch, self.prepare = executor, watch, prepare
        self.n_slots = executor.n_slots
        self.passes: list[Pass] = []
        self.place: Any = None

    def reduce(
        self, function: Any, combine: Any, items: Any, payload: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        kind, needed = READING, (0, 0, False, 0)
        if function is multiply_block:
            kind, needed = BARE, payload.needed
        elif function is not read_block:
            needed, self.place = _needed(payload, *args), payload.place
            asked = [name for name in ("assemble", "grow") if getattr(payload, name, False)]
            asked += [
                name for name in ("right", "left", "direction") if getattr(payload, name, None) is not None
            ]
            kind = " + ".join(asked) or "value"
        self.prepare()
        begin, cpu = time.perf_counter(), self.watch.cpu_seconds
        result = self.executor.reduce(function, combine, items, payload, *args, **kwargs)
        self.passes.append(Pass(kind, time.perf_counter() - begin, self.watch.cpu_seconds - cpu, needed))
        return result

    def map(self, *args: Any, **kwargs: Any) -> Any:
        return self.executor.map(*args, **kwargs)

    def forget(self, keys: Any) -> None:
        self.executor.forget(keys)

    def everywhere(self, function: Callable[..., object], *arguments: Any) -> None:
        self.executor.everywhere(function, *arguments)

    def memory_per_slot(self) -> int:
        return self.executor.memory_per_slot()

    @property
    def n_processes(self) -> int:
        return self.executor.n_processes

    def homes(self, *args: Any, **kwargs: Any) -> Any:
        return self.executor.homes(*args, **kwargs)

    def at_homes(self, *args: Any, **kwargs: Any) -> Any:
        return self.executor.at_homes(*args, **kwargs)

    def close(self) -> None:
        pass


def _needed(request: Sweep, pieces: Sequence[Any] = ()) -> Needed:
    """Return what answers a request."""
    basis = sum(piece.value.shape[1] for piece in pieces)
    left = 0 if request.left is None else request.left.shape[1]
    right = 0 if request.right is None else request.right.shape[1]
    summed = request.grow if request.place is not None and request.grams else 0
    return basis + left, request.grow + right, request.assemble, summed


def evict(store: Path) -> None:
    """Have the system forget the files, as it would if they did not fit into its memory."""
    for file in store.glob("X/**/*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_block(block: RowBlock, source: BlockSource) -> int:
    """Read a row block of X and Y, and the next one of X ahead, and drop it."""
    source.labels(block)
    return source.features(block).nbytes


@dataclass(frozen=True)
class Run:
    """A short fit, with a pass of only reading before each of its iterations."""

    passes: list[Pass]
    x_bytes: int
    limit: int
    peaks: list[int]
    lost: int
    paused: float
    objective: float

    def seconds(self, kind: str) -> list[float]:
        """Return the time of every pass of a kind."""
        return [each.seconds for each in self.passes if each.kind == kind]

    @property
    def kinds(self) -> list[str]:
        return [
            kind for kind in dict.fromkeys(each.kind for each in self.passes) if kind not in (READING, BARE)
        ]

    @property
    def work(self) -> list[Pass]:
        return [each for each in self.passes if each.kind not in (READING, BARE)]

    @property
    def next_to_bare(self) -> list[tuple[Pass, Pass]]:
        """Every pass, and reading with what it needs alone, as it was measured after the fit."""
        bare = {each.needed: each for each in self.passes if each.kind == BARE}
        return [(each, bare[each.needed]) for each in self.work if each.needed in bare]

    @property
    def busy(self) -> str:
        """How much of the processors reading alone takes, which is what it leaves to work beside it."""
        busy = spread([each.cpu / each.seconds for each in self.passes if each.kind == READING]).middle
        return f"only reading keeps {busy:.1f} of {os.cpu_count()} processors busy"

    def slowdown(self, kind: str | None = None) -> float:
        """Median time of a pass, of one kind or any, by that of a pass that only reads."""
        of_kind = [each.seconds for each in self.work if kind in (None, each.kind)]
        return spread(of_kind).middle / spread(self.seconds(READING)).middle


def dense_store(setting: Setting, gb: float, features: int = 1000, labels: int = 100) -> Path:
    """Make a dense data set of so many GB, once."""
    store = setting.scratch / f"dense-{gb:g}.zarr"
    if not store.exists():
        with InProcessExecutor() as executor:
            rows = int(gb * GB / 4 / features)
            synthesize(store, rows=rows, features=features, labels=labels, sparsity=6, executor=executor)
        os.sync()  # what is not yet on the disk cannot be forgotten
    return store


def sparse_store(setting: Setting, gb: float) -> Path:
    """Make a sparse data set of so many GB in memory, once."""
    store = setting.scratch / f"sparse-{gb:g}.zarr"
    if not store.exists():
        with InProcessExecutor() as executor:
            synthesize(
                store,
                rows=int(gb * GB / 8 / 76),
                features=20_000,
                labels=1000,
                sparsity=5,
                kind="extreme",
                normalize="l2",
                executor=executor,
            )
        os.sync()
    return store


def measure(
    data: Dataset,
    store: Path,
    limit: int,
    step: str,
    assemble: bool | None,
    iterations: int,
    workers: int = 2,
    memory_limit: int = 2**31,
    *,
    bare: bool = False,
) -> Run:
    """Train on worker processes of so much memory, and read all of X from the disk in between.

    At the end come passes of reading and the ``bare`` products of those of the fit, if asked for.
    """
    with local_workers(workers, limit) as executor:
        cluster = executor.client.cluster
        with Watch(cluster) as watch:
            timed = Timed(executor, watch, lambda: evict(store))
            first = set(watch.pids)
            dtype = "float64" if data.is_sparse else str(data.x_dtype)
            source = BlockSource(data, READING, dtype=dtype, cache="none")
            whole = timed.executor.reduce(read_block, sum, data.blocks, source)

            def read(record: object = None) -> None:
                assert timed.reduce(read_block, sum, data.blocks, source) == whole

            read()
            options = Options(
                step=step, assemble=assemble, tol=0.0, max_iter=iterations, memory_limit=memory_limit
            )
            parameters = Parameters(radius=100.0, options=options)
            _, solution = train(data, parameters, timed, callbacks=[read])
            wanted = dict.fromkeys(each.needed for each in timed.passes if any(each.needed))
            for needed in wanted if bare else ():
                one = Bare(source, needed, timed.place)
                assert timed.reduce(multiply_block, sum, data.blocks, one) == whole
            lost = watch.lost + len(set(watch.pids) - first)
    return Run(
        timed.passes, whole, limit, sorted(watch.peaks.values()), lost, watch.paused, solution.objective
    )


def table(caption: str, run: Run) -> Table:
    """Return what every kind of pass took."""
    reading = spread(run.seconds(READING))
    lines = []
    for kind in [READING, *run.kinds]:
        times = spread(run.seconds(kind))
        cpu = spread([each.cpu for each in run.passes if each.kind == kind])
        speed = f"{run.x_bytes / times.middle / GB:.2f}"
        lines.append([kind, str(times), speed, f"{reading.middle / times.middle:.0%}", f"{cpu.middle:.1f}"])
    return Table(caption, ["pass", "seconds", "GB/s", "of the speed of reading", "CPU s of workers"], lines)


def run(setting: Setting) -> Result:
    """X eight times the memory of all workers together."""
    gb = setting.pick(16.0, 0.05)
    store = dense_store(setting, gb)
    data = open_dataset(store, block_bytes=setting.pick(64, 4) * MIB)
    limit = setting.pick(int(gb * GB / 8 / 2), 512 * MIB)
    found = Result(
        "out-of-core",
        "Data eight times the workers' memory",
        "Does a fit on X eight times as large as the memory of all workers together end within that memory, "
        "and how near is a pass to the speed of only reading?",
    )
    modes = [("corrective", None), ("corrective", False), ("open-loop", None)]
    runs = {}
    for step, assemble in setting.pick(modes, modes[:1]):
        name = f"{step}, {'matrix-free' if assemble is False else 'assembled'}"
        each = runs[name] = measure(data, store, limit, step, assemble, 1)
        found.tables.append(
            table(f"{name}: X of {each.x_bytes / GB:.1f} GB, 2 workers of {limit / MIB:.0f} MiB", each)
        )
        for kind in each.kinds:
            found.goals.append(
                Goal(
                    f"{name}, pass for {kind}: share of the speed of reading",
                    1 / each.slowdown(kind),
                    0.7,
                    at_most=False,
                    note=each.busy,
                )
            )
    every = list(runs.values())
    found.goals += [
        Goal("peak memory of a worker / its limit", max(max(e.peaks) for e in every) / limit, 1.0),
        Goal("workers lost or restarted", sum(e.lost for e in every), 0.0),
    ]
    found.raw = {name: [each._asdict() for each in one.passes] for name, one in runs.items()}
    found.raw["peaks"] = {name: one.peaks for name, one in runs.items()}
    found.notes.append(
        "Passes read from the disk: the system is made to forget the files before each. Workers keep labels, "
        "scores and as much of X as finds room in their own memory, as they do by default."
    )
    return found
