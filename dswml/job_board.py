"""What a Dask scheduler knows of the jobs that were handed to it, kept where no client need stay for it.

The board lives in the scheduler and ends with it. Everything that enters or leaves it is text and
numbers; nothing secret is ever written on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed import SchedulerPlugin

__all__ = ["BOARD", "ENDED", "JobBoard", "task_key"]

#: Name of the plug-in and of the scheduler's handler through which jobs are asked about.
BOARD = "dswml_jobs"
#: States that a job does not leave.
ENDED = ("done", "failed", "stopped", "cancelled")
#: So many lines of a job's log, and so many jobs that have ended, are kept.
LOG_LINES = 2000
ENDED_JOBS = 200
#: So many starts one after the other may end with the loss of the driver before it has got anywhere.
FRUITLESS_STARTS = 4


def task_key(job: str) -> str:
    """Return the key of the Dask task that runs a job."""
    return f"dswml-job-{job}"


@dataclass
class _Job:
    """A job, and how it stands."""

    id: str
    name: str | None
    verb: str
    reads: list[str]
    output: str | None
    checkpoint: str | None
    submitted: float
    state: str = "queued"
    worker: str | None = None
    starts: int = 0
    started: float | None = None
    ended: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    error: str | None = None
    asked: str | None = None
    fruitless: int = 0
    begun: bool = False
    result: str | None = None
    lines: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    n_lines: int = 0

    def end(self, state: str, exit_code: int, error: str | None, result: str | None = None) -> None:
        self.state, self.exit_code, self.error, self.result = state, exit_code, error, result
        self.ended = time.time()

    def log(self, line: str) -> None:
        self.lines.append((self.n_lines, line))
        self.n_lines += 1

    def shown(self) -> dict[str, Any]:
        hidden = ("asked", "fruitless", "begun", "result", "lines", "n_lines")
        return {key: value for key, value in vars(self).items() if key not in hidden}


class JobBoard(SchedulerPlugin):  # type: ignore[misc]
    """Keeps the jobs of a scheduler; it answers clients and drivers, and sees what becomes of the tasks."""

    name = BOARD
    idempotent = True

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    async def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.handlers[BOARD] = self.answer

    def answer(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Answer a message: what one of the methods below returns."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self._open,
            "is_kept": self._is_kept,
            "list": self._list,
            "show": self._show,
            "logs": self._logs,
            "result": self._result,
            "cancel": self._cancel,
            "start": self._start,
            "post": self._post,
            "finish": self._finish,
        }
        return actions[action](**arguments)

    # Asked by clients

    def _open(self, record: dict[str, Any]) -> dict[str, Any]:
        self._jobs[record["id"]] = _Job(**record)
        ended = [job.id for job in self._jobs.values() if job.state in ENDED]
        for job in ended[: max(len(ended) - ENDED_JOBS, 0)]:
            del self._jobs[job]
        return {}

    def _is_kept(self, job: str) -> dict[str, Any]:
        """Tell whether the scheduler has the task, and keeps it when the client goes."""
        task = self._scheduler.tasks.get(task_key(job))
        ended = self._jobs[job].state in ENDED
        kept = task is not None and self._scheduler.clients["fire-and-forget"] in task.who_wants
        return {"kept": kept or ended}

    def _list(self) -> dict[str, Any]:
        return {"jobs": [job.shown() for job in self._jobs.values()]}

    def _found(self, job: str) -> _Job | None:
        """Return the job of this id, or the last of this name."""
        named = [each for each in self._jobs.values() if each.name == job]
        return self._jobs.get(job) or (named[-1] if named else None)

    def _show(self, job: str) -> dict[str, Any]:
        found = self._found(job)
        return {"job": None if found is None else found.shown()}

    def _logs(self, job: str, since: int = 0) -> dict[str, Any]:
        found = self._found(job)
        if found is None:
            return {"job": None}
        lines = [line for number, line in found.lines if number >= since]
        return {"job": found.shown(), "lines": lines, "next": found.n_lines}

    def _result(self, job: str) -> dict[str, Any]:
        found = self._found(job)
        return {"job": None} if found is None else {"job": found.shown(), "result": found.result}

    def _cancel(self, job: str) -> dict[str, Any]:
        """Ask a running driver to stop; end a job that does not run, or that is asked once more."""
        found = self._found(job)
        if found is None:
            return {"job": None}
        if found.state == "running":
            found.state, found.asked = "stopping", "stop"
        elif found.state not in ENDED:
            found.end(
                "cancelled",
                1,
                "the job was cancelled before it ran"
                if found.state == "queued"
                else "the job was killed: it had been asked to stop, and then once more",
            )
            found.asked = "kill"
            self._scheduler.client_releases_keys(keys=[task_key(found.id)], client="fire-and-forget")
        return {"job": found.shown()}

    # Asked by drivers

    def _start(self, job: str, worker: str) -> dict[str, Any]:
        """Let a driver begin; tell it which start this is and whether an earlier one got anywhere."""
        found = self._jobs[job]
        if found.state in ENDED:
            return {"go": False}
        found.starts += 1
        found.fruitless += 1
        if found.fruitless > FRUITLESS_STARTS:
            found.end(
                "failed",
                4,
                f"{FRUITLESS_STARTS} workers were lost one after the other before the job got anywhere: "
                "look for workers that run out of memory",
            )
            return {"go": False}
        if found.starts > 1:
            found.log(f"Start {found.starts}, on {worker}.")
        found.state = "running" if found.asked is None else "stopping"
        found.worker, found.started = worker, found.started or time.time()
        # Fruitless starts are counted here: a driver is not to blame for every worker that it outlived.
        task = self._scheduler.tasks.get(task_key(job))
        if task is not None:
            task.suspicious = 0
        return {"go": True, "start": found.starts, "begun": found.begun}

    def _post(self, job: str, start: int, lines: list[str], figures: dict[str, Any] | None) -> dict[str, Any]:
        """Take a driver's news; tell it whether the job is still its own, and whether to stop."""
        found = self._jobs.get(job)
        if found is None or found.starts != start or found.state in ENDED:
            return {"asked": "kill"}
        for line in lines:
            found.log(line)
        if figures is not None:
            found.figures, found.begun, found.fruitless = figures, True, 0
        return {"asked": found.asked}

    def _finish(
        self, job: str, start: int, exit_code: int, error: str | None, result: str | None
    ) -> dict[str, Any]:
        found = self._jobs.get(job)
        if found is None or found.starts != start or found.state in ENDED:
            return {}
        state = {0: "done", 5: "stopped"}.get(exit_code, "failed")
        if exit_code and found.asked:
            state = "cancelled"
        found.end(state, exit_code, error, result)
        return {}

    # Seen on the scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if not (isinstance(key, str) and key.startswith(task_key(""))):
            return
        job = self._jobs.get(key.removeprefix(task_key("")))
        if job is None or job.state in ENDED:
            return
        if finish == "erred":
            job.end("failed", 4, f"the cluster lost the job's driver on {job.worker}: see that worker's log")
        elif finish == "forgotten":
            job.end("cancelled", 1, "the job's task was cancelled on the scheduler")
        elif start == "processing" and finish == "released":
            job.log(f"The driver on {job.worker} was lost; the job starts again.")
            job.state, job.worker = "queued", None
