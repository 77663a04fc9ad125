"""Who runs the work: one small interface, and the executor that runs it in this process.

Work is a pure ``function(item, payload, *shared)`` over a sequence of small items.
`Executor.map` returns the results in the order of the items; `Executor.reduce` combines
them in a tree whose shape depends on the number of items alone, so that every executor,
whatever its number of workers and the order in which they finish, returns the same bits.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import psutil
from threadpoolctl import ThreadpoolController

__all__ = [
    "ARITY",
    "Executor",
    "HomesLostError",
    "InProcessExecutor",
    "Shared",
    "available_memory",
    "expecting",
    "following_item",
    "lend",
    "lent_results",
    "needs_of",
    "one_blas_thread",
    "share_out",
    "tree_combine",
]

T = TypeVar("T")
R = TypeVar("R")

Function = Callable[..., R]
Combine = Callable[[list[R]], R]
OnResult = Callable[[int, R], None]

#: Children of a node of the reduction tree.
ARITY = 8


@dataclass(frozen=True)
class Shared:
    """A value that many calls of `Executor.reduce` need: sent to the workers once, under its key."""

    key: str
    value: Any


class HomesLostError(Exception):
    """A process that held something is gone, or holds it no more."""


class Executor(ABC):
    """Runs pure functions over numbered items, anywhere."""

    #: Number of tasks that can run at once.
    n_slots: int = 1

    @property
    def n_processes(self) -> int:
        """Number of processes besides this one that work."""
        return 0

    @abstractmethod
    def map(
        self,
        function: Function[R],
        items: Sequence[T],
        payload: Any = None,
        *,
        on_result: OnResult[R] | None = None,
    ) -> list[R]:
        """Return ``[function(item, payload) for item in items]``.

        ``on_result(index, result)`` is called in this thread as results arrive, in any order.
        """

    @abstractmethod
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
        """Combine ``function(item, payload, *shared_values)`` over all items in a fixed tree.

        ``on_result(number_done)`` is called in this thread as the work advances.
        """

    @abstractmethod
    def homes(self, count: int, before: Sequence[str] = ()) -> tuple[str, ...]:
        """Return a process for each of so many items, so far as possible the one that it had before."""

    @abstractmethod
    def at_homes(
        self,
        function: Function[R],
        homes: Sequence[str],
        payload: Any = None,
        values: Callable[[int], Any] | None = None,
    ) -> list[R]:
        """Return ``function(number, payload)`` of every number, called in its home and nowhere else.

        ``values(number)`` makes what only one number needs, as a third argument, when it is its turn.

        Raises
        ------
        HomesLostError
            If a home is gone.
        """

    @abstractmethod
    def forget(self, keys: Iterable[str]) -> None:
        """Drop the shared values of these keys from the workers."""

    def everywhere(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function(*arguments)`` in every process that works, now or soon."""
        function(*arguments)

    @abstractmethod
    def memory_per_slot(self) -> int:
        """Bytes of memory that one task may count on; 0 where nothing is known."""

    @abstractmethod
    def close(self) -> None:
        """Release what the executor holds; it cannot be used afterwards."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tree_combine(results: Iterable[R], combine: Combine[R]) -> R:
    """Combine consecutive groups of `ARITY`, level by level, holding few at a time.

    Examples
    --------
    >>> tree_combine(["a", "b", "c"], "".join)
    'abc'
    """
    levels: list[list[R]] = [[]]
    for result in results:
        levels[0].append(result)
        for depth, level in enumerate(levels):
            if len(level) < ARITY:
                break
            if depth + 1 == len(levels):
                levels.append([])
            levels[depth + 1].append(combine(level))
            level.clear()
    carried: list[R] = []
    for level in levels:
        level.extend(carried)
        carried = level if len(level) <= 1 else [combine(level)]
    (root,) = carried
    return root


_lent: ContextVar[Mapping[Hashable, Any]] = ContextVar("lent")


def needs_of(values: Iterable[Any], item: Any) -> tuple[Hashable, ...]:
    """Return the keys of the results held by a Dask cluster that a call will ask for.

    What reads such results says with a method ``needs(item)`` which ones an item takes. It is looked
    for in the payload, the shared values, tuples of them, and their attribute ``source``.
    """
    keys: dict[Hashable, None] = {}
    for value in values:
        if isinstance(value, tuple):
            keys.update(dict.fromkeys(needs_of(value, item)))
        elif (needs := getattr(getattr(value, "source", value), "needs", None)) is not None:
            keys.update(dict.fromkeys(needs(item)))
    return tuple(keys)


@contextmanager
def lend(results: Mapping[Hashable, Any]) -> Iterator[None]:
    """Let the code below ask for these results, by their keys, with `lent_results`."""
    token = _lent.set(results)
    try:
        yield
    finally:
        _lent.reset(token)


def lent_results() -> Mapping[Hashable, Any] | None:
    """Return the results that came with this task; None outside of an executor's task."""
    return _lent.get(None)


_following: ContextVar[Any] = ContextVar("following")


@contextmanager
def expecting(item: Any) -> Iterator[None]:
    """Let the code below know, by `following_item`, which item this thread is likely to work on next."""
    token = _following.set(item)
    try:
        yield
    finally:
        _following.reset(token)


def following_item() -> Any:
    """Return the item that comes after the current one on this thread, so far as is known, or None."""
    return _following.get(None)


#: The threads of the executor that runs this item or adds up results, and their number.
_threads: ContextVar[tuple[ThreadPoolExecutor, int] | None] = ContextVar("threads", default=None)


