"""What the verbs that can be stopped and resumed have in common: options, and the command to go on with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dswml.cli import ARGUMENTS
from dswml.errors import ClusterError, StoppedEarlyError, UsageError

if TYPE_CHECKING:
    from dswml.checkpoints import Checkpoints

__all__ = ["checkpoint_options", "checkpoints_of", "resume_command", "saying_how_to_resume"]

F = TypeVar("F", bound=Callable[..., Any])

#: Storage options that are no secret; what the others hold is not repeated.
_OPEN = ("anon", "endpoint_url")
_STORAGE_OPTION = re.compile(r"(--storage-option=|-o)(.+)", re.DOTALL)
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")


def checkpoint_options(verb: F) -> F:
    """Give a click command ``checkpoint``, ``checkpoint_every`` and ``resume``."""
    options = [
        click.option("--checkpoint", metavar="DIR", help="Write checkpoints here, a path or URL."),
        click.option(
            "--checkpoint-every",
            metavar="N|SECONDSs",
            default="300s",
            show_default=True,
            help='Passes over X between two checkpoints, or seconds, as in "300s".',
        ),
        click.option(
            "--resume", is_flag=True, help="Go on from the last checkpoint in DIR, if there is any."
        ),
    ]
    for option in reversed(options):
        verb = option(verb)
    return verb


def checkpoints_of(
    url: str | None, every: str, resume: bool, overwrite: bool, storage_options: dict[str, Any]
) -> Checkpoints | None:
    """Return what the options ask for."""
    from dswml.checkpoints import Checkpoints

    if url is None:
        if resume:
            raise UsageError("--resume goes on from a checkpoint: say where it is with --checkpoint DIR")
        return None
    return Checkpoints(url, every, resume, overwrite, storage_options)


@contextmanager
def saying_how_to_resume(checkpoint: Checkpoints | None) -> Iterator[None]:
    """Add the command to go on with to an error that leaves a checkpoint."""
    try:
        yield
    except (StoppedEarlyError, ClusterError) as error:
        arguments = click.get_current_context().meta.get(ARGUMENTS)
        if checkpoint is None or arguments is None:
            raise
        raise type(error)(f"{error}\nGo on with: {resume_command(arguments)}") from error


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that goes on with the work of another, without secrets.

    Examples
    --------
    >>> resume_command(["train", "s3://b/a b", "-o", "key=K", "--checkpoint", "c"])
    "dswml train 's3://b/a b' -o 'key=<hidden>' --checkpoint c --resume"
    """
    words: list[str] = []
    for word in arguments:
        match = _STORAGE_OPTION.fullmatch(word)
        if words and words[-1] in ("-o", "--storage-option"):
            word = _hidden(word)
        elif match is not None:
            word = match[1] + _hidden(match[2])
        words.append(_PASSWORD.sub("<hidden>@", word))
    if "--resume" not in words:
        words.append("--resume")
    return shlex.join(["dswml", *words])


def _hidden(pair: str) -> str:
    key = pair.partition("=")[0]
    return pair if key in _OPEN else f"{key}=<hidden>"
