"""Turns the cluster options that every verb shares into an executor."""

from __future__ import annotations

import ipaddress
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dswml.errors import ClusterError, UsageError
from dswml.preflight import check_stores, check_versions

if TYPE_CHECKING:
    from distributed import Client, Security

    from dswml.executor import Executor

__all__ = ["ClusterOptions", "client_from_options", "cluster_options", "executor_from_options"]

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
    tls_ca, tls_cert, tls_key : str, optional
        Files of the authority that a scheduler must be certified by, and of the certificate and key to
        show it; without them Dask's own configuration says.
    require_tls : bool
        Refuse a scheduler whose address does not begin with ``tls://``.
    """

    scheduler: str | None = None
    scheduler_file: str | None = None
    workers: int | None = None
    threads: int | None = None
    memory_limit: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    require_tls: bool = False

    def __post_init__(self) -> None:
        files = {"--tls-ca": self.tls_ca, "--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        missing = [option for option, file in files.items() if file is None]
        if 0 < len(missing) < len(files):
            raise UsageError(
                f"--tls-ca, --tls-cert and --tls-key go together: give {' and '.join(missing)} too"
            )
        for option, file in files.items():
            if file is not None and not os.access(file, os.R_OK):
                raise UsageError(f"{option} {file} is not a file that can be read")
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
        tls_ca: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        require_tls: bool,
        **kwargs: Any,
    ) -> Any:
        if scheduler_file is None and scheduler is None:
            scheduler = os.environ.get("DASK_SCHEDULER_ADDRESS") or None
        cluster = ClusterOptions(
            scheduler,
            scheduler_file,
            workers,
            threads,
            memory_limit,
            tls_ca,
            tls_cert,
            tls_key,
            require_tls,
        )
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
        click.option("--tls-ca", metavar="FILE", help="Authority that the scheduler must be certified by."),
        click.option("--tls-cert", metavar="FILE", help="Certificate to show to the scheduler."),
        click.option("--tls-key", metavar="FILE", help="Key of that certificate."),
        click.option("--require-tls", is_flag=True, help="Refuse a scheduler that is not at tls://."),
    ]
    for option in reversed(options):
        option(run)
    return run  # type: ignore[return-value]


@contextmanager
def executor_from_options(
    options: ClusterOptions,
    *,
    announce: Callable[[str], None] | None = None,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Executor]:
    """Yield the executor that the options ask for and close it, with its cluster, at the end.

    Parameters
    ----------
    options : ClusterOptions
    announce : callable, optional
        Receives a line of text for the user: the dashboard's address, or that no worker is there yet.
    reads, writes : sequence of str
        Stores that every worker of a named scheduler must be able to read, or to write; this, and that it
        has the software of this process, is looked at first, unless this is a job, for which it was.
    storage_options : mapping, optional
        Passed to fsspec.

    Raises
    ------
    ClusterError
        If the scheduler that was named cannot be reached, or has other software, or the cluster is
        lost on the way. A local cluster is never started in place of one that was named.
    DataError
        If a worker cannot reach a store.
    """
    if not options.named and not options.is_local:
        from dswml.executor import InProcessExecutor

        with InProcessExecutor() as executor:
            yield executor
        return

    from dswml.dask_executor import DaskExecutor
    from dswml.progress import in_job

    announce = announce or (lambda line: None)
    with ExitStack() as stack:
        client = _connect(options, announce) if options.named else _start_local(options, stack, announce)
        stack.enter_context(client)
        if options.named and not in_job():
            check_versions(client)
            check_stores(client, reads, writes, storage_options or {})
        yield stack.enter_context(DaskExecutor(client))


@contextmanager
def client_from_options(
    options: ClusterOptions, *, announce: Callable[[str], None] | None = None
) -> Iterator[Client]:
    """Yield a client of the scheduler that the options name; jobs, which outlive clients, need one."""
    if not options.named:
        raise UsageError(
            "jobs are kept by a running scheduler: name it with --scheduler, --scheduler-file or the "
            "variable DASK_SCHEDULER_ADDRESS"
        )
    with _connect(options, announce or (lambda line: None)) as client:
        yield client


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
    security = _security(options, address)
    _check_encryption(address, options.require_tls)
    try:
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False, security=security)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ClusterError(
            f"the Dask scheduler {address} cannot be reached ({_causes(error)}): check that it runs, that "
            "the address is right, and, if it begins with tls://, the certificates"
        ) from error
    announce(f"Dashboard: {client.dashboard_link}")
    if not client.nthreads():
        announce(f"The Dask scheduler {address} has no workers yet; waiting for the first.")
    return client


def _security(options: ClusterOptions, address: str) -> Security:
    """Return the certificates that were given, or else those of Dask's configuration."""
    from distributed import Security

    security = Security()
    if options.tls_ca is not None:
        security = Security(
            tls_ca_file=options.tls_ca,
            tls_client_cert=options.tls_cert,
            tls_client_key=options.tls_key,
            require_encryption=True,
        )
    try:
        shown = security.get_connection_args("client")["ssl_context"]
    except OSError as error:
        raise UsageError(
            f"the authority {security.tls_ca_file}, certificate {security.tls_client_cert} and key "
            f"{security.tls_client_key} cannot be used ({error})"
        ) from error
    if shown is None and address.startswith("tls://"):
        raise ClusterError(
            f"the Dask scheduler {address} wants to see a certificate: give --tls-ca, --tls-cert and "
            "--tls-key, or set them in Dask's configuration"
        )
    return security


def _check_encryption(address: str, require_tls: bool) -> None:
    """Warn of a scheduler across a network that neither hides nor proves anything, or refuse it."""
    from distributed.comm.addressing import parse_address, parse_host_port

    scheme, place = parse_address(address)
    if scheme == "tls":
        return
    if require_tls:
        raise UsageError(
            f"the scheduler {address} is not at tls://, and --require-tls refuses any other: start it with "
            "--tls-ca-file, --tls-cert and --tls-key, and give its new address"
        )
    host = parse_host_port(place)[0]
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost" or scheme == "inproc"
    if not is_here:
        warnings.warn(
            f"what is sent to and from {address} can be read and changed by anybody on the way: use tls://, "
            "and --require-tls to be sure of it",
            stacklevel=4,
        )


def _causes(error: BaseException | None) -> str:
    """Return what went wrong and why, from the last to the first cause."""
    told: list[str] = []
    while error is not None:
        told.append(str(error) or type(error).__name__)
        error = error.__cause__
    return "; ".join(dict.fromkeys(told))


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
