"""Asks long work to stop in good order: by a signal, or by whoever runs it as a job."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["stop_when", "stoppable"]

_asked_elsewhere: ContextVar[Callable[[], bool] | None] = ContextVar("dswml_stop_when", default=None)


@contextmanager
def stoppable(announce: Callable[[str], None] | None = None) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether somebody has asked to stop.

    In the main thread the first Ctrl-C or SIGTERM asks, and the second one stops at once. In other
    threads, where Python delivers no signals, only `stop_when` does.

    Parameters
    ----------
    announce : callable, optional
        Told, in a line for people, that a signal was heard.

    Examples
    --------
    >>> with stoppable() as asked:
    ...     before = asked()
    ...     signal.raise_signal(signal.SIGTERM)
    ...     before, asked()
    (False, True)
    """
    signalled = False
    elsewhere = _asked_elsewhere.get()

    def hear(number: int, frame: Any) -> None:
        nonlocal signalled
        signalled = True
        _restore(before)
        if announce is not None:
            announce("Stopping after this iteration; once more stops at once.")

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: signalled or (elsewhere is not None and elsewhere())
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        # A handler that was not set by Python cannot be set by it either.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def stop_when(asked: Callable[[], bool]) -> Iterator[None]:
    """Let every `stoppable` within also ask this function.

    Examples
    --------
    >>> with stop_when(lambda: True), stoppable() as asked:
    ...     asked()
    True
    """
    outer = _asked_elsewhere.get()
    token = _asked_elsewhere.set(asked if outer is None else lambda: asked() or outer())
    try:
        yield
    finally:
        _asked_elsewhere.reset(token)
