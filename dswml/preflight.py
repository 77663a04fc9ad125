"""What is asked of a cluster before work is given to it: the same software, and a way to the stores."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dswml.errors import ClusterError, DataError, DswmlError
from dswml.hiding import secrets_of, without

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["check_stores", "check_versions", "wait_for_workers"]

#: Packages whose first two numbers must be those of this process; of dswml itself, all numbers.
PACKAGES = ("python", "dswml", "dask", "distributed", "numpy", "scipy", "zarr")
#: The packages of these that a scheduler uses.
SCHEDULER_PACKAGES = PACKAGES[:4]
#: Seconds in which all workers must have looked at the stores.
PROBE_SECONDS = 60.0


def wait_for_workers(client: Client, count: int, timeout: float) -> None:
    """Wait until the scheduler has so many workers."""
    try:
        client.wait_for_workers(count, timeout=timeout)
    except TimeoutError:
        raise ClusterError(
            f"the scheduler {client.scheduler.address} has {len(client.nthreads())} of {count} workers after "
            f"{timeout:g} s: start more, or wait longer (--timeout)"
        ) from None


def check_versions(client: Client) -> None:
    """Refuse a cluster with a scheduler or worker whose software differs from that of this process."""
    try:
        found = client.sync(client._get_versions, packages=PACKAGES, callback_timeout=PROBE_SECONDS)
    except (OSError, TimeoutError) as error:
        raise _silent(client, error) from error
    here = _releases(found["client"])
    others = {f"worker {address}": versions for address, versions in found["workers"].items()}
    others[f"scheduler {client.scheduler.address}"] = found["scheduler"]
    differences = []
    for who, versions in others.items():
        there = _releases(versions)
        names = SCHEDULER_PACKAGES if who.startswith("scheduler") else PACKAGES
        different = [name for name in names if there[name] != here[name]]
        if different:
            told = ", ".join(f"{name} {there[name] or 'is missing'} ({here[name]})" for name in different)
            differences.append(f"{who} has {told}")
    if differences:
        raise ClusterError(
            f"the cluster has other versions than this process (in brackets): {_some(differences)}: install "
            "the same everywhere"
        )


def _releases(versions: Mapping[str, Any]) -> dict[str, str | None]:
    packages = versions["packages"]
    return {
        name: version if name == "dswml" or version is None else ".".join(version.split(".")[:2])
        for name, version in ((name, packages.get(name)) for name in PACKAGES)
    }


def check_stores(
    client: Client,
    reads: Sequence[str],
    writes: Sequence[str],
    storage_options: Mapping[str, Any],
) -> None:
    """Let every worker read what is to be read and write beside what is to be written.

    Parameters
    ----------
    client : distributed.Client
    reads, writes : sequence of str
        Absolute paths or URLs of stores.
    storage_options : mapping
        Passed to fsspec.

    Raises
    ------
    DataError
        Names every worker that cannot, and why.
    """
    from dswml.storage import absolute_url

    secrets = secrets_of(storage_options)
    reads, writes = ([absolute_url(url) for url in urls] for urls in (reads, writes))
    arguments = (uuid.uuid4().hex, reads, writes, dict(storage_options))
    found = _on_all_workers(client, _probe, *arguments)
    able = [worker for worker, told in found.items() if not isinstance(told, str)]
    seen = {}
    if writes:
        seen = _on_all_workers(client, _see, able, *arguments)
        _on_all_workers(client, _sweep, able, *arguments)
    troubles = []
    first = next(iter(found.values()), None)
    for worker, told in found.items():
        if isinstance(told, str):
            troubles.append(f"worker {worker}: {without(secrets, told)}")
        elif told != first and not isinstance(first, str):
            troubles.append(f"worker {worker} finds other data at {' or '.join(reads)} than the first worker")
        elif isinstance(unseen := seen.get(worker), str):
            troubles.append(f"worker {worker}: {without(secrets, unseen)}")
    if troubles:
        raise DataError(
            f"{len(troubles)} of {len(found)} workers cannot do the work: {_some(troubles)}; stores must be "
            "where all workers can open them"
        )


def _some(sentences: Sequence[str], most: int = 5) -> str:
    more = f"; and {len(sentences) - most} more" if len(sentences) > most else ""
    return "; ".join(sentences[:most]) + more


def _silent(client: Client, error: Exception) -> ClusterError:
    return ClusterError(
        f"not all workers of {client.scheduler.address} have answered within {PROBE_SECONDS:.0f} s "
        f"({type(error).__name__}): look for workers or file systems that hang"
    )


def _on_all_workers(client: Client, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return what the function returns on every worker, or says there when it fails."""
    try:
        found: dict[str, Any] = client.sync(
            client._run, _aside, function, *arguments, on_error="return", callback_timeout=PROBE_SECONDS
        )
    except (OSError, TimeoutError) as error:
        raise _silent(client, error) from error
    # A worker that leaves in the meantime will not do any work either.
    return {worker: told for worker, told in found.items() if not isinstance(told, OSError)}


async def _aside(function: Callable[..., Any], *arguments: Any, dask_worker: Any) -> Any:
    """Call the function without holding up the worker."""

    def call() -> Any:
        try:
            return function(dask_worker.address, *arguments)
        except DswmlError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return await asyncio.to_thread(call)


def _probe(
    worker: str, token: str, reads: list[str], writes: list[str], options: dict[str, Any]
) -> list[Any]:
    """Read the attributes of the stores, and write a small file beside every place to write to."""
    from dswml.storage import filesystem, open_group

    ids = []
    for url in reads:
        attributes = dict(open_group(url, "r", options).attrs)
        ids.append([attributes.get("store_id"), attributes.get("fingerprint")])
    for url in writes:
        fs, path = filesystem(url, options)
        try:
            fs.pipe_file(_mark(fs, path, token, worker), b"dswml looks whether it can write here\n")
        except Exception as error:
            raise DataError(f"cannot write {url} ({type(error).__name__}: {error})") from error
    return ids


def _see(
    worker: str, workers: list[str], token: str, reads: list[str], writes: list[str], options: dict[str, Any]
) -> None:
    """Look for what the others have written."""
    from dswml.storage import filesystem

    for url in writes:
        fs, path = filesystem(url, options)
        fs.invalidate_cache()
        for other in workers:
            if not fs.exists(_mark(fs, path, token, other)):
                raise DataError(f"does not see what worker {other} writes beside {url}")


def _sweep(
    worker: str, workers: list[str], token: str, reads: list[str], writes: list[str], options: dict[str, Any]
) -> None:
    from dswml.storage import filesystem

    for url in writes:
        fs, path = filesystem(url, options)
        mark = _mark(fs, path, token, worker)
        if fs.exists(mark):
            fs.rm_file(mark)


def _mark(fs: Any, path: str, token: str, worker: str) -> str:
    """Return a place beside the path: on a disk, in the nearest folder above it that is there."""
    name = f".dswml-{token}-{''.join(c if c.isalnum() else '-' for c in worker)}"
    folder = path.rpartition("/")[0]
    if "file" in fs.protocol:
        while not os.path.isdir(folder or "/"):
            folder = os.path.dirname(folder)
    return f"{folder}/{name}"
