"""Who does the work of a call that names no executor: the current Dask client's cluster, or this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import Client, get_client, get_worker
from distributed.threadpoolexecutor import thread_state

from .executor import Executor, InProcessExecutor

if TYPE_CHECKING:
    from .stored import Dataset

__all__ = ["current_executor"]


def current_executor(data: Dataset) -> Executor:
    """Return what runs the work on ``data``: the current Dask client's cluster, or this process.

    Arrays in this process's memory are worked on here: they fit, and shipping them would cost
    more than the work. A task of a Dask worker works on its own thread alone, since waiting for other
    tasks could block the cluster for good; within `distributed.worker_client`, where it has left its
    place to others, it uses the cluster.
    """
    try:
        get_worker()
    except ValueError:
        in_task = False
        client = _global_client()
    else:
        in_task = True
        has_left = not getattr(thread_state, "proceed", True)
        client = get_client() if has_left else None
    if client is None or client.asynchronous or not data.travels:
        return InProcessExecutor(threads=1 if in_task else None)
    from .dask_executor import DaskExecutor

    return DaskExecutor(client)


def _global_client() -> Client | None:
    try:
        return Client.current()
    except ValueError:
        return None