def share_out(function: Callable[[T], R], parts: Sequence[T]) -> list[R]:
    """Return ``[function(part) for part in parts]`` of an item, or of a sum, with the help of idle threads.

    Whoever calls works on the parts too and waits for nothing but those that others have begun, so that
    it never depends on a thread being free. On a Dask worker there is no help.

    Examples
    --------
    >>> with InProcessExecutor(threads=2) as executor:
    ...     executor.map(lambda item, payload: share_out(abs, item), [[-1, -2, -3]])
    [[1, 2, 3]]
    """
    threads = _threads.get()
    if threads is None or len(parts) < 2:
        return [function(part) for part in parts]
    pool, count = threads
    results: dict[int, R] = {}
    # Who is cancelled stays in the queue of the pool until a thread is free: it must hold nothing by then.
    shared = [(function, deque(enumerate(parts)), results)]
    helping = [pool.submit(copy_context().run, _help, shared) for _ in range(min(count, len(parts)) - 1)]
    try:
        _help(shared)
    finally:
        shared.clear()
        for each in helping:
            if not each.cancel():
                each.result()
    return [results[number] for number in range(len(parts))]


def _help(shared: list[tuple[Callable[[T], R], deque[tuple[int, T]], dict[int, R]]]) -> None:
    """Work on parts that nobody has begun, as long as there are any and the result is wanted."""
    for function, todo, results in tuple(shared):
        while shared:
            try:
                number, part = todo.popleft()
            except IndexError:  # another thread took the last one
                return
            results[number] = function(part)


def _counted(results: Iterator[R], on_result: Callable[[int], None]) -> Iterator[R]:
    for number, result in enumerate(results, start=1):
        on_result(number)
        yield result


_blas_lock = threading.Lock()
_blas_users = 0
_blas_limit: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread: tasks are the parallelism, and the bits must not depend on the cores.

    The limit is the process's, so it is lifted when the last of several concurrent users leaves.
    """
    global _blas_users, _blas_limit
    with _blas_lock:
        if _blas_users == 0:
            _blas_limit = _controller().limit(limits=1, user_api="blas")
            _blas_limit.__enter__()
        _blas_users += 1
    try:
        yield
    finally:
        with _blas_lock:
            _blas_users -= 1
            if _blas_users == 0:
                _blas_limit.__exit__(None, None, None)


@cache
def _controller() -> Any:
    return ThreadpoolController()


def available_memory() -> int:
    """Return the bytes this process may use: the machine's, or the control group's limit if lower."""
    limit = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


class InProcessExecutor(Executor):
    """Runs the work on threads of this process; the kernels release the interpreter lock.

    Parameters
    ----------
    threads : int, optional
        Number of threads; by default the number of usable cores.

    Examples
    --------
    >>> with InProcessExecutor(threads=2) as executor:
    ...     executor.reduce(lambda item, payload: item * payload, sum, range(10), 2)
    90
    """

    def __init__(self, threads: int | None = None) -> None:
        self.n_slots = threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.n_slots, thread_name_prefix="dswml")

    def _stream(self, function: Function[R], items: Sequence[T], *arguments: Any) -> Generator[R]:
        """Yield results in order, with at most two items a thread under way."""
        todo = zip(items, [*items[self.n_slots :], *[None] * self.n_slots], strict=False)
        with one_blas_thread():
            if len(items) == 1 or self.n_slots == 1:
                for item, then in todo:
                    yield self._call(function, item, then, arguments)
                return
            pending: deque[Future[R]] = deque()

            def submit(count: int) -> None:
                for item, then in islice(todo, count):
                    pending.append(self._pool.submit(self._call, function, item, then, arguments))

            try:
                submit(2 * self.n_slots)
                while pending:
                    result = pending.popleft().result()
                    submit(1)
                    yield result
            finally:
                for future in pending:
                    future.cancel()

    def _call(self, function: Function[R], item: Any, following: Any, arguments: tuple[Any, ...]) -> R:
        with expecting(following):
            return self._helped(function, item, *arguments)

    def _helped(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function that may share out its parts."""
        token = _threads.set((self._pool, self.n_slots) if self.n_slots > 1 else None)
        try:
            return function(*arguments)
        finally:
            _threads.reset(token)

    def map(
        self,
        function: Function[R],
        items: Sequence[T],
        payload: Any = None,
        *,
        on_result: OnResult[R] | None = None,
    ) -> list[R]:
        results = []
        with closing(self._stream(function, items, payload)) as stream:
            for index, result in enumerate(stream):
                if on_result is not None:
                    on_result(index, result)
                results.append(result)
        return results

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
        values = [piece.value for piece in shared]
        with closing(self._stream(function, items, payload, *values)) as stream:
            results = stream if on_result is None else _counted(stream, on_result)
            return tree_combine(results, lambda some: self._helped(combine, some))

    def homes(self, count: int, before: Sequence[str] = ()) -> tuple[str, ...]:
        return ("",) * count

    def at_homes(
        self,
        function: Function[R],
        homes: Sequence[str],
        payload: Any = None,
        values: Callable[[int], Any] | None = None,
    ) -> list[R]:
        def call(number: int, payload: Any) -> R:
            return function(number, payload, *(() if values is None else (values(number),)))

        return self.map(call, range(len(homes)), payload)

    def forget(self, keys: Iterable[str]) -> None:
        pass

    def memory_per_slot(self) -> int:
        return available_memory() // self.n_slots

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
