"""Threads that do what is asked for at once and, where some of them are idle meanwhile, what can wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """A pool for work of two kinds: `map` waits for its results, and what was put off fills the gaps.

    Parameters
    ----------
    count : int

    Examples
    --------
    >>> pieces = [3, 2, 1]
    >>> with Threads(2) as threads:
    ...     threads.put_off(lambda: pieces.pop() < 3)
    ...     threads.map(abs, [-1, -2])
    ...     threads.finish()
    [1, 2]
    >>> pieces
    []
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="dswml-search")
        self._later: deque[Callable[[], bool]] = deque()
        self._filling: list[Future[None]] = []

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._later.clear()
        self._pool.shutdown(cancel_futures=True)

    def put_off(self, step: Callable[[], bool]) -> None:
        """Take work that can wait; ``step`` does a piece of it and returns whether there is more."""
        self._later.append(step)

    def map(self, function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """Return what a function makes of each of the arguments."""
        asked = [self._pool.submit(function, *each) for each in zip(*arguments, strict=True)]
        self._fill(asked, self.count - 1)
        return [each.result() for each in asked]

    def beside(self, call: Callable[[], T]) -> T:
        """Return what a call returns that is waiting for others to do its work."""
        asked: Future[None] = Future()
        self._fill([asked], self.count)
        try:
            return call()
        finally:
            asked.set_result(None)

    def finish(self) -> None:
        """Do all that was put off."""
        while self._later or self._filling:
            self._fill([Future()], self.count)
            for each in self._filling:
                each.result()
            self._filling.clear()  # whose last pieces may have been put off again meanwhile

    def _fill(self, asked: Sequence[Future[Any]], count: int) -> None:
        """Let some threads do what is put off, a piece at a time, until what was asked for is done."""
        self._filling += [self._pool.submit(self._go_on, asked) for _ in range(count)]

    def _go_on(self, asked: Sequence[Future[Any]]) -> None:
        while not all(each.done() for each in asked):
            try:
                step = self._later.popleft()
            except IndexError:
                return
            if step():
                self._later.append(step)
