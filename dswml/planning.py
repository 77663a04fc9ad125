"""What training will take: row blocks, memory of workers and driver, passes and time, before it is begun."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import numpy as np

from .cache import FEATURES_SHARE, WORKER_SHARE, forget_run, task_nbytes
from .dask_executor import PAUSED_AT, WORKER_BYTES
from .errors import UsageError
from .executor import one_blas_thread
from .features import BlockSource
from .label_sums import plan_directions
from .result_sizes import MIN_BLOCK, has_square, is_assembled, result_nbytes
from .stored import Dataset
from .sweep import Sweep, sweep_block

__all__ = ["Plan", "plan_training"]

#: Passes to a certified relative gap of 1e-3: from and to, measured on four real sets at three radii and
#: both weightings where gradients are assembled, and at one radius where they are not.
PASSES = {True: (5, 19), False: (16, 26)}
#: Directions that a typical fit ends with; they count for what could be kept in memory.
TYPICAL_DIRECTIONS = 200
#: Row blocks that are timed.
TIMED_BLOCKS = 3


@dataclass(frozen=True)
class Plan:
    """What training on a data set takes with a number of workers.

    Attributes
    ----------
    row_blocks, block_rows, block_nbytes : int
        Number of row blocks, and rows and bytes of the largest.
    worker_nbytes : int
        Smallest memory limit with which a worker runs without being paused.
    keeping_nbytes : int
        Memory limit of a worker with which all rows stay in memory, so that X is read once.
    driver_nbytes : int
        Most memory of factors and statistics in the process that trains.
    directions : int
        Directions that this memory holds.
    assembled : bool
        Whether gradients are small enough to be assembled.
    passes : tuple of int
        Reads of X to expect, from and to.
    seconds_per_pass : float
        From the time of a few row blocks in this process, spread over all threads of the workers.
    seconds : tuple of float
        For the passes, from and to; the work between them is not counted.
    """

    row_blocks: int
    block_rows: int
    block_nbytes: int
    worker_nbytes: int
    keeping_nbytes: int
    driver_nbytes: int
    directions: int
    assembled: bool
    passes: tuple[int, int]
    seconds_per_pass: float
    seconds: tuple[float, float]


def plan_training(data: Dataset, *, workers: int = 1, threads: int = 1, factor_memory: int = 2**31) -> Plan:
    """Plan a fit of the square loss with corrective steps.

    A worker of t threads needs (W + t (4 B + 9 R)) / 0.8 bytes: W = 200 MiB for itself, B the row block,
    R what a task returns at most (the gradient, or what a block of directions asks for), and Dask pauses a
    worker at 80 % of its limit; a copy of the factors, 8 r (D + L) for rank r, comes on top. The time of a
    pass is that of a row block, times their number, divided by all threads.

    Parameters
    ----------
    data : Dataset
    workers, threads : int
        Worker processes, and threads of each.
    factor_memory : int
        Bytes for factors and statistics.

    Examples
    --------
    >>> import numpy as np
    >>> from dswml.sources import as_dataset
    >>> plan = plan_training(as_dataset(np.eye(50), np.eye(50, dtype=int)), workers=2)
    >>> plan.row_blocks, plan.block_rows, plan.assembled, plan.passes
    (1, 50, True, (5, 19))
    """
    if workers < 1 or threads < 1:
        raise UsageError(f"workers and threads must be at least 1; got {workers} and {threads}")
    data.check()
    square = has_square(data.n_features, data.n_labels, data.is_sparse)
    cap, place = plan_directions(data.n_rows, data.n_features, np.asarray(data.label_counts), factor_memory)
    grams = int(np.count_nonzero(place >= 0)) * cap
    results = result_nbytes(data.n_features, data.n_labels, factor_memory, square=square, grams=grams)
    least = WORKER_BYTES + threads * task_nbytes(data.block_nbytes, results)
    rows = data.block_nbytes * len(data.blocks)
    kept = max(rows / FEATURES_SHARE, rows + data.n_rows * min(cap, TYPICAL_DIRECTIONS) * 8)
    assembled = is_assembled(data.n_features, data.n_labels)
    passes = PASSES[assembled]
    per_block = _seconds_per_block(data, assembled)
    per_pass = per_block * -(-len(data.blocks) // (workers * threads))
    return Plan(
        row_blocks=len(data.blocks),
        block_rows=max(block.n_rows for block in data.blocks),
        block_nbytes=data.block_nbytes,
        worker_nbytes=int(least / PAUSED_AT),
        keeping_nbytes=int((least + kept / workers) / WORKER_SHARE),
        driver_nbytes=factor_memory,
        directions=cap,
        assembled=assembled,
        passes=passes,
        seconds_per_pass=per_pass,
        seconds=(passes[0] * per_pass, passes[1] * per_pass),
    )


def _seconds_per_block(data: Dataset, assembled: bool) -> float:
    """Median time of a task that reads a row block, takes up directions and yields a gradient's part."""
    dtype = "float64" if data.is_sparse else str(data.x_dtype)
    source = BlockSource(data, uuid.uuid4().hex, dtype, cache="none")
    rng = np.random.default_rng(0)
    width = min(MIN_BLOCK, data.n_features, data.n_labels)
    basis = np.linalg.qr(rng.standard_normal((data.n_features, width)))[0]
    request = Sweep(
        source,
        basis=("timed",),
        p0=0.5,
        mt=rng.standard_normal((data.n_labels, width)) / data.n_labels,
        grow=width,
        assemble=assembled,
        right=None if assembled else rng.standard_normal((data.n_labels, width)),
    )
    seconds = []
    with one_blas_thread():
        for block in [data.blocks[0], *data.blocks[-TIMED_BLOCKS:]]:  # the first also compiles
            started = time.perf_counter()
            sweep_block(block, request, basis)
            seconds.append(time.perf_counter() - started)
    forget_run(source.run)
    return float(np.median(seconds[1:]))
