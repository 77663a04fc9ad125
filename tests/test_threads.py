"""Threads of the search: results in order, gaps filled with what was put off, and no error lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dswml.threads import Threads


@pytest.fixture
def done() -> threading.Event:
    return threading.Event()


@pytest.fixture
def step(done: threading.Event) -> Callable[[], bool]:
    """Work of one piece that tells when it is done."""

    def step() -> bool:
        done.set()
        return False

    return step


def test_an_idle_thread_does_what_was_put_off(done: threading.Event, step: Callable[[], bool]) -> None:
    with Threads(2) as threads:
        threads.put_off(step)
        assert threads.map(done.wait, [60.0]) == [True]


def test_also_what_is_put_off_meanwhile(done: threading.Event, step: Callable[[], bool]) -> None:
    with Threads(2) as threads:

        def put_off(wait: bool) -> bool:
            if wait:
                return done.wait(60.0)
            threads.put_off(step)
            return True

        assert threads.map(put_off, [True, False]) == [True, True]


def test_so_it_does_while_a_call_waits_for_others(done: threading.Event, step: Callable[[], bool]) -> None:
    with Threads(1) as threads:
        threads.put_off(step)
        assert threads.beside(lambda: done.wait(60.0))


@pytest.mark.parametrize("count", [1, 3])
def test_everything_is_done_in_the_end_piece_by_piece(count: int) -> None:
    pieces = {name: list(range(5)) for name in "abcd"}
    order: list[str] = []

    def step(name: str) -> bool:
        order.append(f"{name}{pieces[name].pop(0)}")
        return bool(pieces[name])

    with Threads(count) as threads:
        for name in pieces:
            threads.put_off(lambda name=name: step(name))  # type: ignore[misc]
        assert threads.map(pow, [2, 3], [5, 2]) == [32, 9]
        threads.finish()
        assert not any(pieces.values())
    for name in "abcd":  # no two pieces of the same work at a time
        assert [each for each in order if each[0] == name] == [f"{name}{number}" for number in range(5)]


def test_the_end_waits_for_pieces_that_follow_one_under_way() -> None:
    begun, go_on = threading.Event(), threading.Event()
    pieces = [1, 2, 3]

    def step() -> bool:
        begun.set()
        go_on.wait(60.0)
        pieces.pop()
        return bool(pieces)

    with Threads(2) as threads:
        threads.put_off(step)
        threads.map(begun.wait, [60.0])
        threading.Timer(0.2, go_on.set).start()  # when nothing else is left to be done
        threads.finish()
        assert not pieces


def test_an_error_in_what_was_put_off_is_met_in_the_end() -> None:
    with Threads(2) as threads:
        threads.put_off(lambda: 1 // 0 > 0)
        with pytest.raises(ZeroDivisionError):
            threads.finish()


def test_whoever_leaves_early_leaves_the_rest_undone(done: threading.Event, step: Callable[[], bool]) -> None:
    with Threads(2) as threads:
        threads.put_off(step)
    assert not done.is_set()
