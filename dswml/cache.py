"""What a process keeps of the row blocks it works on, within a limit of bytes.

Everything in here can be rebuilt from the store and the basis, so losing it, or having no
room for it, costs time and nothing else. A training pass walks over all blocks in turn,
which would make a least-recently-used cache miss every time; so what is in stays in, and
what finds no room is not kept.
"""

from __future__ import annotations

import threading
from typing import Any

import psutil
from distributed import Status, Worker

from .executor import available_memory

__all__ = ["BlockCache", "forget_run", "process_cache"]

#: Share of the memory of a process that may be kept; the rest is for reading and computing.
CACHE_SHARE = 0.4
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
        self.used = 0
        self._lock = threading.Lock()
        self._runs: dict[str, dict[tuple[int, str], tuple[Any, int]]] = {}

    def get(self, run: str, block: int, kind: str) -> Any:
        """Return the value, or None."""
        with self._lock:
            entry = self._runs.get(run, {}).get((block, kind))
            return None if entry is None else entry[0]

    def put(self, run: str, block: int, kind: str, value: Any, nbytes: int) -> bool:
        """Keep the value if there is room, at the cost of other runs but not of this one."""
        with self._lock:
            mine = self._runs.pop(run, {})
            self._runs[run] = mine  # the run used last stands last
            _, before = mine.pop((block, kind), (None, 0))
            self.used -= before
            room = self.limit * (FEATURES_SHARE if kind == "x" else 1.0)
            while self.used + nbytes > room and len(self._runs) > 1:
                self._drop(next(iter(self._runs)))
            if self.used + nbytes > room:
                return False
            mine[block, kind] = (value, nbytes)
            self.used += nbytes
            return True

    def forget(self, run: str) -> None:
        """Drop everything kept for a run."""
        with self._lock:
            self._drop(run)

    def _drop(self, run: str) -> None:
        self.used -= sum(nbytes for _, nbytes in self._runs.pop(run, {}).values())


_lock = threading.Lock()
_cache: BlockCache | None = None


def process_cache() -> BlockCache:
    """Return the cache of this process, limited by the memory that was left when it was first asked for."""
    global _cache
    with _lock:
        if _cache is None:
            _cache = BlockCache(int(_free_memory() * CACHE_SHARE))
        return _cache


def forget_run(run: str) -> None:
    """Drop everything that this process keeps for a run, if it keeps anything."""
    with _lock:
        cache = _cache
    if cache is not None:
        cache.forget(run)


def _free_memory() -> int:
    """Bytes that this process may still take: up to its Dask worker's limit, if it is one.

    Work of a fit inside a task runs on threads that are not the task's, so the worker is looked for
    in the process, not in the thread.
    """
    used = int(psutil.Process().memory_info().rss)
    limits = [
        int(worker.memory_manager.memory_limit)
        for worker in Worker._instances
        if worker.status != Status.closed and worker.memory_manager.memory_limit
    ]
    if limits:
        return max(min(limits) - used, 0)
    return max(min(available_memory() - used, int(psutil.virtual_memory().available)), 0)
