"""Asking long work to stop."""

from __future__ import annotations

import signal
import threading

import pytest

from dswml.stopping import stop_when, stoppable


def test_the_first_signal_asks_and_the_second_stops_at_once() -> None:
    lines: list[str] = []
    with stoppable(lines.append) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
        assert lines == ["Stopping in good order; once more stops at once."]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_installs_no_handler_but_can_be_asked() -> None:
    wanted, answers = threading.Event(), []

    def work() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with stop_when(wanted.is_set), stoppable() as asked:
            answers.append(signal.getsignal(signal.SIGTERM) is before)
            answers.append(asked())
            wanted.set()
            answers.append(asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == [True, False, True]


def test_all_who_may_ask_are_heard_and_only_within() -> None:
    outer, inner = threading.Event(), threading.Event()
    outer.set()
    with stop_when(outer.is_set), stop_when(inner.is_set), stoppable() as asked:
        assert asked()
        outer.clear()
        assert not asked()
        inner.set()
        assert asked()
    with stoppable() as asked:
        assert not asked()
