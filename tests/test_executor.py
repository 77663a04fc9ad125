"""The in-process executor: one fixed tree, the same bits for any number of threads, bounded, and honest."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from dswml.errors import DataError
from dswml.executor import (
    ARITY,
    InProcessExecutor,
    Shared,
    available_memory,
    expecting,
    following_item,
    lend,
    lent_results,
    needs_of,
    one_blas_thread,
    share_out,
    tree_combine,
)
from dswml.placement import place


def total(numbers: list[int]) -> int:
    return sum(numbers)


def bracketed(texts: list[str]) -> str:
    return f"({' '.join(texts)})"


def tree(texts: Sequence[str]) -> str:
    """The whole tree at once: groups of ARITY, level by level, and a group of one is left alone."""
    while len(texts) > 1:
        groups = [texts[start : start + ARITY] for start in range(0, len(texts), ARITY)]
        texts = [bracketed(list(group)) if len(group) > 1 else group[0] for group in groups]
    return texts[0]


@pytest.mark.parametrize(
    "count", [1, 2, ARITY, ARITY + 1, 3 * ARITY, ARITY**2, ARITY**2 + 1, 3 * ARITY**2 + 5]
)
def test_the_tree_depends_on_the_number_of_items_alone(count: int) -> None:
    texts = [str(number) for number in range(count)]
    assert tree_combine(texts, bracketed) == tree(texts)
    for threads in (1, 3):
        with InProcessExecutor(threads) as executor:
            assert executor.reduce(lambda text, _: text, bracketed, texts) == tree(texts)


@given(st.integers(1, 600))
@settings(deadline=None, max_examples=50)
def test_the_tree_is_the_same_for_any_number_of_items(count: int) -> None:
    texts = [str(number) for number in range(count)]
    assert tree_combine(iter(texts), bracketed) == tree(texts)


def test_few_results_are_held_at_a_time() -> None:
    alive = most = 0

    class Result:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    tree_combine((Result() for _ in range(1000)), lambda results: Result())
    assert most <= 3 * ARITY + 2


def rounding_sum(arrays: list[Any]) -> Any:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def test_sums_have_the_same_bits_whatever_the_threads_and_the_order_in_which_they_finish() -> None:
    rng = np.random.default_rng(0)
    items = [rng.standard_normal(100) * 10.0 ** rng.integers(-8, 8) for _ in range(100)]
    delays = iter(rng.permutation(400) / 1e5)

    def slowly(item: Any, payload: float) -> Any:
        time.sleep(next(delays))
        return item * payload

    sums = set()
    for threads in (1, 2, 4):
        with InProcessExecutor(threads) as executor:
            sums.add(executor.reduce(slowly, rounding_sum, items, 0.1).tobytes())
    assert len(sums) == 1


def test_results_come_in_the_order_of_the_items_and_are_told_of_as_they_come() -> None:
    told: list[tuple[int, int]] = []
    here = threading.get_ident()

    def tell(index: int, result: int) -> None:
        assert threading.get_ident() == here
        told.append((index, result))

    for threads in (1, 3):
        told.clear()
        with InProcessExecutor(threads) as executor:
            squares = executor.map(lambda item, payload: item**2 + payload, range(10), 1, on_result=tell)
        assert squares == [number**2 + 1 for number in range(10)]
        assert sorted(told) == list(enumerate(squares))
    done: list[int] = []
    with InProcessExecutor(2) as executor:
        assert executor.reduce(lambda item, _: item, sum, range(10), on_result=done.append) == 45
        assert executor.map(lambda item, _: item, []) == []
    assert done == list(range(1, 11))


def test_shared_values_follow_the_payload_in_their_order() -> None:
    shared = [Shared("a", "x"), Shared("b", "y")]
    with InProcessExecutor(2) as executor:
        text = executor.reduce(lambda *values: str(values), "".join, [1], "payload", shared)
    assert text == "(1, 'payload', 'x', 'y')"


def test_no_more_than_two_items_a_thread_are_under_way() -> None:
    lock = threading.Lock()
    begun = combined = ahead = 0

    def begin(item: int, _: Any) -> int:
        nonlocal begun, ahead
        with lock:
            begun += 1
            ahead = max(ahead, begun - combined)
        return item

    def end(done: int) -> None:
        nonlocal combined
        with lock:
            combined = done
        time.sleep(0.001)

    with InProcessExecutor(2) as executor:
        executor.reduce(begin, total, range(100), on_result=end)
    assert ahead <= 2 * 2 + 1


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_through_as_itself_and_ends_the_work(threads: int) -> None:
    begun: list[int] = []

    def fail(item: int, _: Any) -> int:
        begun.append(item)
        if item == 5:
            raise DataError(f"item {item} is bad")
        return item

    with InProcessExecutor(threads) as executor:
        with pytest.raises(DataError, match=r"^item 5 is bad$"):
            executor.reduce(fail, total, range(1000))
        with pytest.raises(DataError, match=r"^item 5 is bad$"):
            executor.map(fail, range(1000))
        assert len(begun) < 100
        assert executor.map(lambda item, _: item, range(3)) == [0, 1, 2]


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_blas_has_one_thread_while_anyone_works_and_its_own_number_afterwards() -> None:
    before = blas_threads()
    first, second = one_blas_thread(), one_blas_thread()
    with first:
        assert blas_threads() == {1}
    assert blas_threads() == before
    first = one_blas_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas_threads() == {1}
    second.__exit__(None, None, None)
    assert blas_threads() == before
    with InProcessExecutor(2) as executor:
        assert executor.map(lambda item, _: blas_threads(), range(8)) == [{1}] * 8
    assert blas_threads() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_whoever_takes_the_results_ends_the_work_at_once(threads: int) -> None:
    before, begun = blas_threads(), []

    def fail(*_: Any) -> Any:
        raise DataError("no more")

    with InProcessExecutor(threads) as executor:
        with pytest.raises(DataError, match="no more") as held:  # and with it the frames of the calls
            executor.reduce(lambda item, _: begun.append(item), fail, range(1000))
        assert blas_threads() == before
        with pytest.raises(DataError, match="no more") as held:
            executor.map(lambda item, _: begun.append(item), range(1000), on_result=fail)
        assert blas_threads() == before
        assert len(begun) < 100
    assert held.type is DataError


def test_calls_everywhere_are_calls_here() -> None:
    called: list[int] = []
    with InProcessExecutor() as executor:
        executor.everywhere(called.append, 3)
        executor.forget(["nothing"])
        assert executor.memory_per_slot() == available_memory() // executor.n_slots
    assert called == [3]
    assert 0 < available_memory() <= psutil.virtual_memory().total


class Reader:
    def __init__(self, **keys: tuple[str, ...]) -> None:
        self.keys = keys

    def needs(self, item: str) -> tuple[str, ...]:
        return self.keys[item]


class Request:
    def __init__(self, source: Reader) -> None:
        self.source = source


def test_what_is_needed_is_found_in_payloads_tuples_and_sources() -> None:
    reader, other = Reader(a=("x", "y"), b=()), Reader(a=("y", "z"), b=("w",))
    assert needs_of([reader], "a") == ("x", "y")
    assert needs_of([(1, reader), Request(other), None], "a") == ("x", "y", "z")
    assert needs_of([(reader, (Request(other),))], "b") == ("w",)
    assert needs_of(["payload", np.zeros(3)], "a") == ()


def test_results_are_lent_to_the_code_below_and_to_nobody_else() -> None:
    assert lent_results() is None
    with lend({"x": 1}):
        assert lent_results() == {"x": 1}
    assert lent_results() is None


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_task_knows_which_item_its_thread_will_likely_get_next(threads: int) -> None:
    items = list(range(7))
    with InProcessExecutor(threads) as executor:
        following = executor.map(lambda item, payload: following_item(), items)
    assert following == [*items[threads:], *[None] * threads]
    assert following_item() is None
    with expecting("this"):
        assert following_item() == "this"
    assert following_item() is None


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_parts_of_items_come_back_in_their_order(threads: int, count: int) -> None:
    def squares(item: int, payload: Any) -> list[int]:
        return share_out(lambda part: part**2, [10 * item + part for part in range(5)])

    with InProcessExecutor(threads) as executor:
        found = executor.map(squares, range(count))
    assert found == [[(10 * item + part) ** 2 for part in range(5)] for item in range(count)]
    assert share_out(abs, [-1, 2]) == [1, 2]


def test_a_thread_without_an_item_helps_with_the_parts_of_another() -> None:
    both = threading.Barrier(2)

    def meet(part: int) -> str:
        both.wait(60.0)
        return f"{part} before {following_item()}"

    with InProcessExecutor(2) as executor, expecting("nothing"):
        found = executor.map(lambda item, payload: share_out(meet, [1, 2]), ["item"])
    assert found == [["1 before None", "2 before None"]]


def test_what_came_of_parts_is_let_go_while_no_thread_is_free_to_help() -> None:
    class Part:
        pass

    both = threading.Barrier(2)

    def share(item: int, payload: Any) -> bool:
        both.wait(60.0)  # from here on both threads have an item
        found = share_out(lambda _: Part(), [1, 2])
        known = weakref.ref(found[0])
        del found
        held = known() is not None
        both.wait(60.0)
        return held

    with InProcessExecutor(2) as executor:
        assert executor.map(share, range(2)) == [False, False]


@pytest.mark.parametrize("part", range(4))
def test_an_error_in_a_part_is_that_of_the_item(part: int) -> None:
    def refuse(number: int) -> int:
        if number == part:
            raise DataError(f"part {number} is bad")
        time.sleep(0.001)
        return number

    with InProcessExecutor(2) as executor:
        with pytest.raises(DataError, match=f"part {part} is bad"):
            executor.map(lambda item, payload: share_out(refuse, range(4)), ["item"])
        assert executor.map(lambda item, payload: share_out(abs, [-3, 4]), ["item"]) == [[3, 4]]


workers = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 4), min_size=1)


@given(st.integers(0, 60), workers, workers)
@settings(deadline=None)
def test_items_are_shared_out_by_threads_and_stay_where_they_were(
    count: int, before: dict[str, int], after: dict[str, int]
) -> None:
    first = place(count, before)
    assert len(first) == count
    assert list(first) == sorted(first), "neighbours are together"
    for worker, threads in before.items():
        assert abs(first.count(worker) - count * threads / sum(before.values())) < 1
    assert place(count, before, first) == first
    second = place(count, after, first)
    for worker, threads in after.items():
        assert abs(second.count(worker) - count * threads / sum(after.values())) < 1
    for worker in before.keys() & after.keys():
        stayed = sum(old == new == worker for old, new in zip(first, second, strict=True))
        assert stayed == min(first.count(worker), second.count(worker)), "none moves that could stay"
