"""Runs the work on a Dask cluster: the same functions, the same tree, the same bits.

Tasks are pure functions of an item and of values sent to all workers beforehand, so nothing
that a worker holds is irreplaceable: what the cluster loses and cannot rebuild by itself is
submitted again.
"""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import Client, Future, get_worker
from distributed.client import FutureCancelledError, FuturesCancelledError
from distributed.comm.core import CommClosedError
from distributed.scheduler import KilledWorker

from .errors import ClusterError
from .executor import (
    ARITY,
    Combine,
    Executor,
    Function,
    InProcessExecutor,
    OnResult,
    Shared,
    available_memory,
    one_blas_thread,
)

if TYPE_CHECKING:
    from .stored import Dataset

__all__ = ["DaskExecutor", "current_executor"]

T = TypeVar("T")
R = TypeVar("R")

#: How a lost result shows itself; the call is then made again.
LOST = (FutureCancelledError, FuturesCancelledError, KilledWorker, CommClosedError)
#: How often a call is made again before the cluster counts as lost.
ATTEMPTS = 5
#: Seconds between two looks at whether the cluster is still there.
LOOK_EVERY = 2.0


def current_executor(data: Dataset) -> Executor:
    """Return what runs the work on ``data``: the current Dask client's cluster, or this process.

    Arrays in this process's memory are worked on here: they fit, and shipping them would cost
    more than the work. Inside a task of a worker the cluster is used only through
    `distributed.worker_client`, since waiting for it otherwise could block it for good.
    """
    client: Client | None
    try:
        get_worker()
        in_task = True
    except ValueError:
        in_task = False
    try:
        client = Client.current(allow_global=not in_task)
    except ValueError:
        client = None
    if client is None or client.asynchronous or not data.travels:
        return InProcessExecutor()
    return DaskExecutor(client)


class DaskExecutor(Executor):
    """Runs the work on the workers of a Dask client.

    Parameters
    ----------
    client : distributed.Client
        A connected client; it is left open.
    worker_timeout : float
        Seconds to wait for a first worker, or for new ones when all are gone.
    """

    def __init__(self, client: Client, worker_timeout: float = 300.0) -> None:
        self.client = client
        self.worker_timeout = worker_timeout
        self._shared: dict[str, Future[Any]] = {}

    @property
    def n_slots(self) -> int:  # type: ignore[override]
        return max(sum(self._workers().values()), 1)

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
            sent = self._send(payload)
            futures = self._submit(function, [items[index] for index in todo], [sent])
            for index, future in zip(todo, futures, strict=True):
                results[index] = self._result(future)
                if on_result is not None:
                    on_result(index, results[index])
            return [results[index] for index in range(len(items))]

        return self._insist(attempt)

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
        def attempt() -> R:
            arguments = [self._send(payload), *(self._send_once(piece) for piece in shared)]
            counter = _Counter()
            root = self._submit_tree(function, combine, items, arguments, counter)
            look = None if on_result is None else lambda: on_result(counter.value)
            result: R = self._result(root, look)
            return result

        return self._insist(attempt)

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._shared.pop(key, None)

    def memory_per_slot(self) -> int:
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return min(
            ((worker["memory_limit"] or available_memory()) // worker["nthreads"] for worker in workers),
            default=0,
        )

    def close(self) -> None:
        self._shared.clear()

    # Submitting

    def _send(self, value: Any) -> Future[Any]:
        """Put a value on all workers, so that it survives any of them and no graph carries it."""
        self._wait_for_workers()
        (future,) = self.client.scatter([value], broadcast=True, hash=False)
        return future

    def _send_once(self, piece: Shared) -> Future[Any]:
        future = self._shared.get(piece.key)
        if future is None or future.status != "finished":
            future = self._shared[piece.key] = self._send(piece.value)
        return future

    def _submit(
        self, function: Function[R], items: Sequence[T], arguments: list[Future[Any]]
    ) -> list[Future[R]]:
        """Submit a task an item; neighbours go to one worker, the same at every call, if it is free."""
        workers = sorted(self._workers())
        name = f"{function.__name__}-{uuid.uuid4().hex}"
        return [
            self.client.submit(
                _call,
                function,
                item,
                *arguments,
                key=f"{name}-{index}",
                workers=workers[index * len(workers) // len(items)] if workers else None,
                allow_other_workers=bool(workers),
                pure=False,
            )
            for index, item in enumerate(items)
        ]

    def _submit_tree(
        self,
        function: Function[R],
        combine: Combine[R],
        items: Sequence[T],
        arguments: list[Future[Any]],
        counter: _Counter,
    ) -> Future[R]:
        level: list[Future[R]] = self._submit(function, items, arguments)
        for leaf in level:
            leaf.add_done_callback(counter)
        while len(level) > 1:
            # A node outranks the leaves, so that sums are made as soon as they can be.
            level = [
                self.client.submit(_combine, combine, level[start : start + ARITY], priority=10, pure=False)
                if start + 1 < len(level)
                else level[start]
                for start in range(0, len(level), ARITY)
            ]
        return level[0]

    # Waiting

    def _insist(self, attempt: Callable[[], R]) -> R:
        for remaining in reversed(range(ATTEMPTS)):
            try:
                return attempt()
            except LOST as error:
                self._shared.clear()
                if self.client.status != "running":
                    raise self._unreachable() from error
                if not remaining:
                    raise ClusterError(
                        f"the cluster at {self._address()} lost the same work {ATTEMPTS} times, at last with "
                        f"{type(error).__name__}: look for workers that run out of memory, and give "
                        "them more or use smaller row blocks (--block-bytes)"
                    ) from error
                warnings.warn(
                    f"the cluster lost work ({type(error).__name__}); it is submitted again", stacklevel=2
                )
        raise AssertionError("unreachable")

    def _result(self, future: Future[Any], on_look: Callable[[], None] | None = None) -> Any:
        finished = Event()
        future.add_done_callback(lambda _: finished.set())
        while not finished.wait(LOOK_EVERY if on_look is None else 0.2):
            if on_look is not None:
                on_look()
            if self.client.status != "running":
                raise self._unreachable()
            if not self._workers():
                self._wait_for_workers()
        if on_look is not None:
            on_look()
        return future.result()

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + self.worker_timeout
        while not self._workers():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the scheduler at {self._address()} has had no worker for {self.worker_timeout:.0f} s: "
                    "start workers with 'dask worker ADDRESS'"
                )
            time.sleep(0.2)

    def _workers(self) -> dict[str, int]:
        try:
            workers: dict[str, int] = self.client.nthreads()
        except (OSError, *LOST) as error:
            raise self._unreachable() from error
        return workers

    def _address(self) -> str:
        return str(getattr(self.client.scheduler, "address", "unknown address"))

    def _unreachable(self) -> ClusterError:
        return ClusterError(
            f"the scheduler at {self._address()} cannot be reached any more: check it, and start again"
        )


class _Counter:
    """Counts tasks that are done, on the client's own thread."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = Lock()

    def __call__(self, _: Any) -> None:
        with self._lock:
            self.value += 1


def _call(function: Function[R], item: Any, *arguments: Any) -> R:
    with one_blas_thread():
        return function(item, *arguments)


def _combine(combine: Combine[R], results: list[R]) -> R:
    with one_blas_thread():
        return combine(results)
