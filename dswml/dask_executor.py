"""Runs the work on a Dask cluster: the same functions, the same tree, the same bits.

Tasks are pure functions of an item and of values sent to all workers beforehand, so nothing
that a worker holds is irreplaceable: what the cluster loses and cannot rebuild by itself is
submitted again.
"""

from __future__ import annotations

import errno
import time
import uuid
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle, islice, zip_longest
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import dask
from dask._task_spec import Task, TaskRef
from dask.utils import funcname
from distributed import Client, Future
from distributed.client import FutureCancelledError, FuturesCancelledError
from distributed.comm.core import CommClosedError
from distributed.scheduler import KilledWorker

from .broadcast import LOOK_EVERY, Broadcast, SendError, wait_for
from .dask_graph import add_leaves, add_tree, at_home, following_leaves
from .errors import ClusterError
from .executor import (
    Combine,
    Executor,
    Function,
    HomesLostError,
    OnResult,
    Shared,
    available_memory,
)
from .placement import place

__all__ = ["PAUSED_AT", "WORKER_BYTES", "DaskExecutor"]

T = TypeVar("T")
R = TypeVar("R")

#: How a lost result shows itself; the call is then made again.
LOST = (FutureCancelledError, FuturesCancelledError, KilledWorker, CommClosedError, SendError)
#: How often a call is made without any progress before the cluster counts as lost. In each of them
#: Dask tries a task whose worker dies on four workers (``allowed-failures``).
ATTEMPTS = 3
#: Seconds between two reports of progress.
REPORT_EVERY = 0.2
#: Share of its memory limit at which a worker is paused, and bytes that it takes before any task does.
PAUSED_AT = 0.8
WORKER_BYTES = 200 * 2**20
#: Seconds that a scheduler may take to answer, and that workers may take to be told something.
ANSWER_SECONDS = 60.0
TELL_SECONDS = 10.0


