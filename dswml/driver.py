"""Runs a job on a worker: a Dask task that looks after a process, and that process.

The verb runs in a process of its own, with a client of its own. So it can be stopped by a signal
as on a command line, or killed, and neither holds up the worker nor another job. It ends when
the worker does, however that ends.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any

from .hiding import Hidden, secrets_of, without

__all__ = ["run_job"]

#: Seconds between two messages to the scheduler.
POST_EVERY = 0.5


# The task


def run_job(spec: Hidden) -> int:
    """Run a job to its end, beside the other tasks of this worker; return its exit code."""
    from distributed import Reschedule, get_client, get_worker, secede

    from .job_board import BOARD

    worker, client = get_worker(), get_client()
    job = json.loads(spec.text)
    secede()

    def tell(action: str, **news: Any) -> dict[str, Any]:
        answer: dict[str, Any] = client.sync(
            getattr(client.scheduler, BOARD), action=action, job=job["id"], **news
        )
        return answer

    leave = tell("start", worker=worker.address)
    if not leave["go"]:
        return 1
    security = worker.security
    job["scheduler"] = worker.scheduler.address
    job["begun"], job["start"] = leave["begun"], leave["start"]
    job["tls"] = {
        "distributed.comm.tls.ca-file": security.tls_ca_file,
        "distributed.comm.tls.client.cert": security.tls_worker_cert,
        "distributed.comm.tls.client.key": security.tls_worker_key,
        "distributed.comm.require-encryption": security.require_encryption,
    }
    process = _Process(job)
    asked: str | None = None
    try:
        while process.is_running():
            time.sleep(POST_EVERY)
            with suppress(OSError):  # a scheduler that is gone ends the process by itself
                lines, figures = process.news()
                answer = tell("post", start=job["start"], lines=lines, figures=figures)
                if answer["asked"] == "stop" != asked:
                    process.send(signal.SIGTERM)
                asked = answer["asked"]
            if asked == "kill":
                return 1
            if worker.status.name in ("closing", "closed"):
                raise Reschedule
    finally:
        process.close()
    if process.was_killed and asked is None:  # by a system without memory, say
        raise Reschedule
    exit_code, error, result = process.outcome()
    lines, figures = process.news()
    tell("post", start=job["start"], lines=lines, figures=figures)
    tell("finish", start=job["start"], exit_code=exit_code, error=error, result=result)
    return exit_code


class _Process:
    """The process of a job, with what it says."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._secrets = secrets_of(job["parameters"]["storage_options"])
        self._lines: list[str] = []
        self._figures: dict[str, Any] | None = None
        self._end: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dswml.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, take), daemon=True)
            for stream, take in (
                (self._process.stdout, self._take_message),
                (self._process.stderr, self._take_line),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        with suppress(ValueError):  # closed
            for line in stream:
                take(without(self._secrets, line.rstrip("\n")))

    def _take_line(self, line: str) -> None:
        self._lines.append(line)

    def _take_message(self, line: str) -> None:
        message = json.loads(line)
        if "exit_code" in message:
            self._end = message
        else:
            self._figures = message

    def news(self) -> tuple[list[str], dict[str, Any] | None]:
        """Return what was said since the last call."""
        lines, self._lines = self._lines, []
        figures, self._figures = self._figures, None
        return lines, figures

    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def was_killed(self) -> bool:
        return self._process.returncode < 0

    def outcome(self) -> tuple[int, str | None, str | None]:
        """Return exit code, error and result of a process that has ended."""
        if self._end is None:
            code = self._process.returncode
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            return 1, f"the job's process ended {how} and said nothing: see the job's log", None
        return self._end["exit_code"], self._end["error"], self._end["result"]

    def close(self) -> None:
        """End the process if it runs, and hear what it said last."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


# The process


def _end_with_the_worker() -> None:
    """Wait for the end of standard input, which the worker holds open as long as it lives."""
    while os.read(0, 1024):
        pass
    os._exit(1)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the job that standard input describes; say on standard output how it goes and ends."""
    import dask

    from .progress import noting

    with open(0, "rb", buffering=0, closefd=False) as stdin:
        job = json.loads(stdin.readline())
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    signal.signal(signal.SIGTERM, _interrupt)
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=messages, flush=True)

    said = io.StringIO()
    with dask.config.set(job["tls"]), noting(tell):
        with redirect_stdout(said):
            exit_code, error = _run(job)
        if exit_code == 0:
            _remove_checkpoint(job)
    tell(exit_code=exit_code, error=error, result=said.getvalue().strip() or None)


def _run(job: dict[str, Any]) -> tuple[int, str | None]:
    import click

    from .cli import sentence

    try:
        _call(job)
    except click.exceptions.Exit as end:
        return end.exit_code, None
    except click.ClickException as error:
        return error.exit_code, error.format_message()
    except KeyboardInterrupt:
        return 1, "the job was stopped, and has no checkpoint to go on from"
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            traceback.print_exc()
        return exit_code or 1, sentence(error)
    return 0, None


def _call(job: dict[str, Any]) -> None:
    """Call the verb; at a later start, go on from where an earlier one came to."""
    verb, parameters, begun = job["verb"], job["parameters"], job["begun"]
    if job["start"] > 1 and parameters.get("checkpoint") and (begun or job["own_checkpoint"]):
        parameters["resume"] = True
    # A start that got somewhere had found the place of the output free, or was to overwrite it: what is
    # there now is ours.
    if begun and verb == "predict":
        parameters |= {"resume": True, "overwrite": False}
    elif begun and "overwrite" in parameters:
        parameters["overwrite"] = True
    return _invoke(verb, parameters, job["scheduler"])


def _invoke(verb: str, parameters: dict[str, Any], scheduler: str) -> None:
    import click

    from .cli import command_of, warnings_as_lines

    command = command_of(verb)
    assert command.callback is not None
    with click.Context(command, info_name=verb) as context, warnings_as_lines():
        context.invoke(command.callback, **{**parameters, "scheduler": scheduler})


def _remove_checkpoint(job: dict[str, Any]) -> None:
    """Remove the checkpoint of a job that is done, if it was made for this job alone."""
    from .storage import filesystem, store_exists

    place, options = job["parameters"].get("checkpoint"), job["parameters"]["storage_options"]
    if job["own_checkpoint"] and store_exists(place, options):
        fs, path = filesystem(place, options)
        fs.rm(path, recursive=True)


if __name__ == "__main__":
    main()
