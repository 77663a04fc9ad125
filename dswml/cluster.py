"""Turns the cluster options that every verb shares into an executor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dswml.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from distributed import Client

    from dswml.executor import Executor

__all__ = ["ClusterOptions", "cluster_options", "executor_from_options"]

F = TypeVar("F", bound=Callable[..., Any])

#: Local clusters and their dashboards are for this machine alone.
LOOPBACK = "127.0.0.1"

#: How long a scheduler may take to answer.
CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class ClusterOptions:
    """Where the work is to run: a named scheduler, a local cluster, or (the default) this process.

    Parameters
    ----------
    scheduler : str, optional
        Address of a running scheduler.
    scheduler_file : str, optional
        File in which a running scheduler wrote its address.
    workers : int, optional
        Worker processes of a local cluster; without it a local cluster has one worker, in this process.
    threads : int, optional
        Threads of each local worker.
    memory_limit : str, optional
        Memory of each local worker, such as ``"2 GiB"``.
    """

    scheduler: str | None = None
    scheduler_file: str | None = None
    workers: int | None = None
    threads: int | None = None
    memory_limit: str | None = None

    def __post_init__(self) -> None:
        if self.scheduler and self.scheduler_file:
            raise UsageError(
                f"both a scheduler, {self.scheduler}, and a scheduler file, {self.scheduler_file}, "
                "are given: name one of them"
            )
        if self.named and self.is_local:
            raise UsageError(
                f"--workers, --threads and --memory-limit have no use with the scheduler {self.named}: "
                "drop them, or drop --scheduler, --scheduler-file or the variable DASK_SCHEDULER_ADDRESS"
            )

    @property
    def named(self) -> str | None:
        """The scheduler that was asked for, if one was."""
        return self.scheduler or self.scheduler_file

    @property
    def is_local(self) -> bool:
        """Whether a local Dask cluster was asked for."""
        return any(option is not None for option in (self.workers, self.threads, self.memory_limit))


def cluster_options(verb: F) -> F:
    """Give a click command the shared options; it receives them as one argument, ``cluster``."""

    @wraps(verb)
    def run(
        *args: Any,
        scheduler: str | None,
        scheduler_file: str | None,
        workers: int | None,
        threads: int | None,
        memory_limit: str | None,
        **kwargs: Any,
    ) -> Any:
        if scheduler_file is None and scheduler is None:
            scheduler = os.environ.get("DASK_SCHEDULER_ADDRESS") or None
        cluster = ClusterOptions(scheduler, scheduler_file, workers, threads, memory_limit)
        return verb(*args, cluster=cluster, **kwargs)

    options = [
        click.option(
            "--scheduler",
            metavar="ADDRESS",
            help="Run on this Dask scheduler; the variable DASK_SCHEDULER_ADDRESS says the same.",
        ),
        click.option(
            "--scheduler-file",
            metavar="FILE",
            type=click.Path(dir_okay=False),
            help="Run on the Dask scheduler whose address is in this file.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Run on a local Dask cluster of so many worker processes.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            help="Threads of each local worker; without --workers, of one worker in this process.",
        ),
        click.option("--memory-limit", metavar="BYTES", help='Memory of each local worker, such as "2 GiB".'),
    ]
    for option in reversed(options):
        option(run)
    return run  # type: ignore[return-value]


@contextmanager
def executor_from_options(
    options: ClusterOptions, *, announce: Callable[[str], None] | None = None
) -> Iterator[Executor]:
    """Yield the executor that the options ask for and close it, with its cluster, at the end.

    Parameters
    ----------
    options : ClusterOptions
    announce : callable, optional
        Receives a line of text for the user: the dashboard's address, or that no worker is there yet.

    Raises
    ------
    ClusterError
        If the scheduler that was named cannot be reached, or the cluster is lost on the way. A local
        cluster is never started in place of one that was named.
    """
    if not options.named and not options.is_local:
        from dswml.executor import InProcessExecutor

        with InProcessExecutor() as executor:
            yield executor
        return

    from dswml.dask_executor import DaskExecutor

    announce = announce or (lambda line: None)
    with ExitStack() as stack:
        client = _connect(options, announce) if options.named else _start_local(options, stack, announce)
        stack.enter_context(client)
        yield stack.enter_context(DaskExecutor(client))


def _address(options: ClusterOptions) -> str:
    """Return the address of the scheduler that was named."""
    if options.scheduler_file is None:
        return str(options.scheduler)
    try:
        with open(options.scheduler_file) as file:
            return str(json.load(file)["address"])
    except FileNotFoundError:
        raise ClusterError(
            f"there is no scheduler file {options.scheduler_file}: start a scheduler with "
            f"'dask scheduler --scheduler-file {options.scheduler_file}', or name another file"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"the scheduler file {options.scheduler_file} holds no address of a scheduler ({error}): "
            "start the scheduler again, or name another file"
        ) from error


def _connect(options: ClusterOptions, announce: Callable[[str], None]) -> Client:
    from distributed import Client
    from distributed.comm.addressing import parse_address, parse_host_port

    address = _address(options)
    try:
        parse_host_port(parse_address(address)[1])
    except ValueError as error:
        raise UsageError(
            f"{address} is no address of a scheduler ({error}): write it like tcp://HOST:8786"
        ) from error
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"the Dask scheduler {address} cannot be reached ({str(error) or type(error).__name__}): "
            "check that it runs and that the address is right"
        ) from error
    announce(f"Dashboard: {client.dashboard_link}")
    if not client.nthreads():
        announce(f"The Dask scheduler {address} has no workers yet; waiting for the first.")
    return client


def _start_local(options: ClusterOptions, stack: ExitStack, announce: Callable[[str], None]) -> Client:
    from dask.utils import parse_bytes
    from distributed import Client, LocalCluster

    try:
        memory_limit = "auto" if options.memory_limit is None else parse_bytes(options.memory_limit)
    except ValueError as error:
        raise UsageError(
            f"the memory limit {options.memory_limit!r} is not a number of bytes: write it like '2 GiB'"
        ) from error
    cores = len(os.sched_getaffinity(0))
    cluster = LocalCluster(
        n_workers=options.workers or 1,
        threads_per_worker=options.threads or max(1, cores // (options.workers or 1)),
        processes=options.workers is not None,
        host=LOOPBACK if options.workers is not None else None,
        memory_limit=memory_limit,
        dashboard_address=f"{LOOPBACK}:0",
        worker_dashboard_address=f"{LOOPBACK}:0",
    )
    stack.enter_context(cluster)
    announce(f"Dashboard: http://{LOOPBACK}:{cluster.scheduler.http_server.port}/status")
    return Client(cluster, set_as_default=False)
