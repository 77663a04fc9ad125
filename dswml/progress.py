"""Tells a person how far a long verb has come: a bar on a terminal, lines elsewhere, nothing when quiet."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from dswml.executor import Executor, Shared

__all__ = [
    "LINE_SECONDS",
    "OnProgress",
    "format_seconds",
    "in_job",
    "is_silent",
    "note",
    "noting",
    "reporting",
    "show_progress",
]

#: ``on_progress(phase, done, total)``: what every long function of the package reports.
OnProgress = Callable[[str, int, int], None]

#: Seconds between two lines where there is no terminal.
LINE_SECONDS = 5.0

#: Who is told of figures, if this process runs a job.
_tell: Callable[..., None] | None = None


@contextmanager
def noting(tell: Callable[..., None]) -> Iterator[None]:
    """Pass the figures of every `note` on to ``tell``, as the process of a job does."""
    global _tell
    before, _tell = _tell, tell
    try:
        yield
    finally:
        _tell = before


def note(**figures: Any) -> None:
    """Tell how far the work has come, in figures, to whoever looks after this process.

    Examples
    --------
    >>> note(passes=1)
    >>> with noting(lambda **figures: print(figures)):
    ...     note(passes=2)
    {'passes': 2}
    """
    if _tell is not None:
        _tell(**figures)


def in_job() -> bool:
    """Tell whether this process runs a job."""
    return _tell is not None


def is_silent(quiet: bool, as_json: bool) -> bool:
    """Tell whether a verb shows no progress: with --json too, but for jobs, whose progress is their log."""
    return quiet or (as_json and not in_job())


def format_seconds(seconds: float) -> str:
    """Write a duration for people.

    Examples
    --------
    >>> format_seconds(4.2), format_seconds(75), format_seconds(7300)
    ('4 s', '1 min 15 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Lines:
    """A line for the first, the last and every few seconds' report of a phase."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._started: dict[str, float] = {}
        self._last_line = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        first = phase not in self._started
        started = self._started.setdefault(phase, now)
        if not first and done < total and now - self._last_line < LINE_SECONDS:
            return
        self._last_line = now
        note(phase=phase, done=done, total=total)
        line = f"{phase}: {done}/{total}"
        if done >= total:
            line += f", {format_seconds(now - started)}"
        elif done and not first:
            line += f", about {format_seconds((now - started) * (total - done) / done)} left"
        print(line, file=self._stream, flush=True)


@contextmanager
def _bars(stream: TextIO) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done, total=total)

        yield report


class _Reporting(Executor):
    """An executor that tells of every item it has done."""

    def __init__(self, executor: Executor, phase: str, on_progress: OnProgress) -> None:
        self._executor = executor
        self._phase = phase
        self._on_progress = on_progress
        self.n_slots = executor.n_slots

    def map(self, function: Any, items: Sequence[Any], payload: Any = None, *, on_result: Any = None) -> Any:
        finished = itertools.count(1)

        def report(index: int, result: Any) -> None:
            self._on_progress(self._phase, next(finished), len(items))
            if on_result is not None:
                on_result(index, result)

        self._on_progress(self._phase, 0, len(items))
        return self._executor.map(function, items, payload, on_result=report)

    def reduce(
        self,
        function: Any,
        combine: Any,
        items: Sequence[Any],
        payload: Any = None,
        shared: Sequence[Shared] = (),
        *,
        on_result: Any = None,
    ) -> Any:
        def report(done: int) -> None:
            self._on_progress(self._phase, done, len(items))
            if on_result is not None:
                on_result(done)

        self._on_progress(self._phase, 0, len(items))
        return self._executor.reduce(function, combine, items, payload, shared, on_result=report)

    def memory_per_slot(self) -> int:
        return self._executor.memory_per_slot()

    def forget(self, keys: Iterable[str]) -> None:
        self._executor.forget(keys)

    def everywhere(self, function: Any, *arguments: Any) -> None:
        self._executor.everywhere(function, *arguments)

    @property
    def n_processes(self) -> int:
        return self._executor.n_processes

    def homes(self, count: int, before: Sequence[str] = ()) -> tuple[str, ...]:
        return self._executor.homes(count, before)

    def at_homes(
        self,
        function: Callable[..., Any],
        homes: Sequence[str],
        payload: Any = None,
        values: Callable[[int], Any] | None = None,
    ) -> list[Any]:
        return self._executor.at_homes(function, homes, payload, values)

    def close(self) -> None:
        self._executor.close()


def reporting(executor: Executor, phase: str, on_progress: OnProgress | None) -> Executor:
    """Return the executor, telling ``on_progress`` of every item that it has done.

    Examples
    --------
    >>> from dswml.executor import InProcessExecutor
    >>> with InProcessExecutor(1) as executor:
    ...     reporting(executor, "adding", lambda *report: print(*report)).map(lambda i, _: i + 1, [1, 2])
    adding 0 2
    adding 1 2
    adding 2 2
    [2, 3]
    """
    return executor if on_progress is None else _Reporting(executor, phase, on_progress)


@contextmanager
def show_progress(
    *,
    quiet: bool = False,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnProgress | None]:
    """Yield an `OnProgress` that shows on ``stream`` (standard error), or None when quiet.

    Examples
    --------
    >>> with show_progress(stream=sys.stdout, clock=iter([0.0, 9.0, 30.0]).__next__) as on_progress:
    ...     for done in (0, 30, 100):
    ...         on_progress("writing rows", done, 100)
    writing rows: 0/100
    writing rows: 30/100, about 21 s left
    writing rows: 100/100, 30 s
    """
    if quiet:
        yield None
        return
    stream = stream or sys.stderr
    if stream.isatty():
        with _bars(stream) as report:
            yield report
    else:
        yield _Lines(stream, clock)
