"""Hands work to a cluster and asks after it: the client may leave, the work goes on.

A job is a verb of the command line with its parameters. One Dask task runs it on a worker
(`dswml.driver`), and the scheduler keeps its record (`dswml.job_board`).
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click
from distributed import Client, fire_and_forget

from .cli import command_of
from .driver import run_job
from .errors import ClusterError, DataError, DswmlError, StoppedEarlyError, UsageError
from .hiding import Hidden, secrets_of, without
from .job_board import BOARD, ENDED, JobBoard, task_key
from .preflight import check_stores, check_versions, wait_for_workers
from .storage import absolute_url

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["JOB_VERBS", "Job", "all_jobs", "hand_over", "submit"]

#: Verb -> the parameters that name what it reads, and the one that names what it writes.
JOB_VERBS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "train": (("store",), "output"),
    "tune": (("store",), "output"),
    "predict": (("model", "store"), "out"),
    "evaluate": (("model", "store", "propensity_from"), None),
}
#: Where a verb runs and how it speaks is for the driver to say.
OWN = {
    "scheduler_file": None,
    "workers": None,
    "threads": None,
    "memory_limit": None,
    "tls_ca": None,
    "tls_cert": None,
    "tls_key": None,
    "require_tls": False,
    "as_json": True,
    "quiet": False,
}
#: Seconds that a scheduler may take to answer.
ANSWER_SECONDS = 60.0
#: Seconds between two looks at a job that is waited for.
LOOK_EVERY = 0.5

ERRORS = {error.exit_code: error for error in (DataError, ClusterError, UsageError, StoppedEarlyError)}


class Job:
    """A job on a scheduler.

    Parameters
    ----------
    client : distributed.Client
        A client of the scheduler; any will do, now and later.
    id : str
        The job's id, or its name.
    """

    def __init__(self, client: Client, id: str) -> None:
        client.register_plugin(JobBoard())
        self._client = client
        self.id = id

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def status(self) -> dict[str, Any]:
        """Return how the job stands.

        Its "state" is "queued", "running", "stopping", "done", "failed", "stopped" (early, with a checkpoint)
        or "cancelled"; "figures" are the last that it reported.
        """
        status: dict[str, Any] = self._ask("show")["job"]
        return status

    def logs(self) -> list[str]:
        """Return the last lines that the job wrote."""
        return list(self._ask("logs")["lines"])

    def follow(self) -> Iterator[str]:
        """Yield the lines of the job's log as they are written, until it has ended."""
        since = 0
        while True:
            answer = self._ask("logs", since=since)
            yield from answer["lines"]
            since = answer["next"]
            if answer["job"]["state"] in ENDED:
                return
            time.sleep(LOOK_EVERY)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end and return what the verb's ``--json`` prints.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait.

        Raises
        ------
        TimeoutError
            If the job has not ended by then.
        DswmlError
            If the job failed or was stopped: of the kind that has the job's exit code.
        """
        status = self.wait(timeout)
        if status["exit_code"]:
            raise ERRORS.get(status["exit_code"], DswmlError)(status["error"] or f"job {self.id} failed")
        result: dict[str, Any] = json.loads(self._ask("result")["result"])
        return result

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end and return the last `status`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.status())["state"] not in ENDED:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.id} is {status['state']} after {timeout:g} s: wait longer")
            time.sleep(LOOK_EVERY)
        return status

    def cancel(self) -> dict[str, Any]:
        """Ask the job to stop, with a checkpoint where it has one; asked again, kill it."""
        status: dict[str, Any] = self._ask("cancel")["job"]
        return status

    def _ask(self, action: str, **more: Any) -> dict[str, Any]:
        answer = _ask(self._client, action, job=self.id, **more)
        if answer["job"] is None:
            raise UsageError(
                f"the scheduler {self._client.scheduler.address} knows no job {self.id}: 'dswml jobs' lists "
                "those it knows; they end with the scheduler"
            )
        return answer


def _ask(client: Client, action: str, **arguments: Any) -> dict[str, Any]:
    """Ask the board of a scheduler."""
    try:
        answer: dict[str, Any] = client.sync(
            getattr(client.scheduler, BOARD), action=action, callback_timeout=ANSWER_SECONDS, **arguments
        )
    except (OSError, TimeoutError) as error:
        raise ClusterError(
            f"the scheduler at {client.scheduler.address} cannot be reached any more ({error}): check it, "
            "and ask again; jobs end with their scheduler, their checkpoints stay"
        ) from error
    return answer


def all_jobs(client: Client) -> list[dict[str, Any]]:
    """Return the status of every job that a scheduler knows, the oldest first."""
    client.register_plugin(JobBoard())
    jobs: list[dict[str, Any]] = _ask(client, "list")["jobs"]
    return jobs


def submit(
    client: Client,
    verb: str,
    *arguments: str | os.PathLike[str],
    name: str | None = None,
    wait_workers: int = 1,
    timeout: float = 300.0,
    **options: Any,
) -> Job:
    """Hand a verb of the command line to the client's cluster; it goes on when the client has gone.

    Parameters
    ----------
    client : distributed.Client
        A client of a running scheduler.
    verb : {"train", "tune", "predict", "evaluate"}
    *arguments : str or path
        The verb's arguments, as on the command line.
    name : str, optional
        Another name for the job.
    wait_workers, timeout : int, float
        Wait for so many workers, and for at most so many seconds.
    **options
        The verb's options, with underscores: ``model="model.zarr", radius=20, overwrite=True``.

    Returns
    -------
    Job

    Examples
    --------
    >>> import dswml, tempfile
    >>> from dswml.synth import synthesize
    >>> with Client(n_workers=1, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as client:
    ...     with tempfile.TemporaryDirectory() as folder:
    ...         data, model = f"{folder}/data.zarr", f"{folder}/model.zarr"
    ...         _ = synthesize(data, rows=300, features=10, labels=40, sparsity=4)
    ...         job = dswml.submit(client, "train", data, model=model, radius=5)
    ...         job.result(timeout=120)["status"]
    ...     job.status()["state"]
    'OPTIMAL'
    'done'
    """
    if verb not in JOB_VERBS:
        raise UsageError(f"{verb!r} cannot be submitted: it is one of {', '.join(JOB_VERBS)}")
    command = command_of(verb)
    argv = [os.fspath(argument) for argument in arguments] + _as_argv(command, options)
    try:
        parameters = command.make_context(verb, argv).params
    except click.ClickException as error:
        raise UsageError(f"submit {verb}: {error.format_message()}") from error
    return hand_over(client, verb, parameters, name=name, wait_workers=wait_workers, timeout=timeout)


def _as_argv(command: click.Command, options: Mapping[str, Any]) -> list[str]:
    """Write options as on the command line."""
    flags = {
        flag.removeprefix("--").replace("-", "_"): flag
        for parameter in command.params
        for flag in parameter.opts
        if flag.startswith("--")
    }
    argv: list[str] = []
    for name, value in options.items():
        if name == "storage_options":
            argv += [part for key, each in value.items() for part in ("-o", f"{key}={json.dumps(each)}")]
            continue
        if name not in flags:
            raise UsageError(f"{command.name} has no option {name!r}: it has {', '.join(sorted(flags))}")
        if value is None or value is False:
            continue
        argv.append(flags[name])
        if value is not True:
            argv += [str(part) for part in (value if isinstance(value, list | tuple) else [value])]
    return argv


def hand_over(
    client: Client,
    verb: str,
    parameters: Mapping[str, Any],
    *,
    name: str | None = None,
    wait_workers: int = 1,
    timeout: float = 300.0,
    announce: Callable[[str], None] = lambda line: None,
) -> Job:
    """Look whether the cluster can do the work, and give it the job of these parsed parameters."""
    if client.scheduler.address.startswith("inproc://"):
        raise UsageError(
            f"only this process can reach the scheduler {client.scheduler.address}, and a job needs another: "
            "use a cluster of processes"
        )
    id = f"{verb}-{uuid.uuid4().hex[:8]}"
    reads, writes = JOB_VERBS[verb]
    chosen = {**parameters, **{key: value for key, value in OWN.items() if key in parameters}}
    for key in (*reads, writes, "checkpoint"):
        if key is not None and chosen.get(key) is not None:
            chosen[key] = absolute_url(chosen[key])
    output = None if writes is None else chosen[writes]
    own_checkpoint = output is not None and "checkpoint" in chosen and chosen["checkpoint"] is None
    if own_checkpoint:
        chosen["checkpoint"] = f"{output}.{id}.checkpoint"
    options = chosen["storage_options"]
    secrets = secrets_of(options)

    def shown(text: str) -> str:
        return without(secrets, text)

    places = [chosen[key] for key in reads if chosen.get(key) is not None]
    if len(client.nthreads()) < wait_workers:
        announce(f"Waiting for {wait_workers} workers.")
    wait_for_workers(client, wait_workers, timeout)
    check_versions(client)
    check_stores(client, places, [] if output is None else [output], options)
    client.register_plugin(JobBoard())
    record = {
        "id": id,
        "name": name,
        "verb": verb,
        "reads": [shown(place) for place in places],
        "output": None if output is None else shown(output),
        "checkpoint": None if chosen.get("checkpoint") is None else shown(chosen["checkpoint"]),
        "submitted": time.time(),
    }
    _ask(client, "open", record=record)
    spec = {"id": id, "verb": verb, "parameters": chosen, "own_checkpoint": own_checkpoint}
    future = client.submit(
        run_job, Hidden(json.dumps(spec)), key=task_key(id), pure=False, priority=100, retries=2
    )
    fire_and_forget(future)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not _ask(client, "is_kept", job=id)["kept"]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the scheduler {client.scheduler.address} did not take job {id}: submit it again"
            )
        time.sleep(0.05)
    future.release()
    return Job(client, id)
