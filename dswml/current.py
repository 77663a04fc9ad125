"""Who does the work of a call that names no executor: the current Dask client's cluster, or this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import Client, get_worker

from .executor import Executor, InProcessExecutor

if TYPE_CHECKING:
    from .stored import Dataset

__all__ = ["current_executor"]


def current_executor(data: Dataset) -> Executor:
    """Return what runs the work on ``data``: the current Dask client's cluster, or this process.

    Arrays in this process's memory are worked on here: they fit, and shipping them would cost
    more than the work. Inside a task of a worker the cluster is used only through
    `distributed.worker_client`, since waiting for it otherwise could block it for good.
    """
    client: Client | None
    try:
        get_worker()
        in_task = True
    except ValueError:
        in_task = False
    try:
        client = Client.current(allow_global=not in_task)
    except ValueError:
        client = None
    if client is None or client.asynchronous or not data.travels:
        return InProcessExecutor()
    from .dask_executor import DaskExecutor

    return DaskExecutor(client)
