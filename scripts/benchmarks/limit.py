"""How near a pass is to what the machine must do at least: read the bytes, and multiply."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import scipy.sparse as sp
from common import GB, MIB, Goal, Result, Setting, Table, ratio, seconds, spread
from out_of_core import READING, Run, dense_store, evict, measure, sparse_store, table

from dswml.blocks import RowBlock
from dswml.dataset import Dataset, open_dataset
from dswml.executor import InProcessExecutor
from dswml.features import BlockSource, Features
from dswml.frank_wolfe import Options
from dswml.problem import Problem
from dswml.sweep import Partial, combine
from dswml.training import Parameters, train

#: Columns of the bare products, and of the new directions of a pass: those of a corrective step.
COLUMNS = 20
#: Bytes for factors and statistics of sparse data: a 64th of it is what a task may return.
FACTORS = 2**29


def run(setting: Setting) -> Result:
    """Out of core against reading, in memory against products, and where the rest goes."""
    found = Result(
        "limit",
        "The limit",
        "How long is a pass, next to only reading the same row blocks (X four times the memory limit), and "
        "next to the bare matrix products (X in memory)?",
    )
    stores = {
        "dense": (dense_store(setting, setting.pick(8.0, 0.05)), setting.pick(64, 4) * MIB),
        "CSR": (sparse_store(setting, setting.pick(4.0, 0.02)), setting.pick(8, 1) * MIB),
    }
    for kind, (store, block) in stores.items():
        data = open_dataset(store, block_bytes=block)
        size = data.nnz_x * (4 if kind == "dense" else 8)
        limit = setting.pick(size // 4 // 2, 512 * MIB)
        modes = [("assembled", None), ("matrix-free", False)]
        for name, assemble in setting.pick(modes, modes[:1]) if kind == "dense" else [("matrix-free", False)]:
            one = measure(
                data,
                store,
                limit,
                "corrective",
                assemble,
                setting.pick(2, 1),
                memory_limit=2**31 if kind == "dense" else FACTORS,
                bare=True,
            )
            place = f"{kind}, {name}"
            found.tables.append(
                table(f"Out of core, {place}: {size / GB:.1f} GB, limit 2 x {limit / MIB:.0f} MiB", one)
            )
            _next_to_bare(found, place, one)
            found.raw[f"{kind} {name}"] = [each._asdict() for each in one.passes]
        found.flame.update(_flame(data, store, setting))
    for kind, (store, block) in stores.items():
        _in_memory(found, kind, open_dataset(store, block_bytes=block), setting)
    return found


def _next_to_bare(found: Result, place: str, run: Run) -> None:
    """Goals of the passes out of core, with what reading and the bare products take of them."""
    lines, over, least = [], [], []
    reading = spread(run.seconds(READING)).middle
    for each, bare in run.next_to_bare:
        right, left, labels, summed = each.needed
        over.append(each.seconds / bare.seconds)
        least.append(bare.seconds / reading)
        needed = [f"X U, {right} columns"] * (right > 0) + [f"X^T V, {left} columns"] * (left > 0)
        needed += ["X^T Y"] * labels + [f"Gram matrices of labels, {summed} columns"] * (summed > 0)
        times = [f"{one:.1f}" for one in (each.seconds, each.cpu, bare.seconds, bare.cpu)]
        lines.append([each.kind, ", ".join(needed), *times, f"{over[-1]:.2f}"])
    header = [
        "pass",
        "what it needs",
        "seconds",
        "CPU s",
        "reading and that alone, seconds",
        "CPU s",
        "ratio",
    ]
    found.tables.append(
        Table(f"Out of core, {place}: every pass, and reading with what it needs alone", header, lines)
    )
    found.goals += [
        Goal(
            f"out of core, {place}: time of a pass / time of only reading",
            run.slowdown(),
            1.25,
            note=f"{run.busy}; reading and the bare products and Gram matrices that passes need alone take "
            f"{spread(least)} times as long",
        ),
        Goal(
            f"out of core, {place}: time of a pass / time of reading and what it needs",
            spread(over).middle,
            1.25,
        ),
    ]


def _in_memory(found: Result, kind: str, data: Dataset, setting: Setting) -> None:
    """Passes over blocks that are kept in memory, next to the products with all of them."""
    blocks = data.blocks[: max(setting.pick(GB, 2 * MIB) // data.block_nbytes, 1)]
    dtype = "float64" if data.is_sparse else str(data.x_dtype)
    lines = []
    with InProcessExecutor() as executor:
        kept = {
            block.index: Features(data.read_x(block.start, block.stop), np.dtype(dtype)) for block in blocks
        }
        source = BlockSource(_Part(data, kept, tuple(blocks)), f"memory {kind}", dtype=dtype, cache="auto")
        rng = np.random.default_rng(0)
        direction = rng.normal(size=(data.n_features, COLUMNS))
        right = rng.normal(size=(data.n_labels, COLUMNS))
        plain, corrective = (
            Problem(executor, replace(source, basis=name), np.asarray(data.label_counts), radius=1.0, p0=0.1)
            for name in ("plain", "corrective")
        )
        corrective.keep_statistics(np.full(data.n_labels, -1))

        def products(block: RowBlock, payload: object) -> Partial:
            features = kept[block.index]
            z = features.times(direction)
            return {"product": features.transpose_times(z)}

        def product(block: RowBlock, payload: object) -> Partial:
            return {"product": kept[block.index].transpose_times(scores[block.index])}

        scores = {block.index: rng.normal(size=(block.n_rows, COLUMNS)) for block in blocks}
        nothing = np.zeros((data.n_labels, 0))
        calls: dict[str, Callable[[], object]] = {
            "new directions": lambda: plain.sweep(nothing),
            "X U and X^T Z": lambda: executor.reduce(products, combine, blocks),
            "right": lambda: plain.sweep(nothing, right=right),
            "X^T Z": lambda: executor.reduce(product, combine, blocks),
            "new directions with statistics of labels": lambda: corrective.sweep(nothing),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(setting.repeats + 1):
            for problem in (plain, corrective):
                problem.append(rng.normal(size=(data.n_features, COLUMNS)))
            for name, call in calls.items():
                times[name].append(seconds(call))
        for sweep, bare in (
            ("new directions", "X U and X^T Z"),
            ("right", "X^T Z"),
            ("new directions with statistics of labels", "X U and X^T Z"),
        ):
            quotient = ratio(times[sweep][1:], times[bare][1:])
            lines.append([f"{sweep} / {bare}", str(quotient)])
            if "statistics" not in sweep:  # which are sums over Z and Y for the small problem, not over X
                found.goals.append(
                    Goal(f"in memory, {kind}: pass for {sweep} / bare {bare}", quotient.middle, 1.5)
                )
        found.raw[f"in memory {kind}"] = times
    found.tables.append(
        Table(f"In memory, {kind}: a pass / the bare products, {COLUMNS} columns", ["pass", "ratio"], lines)
    )


class _Part:
    """The first row blocks of a data set, held in memory."""

    def __init__(self, data: Dataset, kept: dict[int, Features], blocks: tuple[RowBlock, ...]) -> None:
        self.data, self.kept, self.blocks = data, kept, blocks
        self.n_rows = blocks[-1].stop
        self.n_features, self.n_labels = data.n_features, data.n_labels
        self._labels = {block.start: data.read_y(block.start, block.stop) for block in blocks}
        self._starts = {block.start: block.index for block in blocks}

    def read_x(self, start: int, stop: int) -> object:
        features = self.kept[self._starts[start]]
        if not features.sparse:
            return features.dense
        shape = (features.n_rows, features.n_features)
        indptr = np.append(features.starts[:1], features.ends)
        return sp.csr_array((features.data, features.indices, indptr), shape=shape)

    def read_y(self, start: int, stop: int) -> object:
        return self._labels[start]


def _flame(data: Dataset, store: Path, setting: Setting) -> dict[str, int]:
    """Sample what the threads of this process do during a short fit that reads from the disk."""
    stacks: Counter[str] = Counter()
    stop = threading.Event()
    own = threading.get_ident()

    def look() -> None:
        while not stop.wait(0.005):
            for thread, frame in sys._current_frames().items():
                path = _path(frame)
                if thread != own and path:
                    stacks[";".join(path)] += 1

    evict(store)
    sampler = threading.Thread(target=look, daemon=True)
    sampler.start()
    try:
        with InProcessExecutor() as executor:
            options = Options(
                tol=0.0, max_iter=1, assemble=False if data.is_sparse else None, time_limit=120.0
            )
            train(data, Parameters(radius=100.0, cache="none", options=options), executor)
    finally:
        stop.set()
        sampler.join()
    kind = "CSR" if data.is_sparse else "dense"
    return {f"{kind};{path}": number for path, number in stacks.items()}


def _path(frame: FrameType | None) -> list[str]:
    """Return the functions of a stack from the task on; nothing for threads that wait for work."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        frame = frame.f_back
    names.reverse()
    starts = [at for at, name in enumerate(names) if name in ("sweep.sweep_block", "cache.run", "zarr.sync")]
    return names[starts[0] :] if starts else []
