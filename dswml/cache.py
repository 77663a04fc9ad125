"""What a process keeps of the row blocks it works on, within a limit of bytes.

Everything in here can be rebuilt from the store and the basis, so losing it, or having no
room for it, costs time and nothing else. A training pass walks over all blocks in turn,
which would make a least-recently-used cache miss every time; so what is in stays in, and
what finds no room is not kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import psutil
from distributed import Status, Worker

from .blocks import DEFAULT_BLOCK_BYTES
from .errors import UsageError
from .executor import ARITY, Executor, available_memory

__all__ = [
    "FEATURES_SHARE",
    "WORKER_SHARE",
    "BlockCache",
    "ReadAhead",
    "check_room",
    "forget_run",
    "process_cache",
    "read_ahead",
    "task_nbytes",
]

#: Share of a worker's memory limit that is filled, with its code, the blocks in hand and the cache; at
#: 60 % Dask begins to move results to disk, at 80 % the worker is paused.
WORKER_SHARE = 0.55
#: Row blocks that a thread has in memory at a time: the rows, those read ahead and their chunks, Z.
BLOCKS_IN_HAND = 4
#: Share of the free memory that is kept in a process that is no worker.
FREE_SHARE = 0.4
#: Share of the cache that X may take, so that the smaller and more useful rest always finds room.
FEATURES_SHARE = 0.6


class BlockCache:
    """Values by (run, block, kind), never more than ``limit`` bytes of them.

    Examples
    --------
    >>> cache = BlockCache(limit=100)
    >>> cache.put("run", 0, "y", "labels", 60), cache.put("run", 1, "y", "labels", 60)
    (True, False)
    >>> cache.get("run", 0, "y")
    'labels'
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}

    @property
    def used(self) -> int:
        """Bytes that are kept."""
        return sum(run.nbytes for run in list(self._runs.values()))

    def get(self, run: str, block: int, kind: str) -> Any:
        """Return the value, or None."""
        with self._lock:
            kept = self._runs.get(run)
            return None if kept is None else kept.values.get((block, kind), (None, 0))[0]

    def put(self, run: str, block: int, kind: str, value: Any, nbytes: int, reserve: int = 0) -> bool:
        """Keep the value if there is room, at the cost of other runs but not of this one.

        A value that finds no room leaves the one before it in its place. ``reserve`` bytes of the limit
        are left to other uses.
        """
        with self._lock:
            mine = self._runs.pop(run, None) or _Run()
            self._runs[run] = mine  # the run used last stands last
            added = nbytes - mine.values.get((block, kind), (None, 0))[1]
            room = max(self.limit - reserve, 0) * (FEATURES_SHARE if kind == "x" else 1.0)
            if mine.nbytes + added > room:
                return False
            while self.used + added > room:
                del self._runs[next(iter(self._runs))]
            mine.values[block, kind] = (value, nbytes)
            mine.nbytes += added
            return True

    def forget(self, run: str) -> None:
        """Drop everything kept for a run."""
        with self._lock:
            self._runs.pop(run, None)


@dataclass
class _Run:
    """What is kept for one run: values with their sizes, and the sum of these."""

    values: dict[tuple[int, str], tuple[Any, int]] = field(default_factory=dict)
    nbytes: int = 0


class ReadAhead:
    """Reads what the threads of this process will ask for next while they work, one value a thread at most.

    Examples
    --------
    >>> ahead = ReadAhead()
    >>> ahead.start(("run", 1), lambda: "rows")
    >>> ahead.take(("run", 1), lambda: "rows, read now"), ahead.take(("run", 1), lambda: "rows, read now")
    ('rows', 'rows, read now')
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._values: dict[tuple[str, int], Future[Any]] = {}

    def start(self, key: tuple[str, int], read: Callable[[], Any]) -> None:
        """Begin to read on a thread of its own; what nobody has come for is dropped, oldest first."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                value = read()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        with self._lock:
            self._threads.add(threading.current_thread())
            self._values[key] = future
            while len(self._values) > len(self._threads):
                del self._values[next(iter(self._values))]
        threading.Thread(target=run, name="dswml-read-ahead", daemon=True).start()

    def take(self, key: tuple[str, int], read: Callable[[], Any]) -> Any:
        """Return what was read ahead, whichever thread began it, or read it now."""
        with self._lock:
            future = self._values.pop(key, None)
        return read() if future is None else future.result()

    def forget(self, run: str) -> None:
        """Drop what was read ahead for a run."""
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if key[0] != run}


_lock = threading.Lock()
_ahead = ReadAhead()
_cache: BlockCache | None = None


def task_nbytes(block_nbytes: int, result_nbytes: int = 0) -> int:
    """Bytes that a task takes at most: row blocks in hand, or the results that it adds up.

    Examples
    --------
    >>> task_nbytes(64 * 2**20, 32 * 2**20) // 2**20
    544
    """
    return BLOCKS_IN_HAND * block_nbytes + (ARITY + 1) * result_nbytes


def check_room(block_nbytes: int, executor: Executor, result_nbytes: int = 0) -> None:
    """Refuse tasks that the workers have no memory for: they would pause, and the job hang.

    Parameters
    ----------
    block_nbytes : int
        Bytes of the largest row block.
    executor : Executor
        Who will work on them.
    result_nbytes : int
        Bytes of what a task returns.
    """
    room = executor.memory_per_slot()
    needed = task_nbytes(block_nbytes, result_nbytes)
    if 0 < room < needed:
        fitting = max(room - task_nbytes(0, result_nbytes), 0) // BLOCKS_IN_HAND // 2**20
        advice = f"use smaller blocks (--block-bytes '{fitting} MiB') or " if fitting else ""
        raise UsageError(
            f"row blocks of {block_nbytes / 2**20:.0f} MiB and results of {result_nbytes / 2**20:.0f} MiB "
            f"take {needed / 2**20:.0f} MiB to work on, but a thread of the smallest worker has "
            f"{room / 2**20:.0f} MiB for them: {advice}give the workers more memory or fewer threads"
        )


def process_cache() -> BlockCache:
    """Return the cache of this process, limited by the memory there is when it is first asked for."""
    global _cache
    with _lock:
        if _cache is None:
            _cache = BlockCache(_room())
        return _cache


def read_ahead() -> ReadAhead:
    """Return what this process reads ahead."""
    return _ahead


def forget_run(run: str) -> None:
    """Drop everything that this process keeps for a run, if it keeps anything."""
    _ahead.forget(run)
    with _lock:
        cache = _cache
    if cache is not None:
        cache.forget(run)


def _room() -> int:
    """Bytes that the process may keep: of its Dask worker's limit if it is one, else of what is free.

    The threads of a fit inside a task are not the task's own, so the worker is looked for in the
    process, not in the thread.
    """
    workers = [
        worker
        for worker in Worker._instances
        if worker.status != Status.closed and worker.memory_manager.memory_limit
    ]
    if not workers:
        return int(min(available_memory(), psutil.virtual_memory().available) * FREE_SHARE)
    limit = min(int(worker.memory_manager.memory_limit) for worker in workers)
    threads = sum(worker.state.nthreads for worker in workers)
    taken = int(psutil.Process().memory_info().rss) + int(threads) * BLOCKS_IN_HAND * DEFAULT_BLOCK_BYTES
    return max(int(limit * WORKER_SHARE) - taken, 0)
