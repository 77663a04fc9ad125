"""Dask arrays some of whose chunks are results that a cluster holds (``persist``).

The graph of such an array ends in futures, which mean something to their client alone. They
are taken out of it here, so that the array can be sent anywhere, and the results are put in their
places where its rows are computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import dask.array as da
from dask._task_spec import GraphNode, convert_legacy_graph
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from dask.sizeof import sizeof
from distributed import Future

from .errors import UsageError
from .executor import lent_results

__all__ = ["compute", "embedded_bytes", "held_keys", "take_out"]


def take_out(array: Any) -> tuple[Any, dict[Hashable, Future[Any]]]:
    """Return the array without its futures, and these by their keys."""
    graph = dict(array.dask)
    futures = {key: value for key, value in graph.items() if isinstance(value, Future)}
    if not futures:
        return array, {}
    rest = {key: value for key, value in graph.items() if key not in futures}
    # Futures that were sent to another process are without a client there.
    return _with_graph(array, rest), {key: future for key, future in futures.items() if future.client}


def held_keys(array: Any) -> tuple[Hashable, ...]:
    """Return the keys of the results that the array needs and its graph does not make.

    Examples
    --------
    >>> held_keys(da.zeros(4, chunks=2))
    ()
    """
    graph = _culled(array)
    names = {name for node in graph.values() for name in node.dependencies}
    names.update(flatten(array.__dask_keys__()))
    return tuple(sorted(names - graph.keys(), key=str))


def embedded_bytes(array: Any) -> int:
    """Return the size of the data that the graph itself carries, as it does for arrays in memory.

    Examples
    --------
    >>> import numpy as np
    >>> embedded_bytes(da.from_array(np.zeros(1000), chunks=100)), embedded_bytes(da.zeros(1000, chunks=100))
    (8000, 0)
    """
    return sum(sizeof(value) for value in dict(array.dask).values() if not isinstance(value, GraphNode))


def compute(array: Any, futures: Mapping[Hashable, Future[Any]]) -> Any:
    """Compute the array on this thread, with results that came with the task or that this client holds."""
    keys = held_keys(array)
    if keys:
        lent = lent_results() or {}
        missing = [key for key in keys if key not in lent and key not in futures]
        if missing:
            raise UsageError(
                f"a cluster holds the result {missing[0]} of a dask array and cannot be asked for it here: "
                "work where the array was persisted, in a task within distributed.worker_client(), or "
                "take the array without persist()"
            )
        results = {key: lent[key] if key in lent else futures[key].result() for key in keys}
        array = _with_graph(array, {**_culled(array), **results})
    return array.compute(scheduler="synchronous")


def _culled(array: Any) -> dict[Hashable, Any]:
    """Return the tasks that the array takes, of all that its graph has."""
    graph = convert_legacy_graph(dict(array.dask))
    needed: dict[Hashable, Any] = {}
    todo = list(flatten(array.__dask_keys__()))
    while todo:
        key = todo.pop()
        if key in graph and key not in needed:
            needed[key] = graph[key]
            todo.extend(graph[key].dependencies)
    return needed


def _with_graph(array: Any, graph: Mapping[Hashable, Any]) -> Any:
    layers = HighLevelGraph.from_collections(array.name, graph, dependencies=())
    return da.Array(layers, array.name, array.chunks, meta=array._meta)
