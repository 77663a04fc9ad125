"""Every error a user can meet: one sentence with the value, the place and the way out.

Each class is also a builtin exception, so callers need not import this module to
catch it, and carries the exit code that the command line ends with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ClusterError",
    "DataError",
    "DswmlError",
    "IncompleteStoreError",
    "StoppedEarlyError",
    "StoreExistsError",
    "StoreNotFoundError",
    "UsageError",
    "telling",
]


class DswmlError(Exception):
    """Anything that went wrong and is not one of the kinds below."""

    exit_code = 1


class UsageError(DswmlError, ValueError):
    """A parameter or option that cannot be used as given."""

    exit_code = 2


class StoreExistsError(UsageError, FileExistsError):
    """The target exists and overwriting was not asked for."""


class DataError(DswmlError, ValueError):
    """The data themselves are wrong: a malformed line, a NaN, a corrupt chunk."""

    exit_code = 3


class StoreNotFoundError(DataError, FileNotFoundError):
    """There is no store at the given place."""


class IncompleteStoreError(DataError):
    """The store was never finished."""


class ClusterError(DswmlError, ConnectionError):
    """The cluster cannot be reached, or was lost for good."""

    exit_code = 4


class StoppedEarlyError(DswmlError):
    """The work stopped before its end and can be continued."""

    exit_code = 5


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn whatever a library raises about a file into a `DataError`: each has exceptions of its own.

    Examples
    --------
    >>> with telling("a.json cannot be read"):
    ...     raise KeyError("shape")
    Traceback (most recent call last):
    dswml.errors.DataError: a.json cannot be read (KeyError: 'shape')
    """
    try:
        yield
    except DswmlError:
        raise
    except Exception as error:
        raise DataError(f"{what} ({' '.join(f'{type(error).__name__}: {error}'.split())})") from error