class DaskExecutor(Executor):
    """Runs the work on the workers of a Dask client.

    A lost worker costs nothing but time. A call ends in a `ClusterError` when the scheduler is
    lost (within seconds; a minute if it only stops answering), when no worker has been fit for
    work for ``worker_timeout`` seconds, or when the same work was lost three times.

    Parameters
    ----------
    client : distributed.Client
        A connected client; it is left open.
    worker_timeout : float
        Seconds to wait for a first worker, or for others when all are gone or paused.
    """

    def __init__(self, client: Client, worker_timeout: float = 300.0) -> None:
        self.client = client
        self.worker_timeout = worker_timeout
        self._broadcast = Broadcast(client, self._workers)
        self._homes: dict[int, tuple[str, ...]] = {}
        self._anchors: dict[str, Future[Any]] = {}

    @property
    def n_slots(self) -> int:  # type: ignore[override]
        return max(sum(self._workers().values()), 1)

    @property
    def n_processes(self) -> int:
        return len(self._workers())

    def homes(self, count: int, before: Sequence[str] = ()) -> tuple[str, ...]:
        workers = self._wait_for_workers()
        # Neighbours are alike in size, so they are dealt out in turn.
        return place(count, workers, before or tuple(islice(cycle(sorted(workers)), count)))

    def at_homes(
        self,
        function: Function[R],
        homes: Sequence[str],
        payload: Any = None,
        values: Callable[[int], Any] | None = None,
    ) -> list[R]:
        threads = self._wait_for_workers()
        numbers: dict[str, list[int]] = {home: [] for home in homes}
        for number, home in enumerate(homes):
            numbers[home].append(number)
        # What is for one number alone travels one a worker at a time, so that nobody holds all of it.
        turns: list[list[list[int]]] = [
            [
                own[k :: threads.get(home, 1)]
                for home, own in numbers.items()
                for k in range(threads.get(home, 1))
            ]
        ]
        if values is not None:
            turns = [[[each] for each in turn if each is not None] for turn in zip_longest(*numbers.values())]
        results: dict[int, R] = {}
        try:
            for turn in turns:
                results |= self._at_homes(function, [own for own in turn if own], homes, payload, values)
        except LOST as error:
            if self.client.status != "running":
                raise self._unreachable() from error
            raise HomesLostError from error
        return [results[number] for number in range(len(homes))]

    def _at_homes(
        self,
        function: Function[R],
        shares: Sequence[list[int]],
        homes: Sequence[str],
        payload: Any,
        values: Callable[[int], Any] | None,
    ) -> dict[int, R]:
        """Call the function for some of the numbers, each share of them in one task."""

        def look() -> None:
            gone = set(homes).difference(self._workers(paused=True))
            if gone:
                raise HomesLostError(f"{', '.join(sorted(gone))} left with what it held")

        look()
        graph: dict[str, Task] = {}
        name = f"{funcname(function)}-{uuid.uuid4().hex}"
        keys = {f"{name}-{own[0]}": own for own in shares}
        sent: list[Future[Any]] = []
        for key, own in keys.items():
            if values is not None:
                sent.append(self._broadcast.send(values(own[0]), home=homes[own[0]]))
            graph[key] = Task(
                key, at_home, function, own, payload, *(TaskRef(each.key) for each in sent[-1:])
            )
        futures = self._submit(graph, list(keys), list(keys), homes, strict=True)
        results: dict[int, R] = {}
        try:
            for key in self._as_finished(futures, look=look):
                results |= zip(keys[key], self._result(futures[key]), strict=True)
                futures.pop(key).release()
        finally:
            _release(futures)
        return results

    def map(
        self,
        function: Function[R],
        items: Sequence[T],
        payload: Any = None,
        *,
        on_result: OnResult[R] | None = None,
    ) -> list[R]:
        results: dict[int, R] = {}

        def attempt() -> list[R]:
            todo = [index for index in range(len(items)) if index not in results]
            workers = self._wait_for_workers()
            sent = self._broadcast.send(payload)
            graph: dict[str, Task] = {}
            homes = self._place(len(todo), workers)
            chosen = [items[index] for index in todo]
            leaves = add_leaves(graph, function, chosen, [sent], [payload], following_leaves(homes, workers))
            futures = self._submit(graph, leaves, leaves, homes)
            try:
                indices = dict(zip(leaves, todo, strict=True))
                for key in self._as_finished(futures):
                    index = indices[key]
                    results[index] = self._result(futures[key])
                    futures.pop(key).release()
                    if on_result is not None:
                        on_result(index, results[index])
            finally:
                _release(futures)
            return [results[index] for index in range(len(items))]

        return self._insist(attempt, lambda: len(results))

    def reduce(
        self,
        function: Function[R],
        combine: Combine[R],
        items: Sequence[T],
        payload: Any = None,
        shared: Sequence[Shared] = (),
        *,
        on_result: Callable[[int], None] | None = None,
    ) -> R:
        values = [payload, *(piece.value for piece in shared)]

        def attempt() -> R:
            workers = self._wait_for_workers()
            sent = [self._broadcast.send(payload), *self._broadcast.send_once(shared)]
            graph: dict[str, Task] = {}
            homes = self._place(len(items), workers)
            leaves = add_leaves(graph, function, items, sent, values, following_leaves(homes, workers))
            root = add_tree(graph, combine, leaves)
            wanted = [root] if on_result is None else [root, *leaves]
            futures = self._submit(graph, leaves, wanted, homes)
            try:
                report = None
                if on_result is not None:
                    progress = _Progress(on_result, root)
                    for key in leaves:
                        futures[key].add_done_callback(progress.count)
                    report = progress.report
                for _ in self._as_finished({root: futures[root]}, report):
                    pass
                result: R = self._result(futures[root])
                return result
            finally:
                _release(futures)

        return self._insist(attempt)

    def forget(self, keys: Iterable[str]) -> None:
        self._broadcast.forget(keys)

    def everywhere(self, function: Callable[..., object], *arguments: Any) -> None:
        if self.client.status != "running":
            return  # a cluster that is gone has nothing left to be told
        with suppress(OSError, TimeoutError):
            self.client.sync(
                self.client._run, function, *arguments, on_error="ignore", callback_timeout=TELL_SECONDS
            )

    def memory_per_slot(self) -> int:
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return min((_room(worker) // worker["nthreads"] for worker in workers), default=0)

    def close(self) -> None:
        self._broadcast.close()
        self._anchors.clear()

    # Submitting

    def _place(self, count: int, workers: Mapping[str, int]) -> tuple[str, ...]:
        """Return the worker of every leaf: the one that it went to before."""
        homes = self._homes[count] = place(count, workers, self._homes.get(count, ()))
        return homes

    def _submit(
        self,
        graph: dict[str, Task],
        leaves: list[str],
        wanted: list[str],
        homes: Sequence[str],
        strict: bool = False,
    ) -> dict[str, Future[Any]]:
        """Submit all tasks in one message, every leaf to its worker; to no other if that is strict."""
        self._anchor(graph)
        names = sorted(set(homes))
        numbers = {name: number for number, name in enumerate(names)}
        places = array("I", (numbers[home] for home in homes))
        prefix = leaves[0].rpartition("-")[0] if leaves else ""

        # The scheduler keeps these functions for its last hundred graphs: so they hold little.
        def home(key: str) -> list[str]:
            begin, _, number = key.rpartition("-")
            return [names[places[int(number)]]] if begin == prefix else []

        def order(key: str) -> int:
            begin, _, number = key.rpartition("-")
            return -int(number) - 1 if begin == prefix else 0

        bound = strict or not any(
            graph[leaf].args[3] for leaf in leaves
        )  # else they go where their results are
        where = {"workers": home, "allow_other_workers": not strict} if bound else {}
        with dask.annotate(priority=order, **where):
            futures: list[Future[Any]] = self.client.get(graph, wanted, sync=False)
        return dict(zip(wanted, futures, strict=True))

    def _anchor(self, graph: Iterable[str]) -> None:
        """Keep one tiny result of every kind, so that no kind is ever without.

        The scheduler groups results by the first part of their keys. It begins a new group when one
        has become empty, and never lets go of the old one: with every pass its memory would grow.
        """
        for kind in {key.partition("-")[0] for key in graph} - self._anchors.keys():
            self._anchors[kind] = self.client.submit(_nothing, key=f"{kind}-{uuid.uuid4().hex}", pure=False)
        for kind in {"payload", "shared"} - self._anchors.keys():
            self._anchors[kind] = self._broadcast.send(None, kind)

    # Waiting

    def _insist(self, attempt: Callable[[], R], progress: Callable[[], int] = lambda: 0) -> R:
        """Make a call, and again if its results were lost, as long as that gets anywhere."""
        failures, reached = 0, 0
        while True:
            try:
                return attempt()
            except LOST as error:
                if self.client.status != "running":
                    raise self._unreachable() from error
                failures = 1 if progress() > reached else failures + 1
                reached = progress()
                if failures == ATTEMPTS:
                    raise ClusterError(
                        f"the cluster at {self._address()} lost the same work {ATTEMPTS} times, at last with "
                        f"{type(error).__name__}: look for workers that run out of memory, and give "
                        "them more or use smaller row blocks (--block-bytes)"
                    ) from error
                warnings.warn(
                    f"the cluster lost work ({type(error).__name__}); it is submitted again", stacklevel=3
                )
                self._broadcast.close()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise ClusterError(
                    f"a disk that the workers of {self._address()} write to is full "
                    f"({error.filename or error.strerror}): make room, or start workers with another "
                    "--local-directory or more memory"
                ) from error

    def _as_finished(
        self,
        futures: Mapping[str, Future[Any]],
        report: Callable[[], None] | None = None,
        look: Callable[[], object] | None = None,
    ) -> Iterator[str]:
        """Yield the keys of results as they are made, as long as there is a cluster that can make them."""
        finished: SimpleQueue[str] = SimpleQueue()
        for future in futures.values():
            future.add_done_callback(lambda each: finished.put(each.key))
        look = look or self._wait_for_workers
        looked = time.monotonic()
        for _ in range(len(futures)):
            while (key := _next(finished, LOOK_EVERY if report is None else REPORT_EVERY)) is None:
                if report is not None:
                    report()
                if time.monotonic() >= looked + LOOK_EVERY:
                    look()
                    looked = time.monotonic()
            yield key
        if report is not None:
            report()

    def _result(self, future: Future[Any]) -> Any:
        """Fetch a result that is made; it is made again if it was lost since, as long as someone can."""
        fetched = self.client.gather(future, asynchronous=True)
        return wait_for(self.client, fetched, self._wait_for_workers)

    def _wait_for_workers(self) -> dict[str, int]:
        """Return the threads of all workers that take tasks, once there are some."""
        deadline = time.monotonic() + self.worker_timeout
        while not (workers := self._workers()):
            if time.monotonic() > deadline:
                raise self._idle()
            time.sleep(0.2)
        return workers

    def _workers(self, paused: bool = False) -> dict[str, int]:
        """Return the threads of all workers; of those paused or about to leave, only if asked."""
        if self.client.status != "running":
            raise self._unreachable()
        scheduler = self.client.scheduler
        try:
            workers: dict[str, int] = self.client.sync(
                scheduler.ncores if paused else scheduler.ncores_running, callback_timeout=ANSWER_SECONDS
            )
        except (OSError, TimeoutError) as error:
            raise self._unreachable() from error
        return workers

    def _address(self) -> str:
        return str(getattr(self.client.scheduler, "address", "unknown address"))

    def _unreachable(self) -> ClusterError:
        return ClusterError(
            f"the scheduler at {self._address()} cannot be reached any more: check it, and start again"
        )

    def _idle(self) -> ClusterError:
        waited = f"for {self.worker_timeout:.0f} s"
        paused = len(self.client.nthreads())
        if paused:
            return ClusterError(
                f"all {paused} workers of the scheduler at {self._address()} have taken no task {waited}, as "
                "workers do whose memory is full: give them more, or use smaller row blocks (--block-bytes)"
            )
        return ClusterError(
            f"the scheduler at {self._address()} has had no worker {waited}: "
            "start workers with 'dask worker ADDRESS'"
        )


class _Progress:
    """Counts the leaves that are done, on the client's own thread, and lets go of them."""

    def __init__(self, on_result: Callable[[int], None], root: str) -> None:
        self.done = self.reported = 0
        self._on_result, self._root = on_result, root

    def count(self, leaf: Future[Any]) -> None:
        self.done += 1
        if leaf.key != self._root:
            leaf.release()

    def report(self) -> None:
        done = self.done
        if done > self.reported:
            self.reported = done
            self._on_result(done)


def _room(worker: Mapping[str, Any]) -> int:
    """Bytes that a worker has for its tasks before it is paused, beside its own code."""
    if not worker["memory_limit"]:
        return available_memory()
    return max(int(PAUSED_AT * worker["memory_limit"]) - WORKER_BYTES, 1024)


def _next(finished: SimpleQueue[str], seconds: float) -> str | None:
    try:
        return finished.get(timeout=seconds)
    except Empty:
        return None


def _release(futures: Mapping[str, Future[Any]]) -> None:
    """Let go of results now: an exception's traceback could hold the futures, and the work go on."""
    for future in futures.values():
        future.release()


def _nothing() -> None:
    pass
