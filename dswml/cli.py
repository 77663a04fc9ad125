"""The command line: verbs that are loaded when they are used, errors as one sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from dswml.errors import DswmlError, UsageError

__all__ = [
    "ARGUMENTS",
    "cli",
    "command_of",
    "debug_option",
    "main",
    "sentence",
    "verb_options",
    "warnings_as_lines",
]

F = TypeVar("F", bound=Callable[..., Any])

#: Verb -> "module:command". Modules are imported when the verb is used, so that the others start at once.
VERBS = {
    "cancel": "dswml.cli_jobs:cancel",
    "evaluate": "dswml.cli_predict:evaluate",
    "info": "dswml.cli_info:info",
    "import": "dswml.cli_data:import_",
    "jobs": "dswml.cli_jobs:jobs",
    "logs": "dswml.cli_jobs:logs",
    "plan": "dswml.cli_plan:plan",
    "predict": "dswml.cli_predict:predict",
    "report": "dswml.cli_report:report",
    "result": "dswml.cli_jobs:result",
    "status": "dswml.cli_jobs:status",
    "submit": "dswml.cli_jobs:submit",
    "synth": "dswml.cli_data:synth",
    "train": "dswml.cli_train:train",
    "tune": "dswml.cli_tune:tune",
    "validate": "dswml.cli_data:validate",
}

#: What a disk can have against a file.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG)

_DEBUG = "dswml.debug"
#: Where the context keeps the verb and its arguments as they were given.
ARGUMENTS = "dswml.arguments"


def sentence(error: Exception) -> str:
    """Return what a user is told of an error."""
    if isinstance(error, DswmlError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"{error.filename or 'a file'} cannot be written or read: {error.strerror}"
    return f"{type(error).__name__}: {error} (run again with --debug to see where)"


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show warnings as a line each."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        click.echo(f"Warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def command_of(verb: str) -> click.Command:
    """Return the command of a verb, and import its module."""
    module, _, attribute = VERBS[verb].partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command_of(cmd_name) if cmd_name in VERBS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings_as_lines():
                return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                click.echo(traceback.format_exc(), err=True, nl=False)
            click.echo(f"Error: {sentence(error)}", err=True)
            ctx.exit(error.exit_code if isinstance(error, DswmlError) else 1)


def _remember_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Show the traceback of an error.",
)


def _storage_options(
    ctx: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError("a storage option (-o) is not of the form KEY=VALUE")  # it may hold a secret
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def number_of_bytes(ctx: click.Context, parameter: click.Parameter, text: str) -> int:
    """Callback of an option such as "64 MiB"."""
    from dask.utils import parse_bytes

    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise UsageError(f"{text!r} is not a number of bytes: write it like '64 MiB'") from error


block_bytes_option = click.option(
    "--block-bytes",
    metavar="BYTES",
    default="64 MiB",
    show_default=True,
    callback=number_of_bytes,
    help="Size of a row block.",
)


def verb_options(verb: F) -> F:
    """Give a click command ``storage_options``, ``as_json``, ``quiet`` and --debug: what every verb has."""
    options = [
        click.option(
            "-o",
            "--storage-option",
            "storage_options",
            metavar="KEY=VALUE",
            multiple=True,
            callback=_storage_options,
            help="Option of the file system (fsspec), such as endpoint_url=...; JSON or text. Repeatable.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
        click.option("-q", "--quiet", is_flag=True, help="Show no progress."),
        debug_option,
    ]
    for option in reversed(options):
        verb = option(verb)
    return verb


@click.group(
    name="dswml",
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 usage, 3 bad data, 4 cluster unreachable or lost, "
    "5 stopped early with a checkpoint, 1 anything else.",
)
@click.version_option(package_name="dswml", message="%(prog)s %(version)s")
@debug_option
def cli() -> None:
    """Multi-label classification on data sets larger than memory, on one machine or a Dask cluster."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    cli(prog_name="dswml")
