"""The tasks of a call on a Dask cluster: a leaf for every item, and the tree that combines their results.

Arrays are not in here: a task knows the keys of what it needs, and all workers have it beforehand.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from dask._task_spec import Task, TaskRef
from dask.utils import funcname
from distributed import Future, get_worker

from .executor import ARITY, Combine, Function, expecting, lend, needs_of, one_blas_thread

__all__ = ["add_leaves", "add_tree", "at_home", "following_leaves"]

R = TypeVar("R")


def add_leaves(
    graph: dict[str, Task],
    function: Function[Any],
    items: Sequence[Any],
    sent: Sequence[Future[Any]],
    values: Sequence[Any],
    following: Sequence[tuple[str, int] | None],
) -> list[str]:
    """Add a task an item; what an item needs of the results that the cluster holds comes with it."""
    name = f"{funcname(function)}-{uuid.uuid4().hex}"
    arguments = [TaskRef(future.key) for future in sent]
    leaves = [f"{name}-{index}" for index in range(len(items))]
    for key, item, after in zip(leaves, items, following, strict=True):
        lent = needs_of(values, item)
        then = None if after is None else (after[0], items[after[1]])
        graph[key] = Task(
            key, _call, function, item, then, lent, *(TaskRef(each) for each in lent), *arguments
        )
    return leaves


def following_leaves(homes: Sequence[str], workers: Mapping[str, int]) -> list[tuple[str, int] | None]:
    """For every leaf its worker and the number of the leaf that the same thread there will get next."""
    following: list[tuple[str, int] | None] = [None] * len(homes)
    queues: dict[str, deque[int]] = {}
    for index, home in enumerate(homes):
        queue = queues.setdefault(home, deque())
        if len(queue) == workers[home]:
            following[queue.popleft()] = (home, index)
        queue.append(index)
    return following


def add_tree(graph: dict[str, Task], combine: Combine[Any], leaves: list[str]) -> str:
    """Add the nodes that combine the leaves, `ARITY` at a time; return the key of the root."""
    name = f"{funcname(combine)}-{uuid.uuid4().hex}"
    level = leaves
    while len(level) > 1:
        nodes = []
        for start in range(0, len(level), ARITY):
            children = level[start : start + ARITY]
            if len(children) == 1:
                nodes += children
                continue
            key = f"{name}-{len(graph)}"
            graph[key] = Task(key, _combine, combine, *(TaskRef(child) for child in children))
            nodes.append(key)
        level = nodes
    (root,) = level
    return root


def _call(
    function: Function[R],
    item: Any,
    following: tuple[str, Any] | None,
    lent: Sequence[Hashable],
    *values: Any,
) -> R:
    results, (payload, *bundles) = values[: len(lent)], values[len(lent) :]
    # A task that another worker has taken over says nothing of what comes next there.
    then = following[1] if following is not None and get_worker().address == following[0] else None
    with one_blas_thread(), lend(dict(zip(lent, results, strict=True))), expecting(then):
        return function(item, payload, *(value for bundle in bundles for value in bundle))


def at_home(function: Function[R], numbers: Sequence[int], payload: Any, *own: Any) -> list[R]:
    with one_blas_thread():
        return [function(number, payload, *own) for number in numbers]


def _combine(combine: Combine[R], *results: R) -> R:
    with one_blas_thread():
        return combine(list(results))
