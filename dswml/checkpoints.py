"""When to write a checkpoint, what belongs to it, and how work goes on from one.

A checkpoint is the state between two iterations and the sums of the reads of the data since then. Work
that goes on repeats the iteration from that state; the reads that it had made are answered from
the checkpoint, so that no read is lost and the rest has the bits of a run that was never stopped.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .checkpoint_file import CheckpointFolder, TakenOverError, Values, newest_checkpoint
from .errors import DswmlError, StoppedEarlyError, StoreExistsError, UsageError
from .executor import Shared
from .staging import check_same
from .storage import absolute_url
from .stored import Dataset
from .sweep import Partial, Sweep

__all__ = ["ABOUT", "Checkpoints", "Journal", "begin", "data_request", "saving"]

#: Fields of a `Sweep` that are named anew in every run.
_NAMES = ("source", "basis")
#: Before the names of values that are no part of the state.
ABOUT = "about "
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*s")


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to write checkpoints, and whether to go on from one.

    Attributes
    ----------
    url : str or path
        A folder for the checkpoints of one run, local or on any fsspec file system.
    every : int or str
        So many passes over X, or seconds as in "300s", between two of them.
    resume : bool
        Go on from the last checkpoint in the folder, if there is one.
    overwrite : bool
        Begin again where there is one.
    storage_options : mapping
        Options of the file system; they are never written.

    Examples
    --------
    >>> Checkpoints("run1", every=10).passes, Checkpoints("run1").seconds
    (10.0, 300.0)
    """

    url: str | os.PathLike[str]
    every: int | str = "300s"
    resume: bool = False
    overwrite: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.passes <= 0 or self.seconds <= 0:
            raise UsageError(f"checkpoints every {self.every!r}: it must be positive")

    @property
    def passes(self) -> float:
        """Passes over X between two checkpoints."""
        text = str(self.every)
        return float(text) if text.isdecimal() else float("inf")

    @property
    def seconds(self) -> float:
        """Seconds between two checkpoints."""
        text = str(self.every)
        match = _SECONDS.fullmatch(text)
        if match is None and not text.isdecimal():
            raise UsageError(f"checkpoints every {text!r}: give a number of passes, or seconds as in '300s'")
        return float("inf") if match is None else float(match[1])

    def within(self, name: str) -> Checkpoints:
        """Return the same for a part of the work, in a folder of its own."""
        url = f"{absolute_url(self.url)}/{name}"
        return Checkpoints(url, self.every, self.resume, self.overwrite, self.storage_options)


class Journal:
    """Keeps the state of a run and its reads, writes them when it is time, and answers reads made before.

    Parameters
    ----------
    checkpoints : Checkpoints
    request : mapping
        What the work is of; only the same work may go on.
    n_rows : int
        Rows in a pass.
    limit : int
        Bytes of reads to keep; later ones are made again.
    stop : callable, optional
        Asked after every read whether to stop.
    time_limit : float, optional
        Seconds from now after which to stop.
    about : mapping, optional
        What a report must know of the work besides its state: numbers, texts and arrays.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        request: Mapping[str, Any],
        *,
        n_rows: int,
        limit: int,
        stop: Callable[[], bool] | None = None,
        time_limit: float | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.checkpoints, self.request, self.n_rows, self.limit = checkpoints, dict(request), n_rows, limit
        self._about = {f"{ABOUT}{name}": value for name, value in (about or {}).items()}
        self._stop, self._time_limit = stop, float("inf") if time_limit is None else time_limit
        self._started = self._written = time.monotonic()
        self.url, options = absolute_url(checkpoints.url), checkpoints.storage_options
        self._folder = CheckpointFolder(self.url, options)
        again = checkpoints.overwrite and not checkpoints.resume
        found = None if again else newest_checkpoint(self.url, options)
        self._before: deque[tuple[str, Partial]] = deque()
        #: The state to go on from; None for the beginning.
        self.restored: Values | None = None
        self._state: Values = {}
        self.seconds_before = 0.0
        if found is not None and checkpoints.resume:
            check_same(self.url, found.request, self.request)
            self._folder.last = found.number
            self._state, self._before = _unpacked(found.values)
            self.seconds_before = self._state.pop("seconds")
            self.restored = self._state or None
        elif found is not None:
            raise StoreExistsError(
                f"{self.url} holds a checkpoint: go on from it with --resume (resume=True), choose another "
                "place, or begin again with --overwrite (overwrite=True)"
            )
        self._folder.take()
        self._reads: list[tuple[str, Partial]] = []
        self._kept = self._rows_since = 0
        self._new = False
        self._moved = False  # at least one read is made before a stop, so that any time limit gets to the end
        self._pieces: dict[str, str] = {}

    @property
    def beginning(self) -> str:
        """What the work begins with, in a line for people."""
        if self._folder.last is None:
            return f"There is no checkpoint in {self.url} yet: beginning from the start."
        return f"Going on from checkpoint {self._folder.last} in {self.url}."

    def through(
        self, requests: Sequence[Sweep], pieces: Sequence[Shared], read: Callable[[], Partial]
    ) -> Partial:
        """Return the sums of a read that was made before the work was interrupted, or make it.

        After it a checkpoint is written if it is time, and the work stopped if somebody asks.
        """
        key = self._key(requests, pieces)
        if self._before and self._before[0][0] != key:
            self._before.clear()  # another limit, or another machine's rounding, leads elsewhere
        again = bool(self._before)
        sums = self._before.popleft()[1] if again else read()
        self._kept += sum(value.nbytes for value in sums.values())
        if self._kept <= self.limit:
            self._reads.append((key, sums))
            self._new |= not again
        if not again:
            self._moved = True
            self._rows_since += int(sums["rows_read"])
            self._act()
        return sums

    def between(self, state: Values, *, over: bool) -> None:
        """Take the state between two iterations; ``over`` if it is the last."""
        self.restored = None
        if state is not self._state:
            self._state, self._reads, self._kept, self._new = state, [], 0, True
            self._before.clear()
        if over:
            self.save()
        else:
            self._act()

    def _key(self, requests: Iterable[Sweep], pieces: Iterable[Shared]) -> str:
        """Return a digest of what a read is asked for."""
        digest = hashlib.sha256()
        for request in requests:
            _add(digest, [getattr(request, each.name) for each in fields(request) if each.name not in _NAMES])
        for piece in pieces:
            if piece.key not in self._pieces:
                own = hashlib.sha256()
                _add(own, piece.value)
                self._pieces[piece.key] = own.hexdigest()
            digest.update(self._pieces[piece.key].encode())
        return digest.hexdigest()

    def _act(self) -> None:
        now = time.monotonic()
        over_time = now - self._started >= self._time_limit
        stop = over_time or (self._stop is not None and self._stop())
        if stop and self._moved:
            self.save()
            if self._folder.last is None:
                raise DswmlError(f"stopped, and no checkpoint could be written to {self.url}")
            why = "at the time limit" if over_time else "as asked"
            raise StoppedEarlyError(f"stopped {why}: the checkpoint in {self.url} goes on from here")
        passes = self._rows_since / self.n_rows
        if passes >= self.checkpoints.passes or now - self._written >= self.checkpoints.seconds:
            self.save()

    def save(self) -> None:
        """Write a checkpoint if there is anything new; where that fails, warn, and keep the one before."""
        if not self._new:
            return
        seconds = self.seconds_before + time.monotonic() - self._started
        try:
            values = {**self._state, **self._about, "seconds": seconds, **_packed(self._reads)}
            self._folder.write(self.request, values)
            self._new = False
        except TakenOverError:
            raise
        except Exception as error:  # every file system has its own
            kept = "there is none yet" if self._folder.last is None else "the one before it is kept"
            warnings.warn(
                f"no checkpoint could be written to {self.url} ({type(error).__name__}: {error}): {kept}, "
                "and the work goes on",
                stacklevel=2,
            )
        self._written, self._rows_since = time.monotonic(), 0


def begin(
    checkpoints: Checkpoints | None,
    request: Mapping[str, Any],
    *,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> Journal | None:
    """Return the journal of work that may go on from a checkpoint, which is announced; None without any."""
    if checkpoints is None:
        return None
    journal = Journal(checkpoints, request, **options)
    if announce is not None and checkpoints.resume:
        announce(journal.beginning)
    return journal


def data_request(data: Dataset) -> dict[str, Any]:
    """What the bits of the work depend on of the data: what they are, and how they are cut."""
    most = max(block.n_rows for block in data.blocks)
    return {"data": data.fingerprint, "row_blocks": f"{len(data.blocks)} of at most {most} rows"}


@contextmanager
def saving(journal: Journal | None) -> Iterator[None]:
    """Write a last checkpoint when the work fails, as when the cluster is lost."""
    try:
        yield
    except (StoppedEarlyError, TakenOverError):
        raise
    except Exception:
        if journal is not None:
            journal.save()
        raise


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}".encode())
        for each in value:
            _add(digest, each)
    else:
        digest.update(repr(value).encode())


def _packed(reads: list[tuple[str, Partial]]) -> Values:
    """Reads as flat values: arrays with dimensions, numbers without."""
    values: Values = {"reads": [key for key, _ in reads]}
    for number, (_, sums) in enumerate(reads):
        for name, value in sums.items():
            values[f"read {number} {name}"] = value if value.ndim else value.item()
    return values


def _unpacked(values: Values) -> tuple[Values, deque[tuple[str, Partial]]]:
    """Return the state, and the reads since."""
    state = {name: value for name, value in values.items() if not name.startswith(("read", ABOUT))}
    reads: deque[tuple[str, Partial]] = deque((key, {}) for key in values["reads"])
    for name, value in values.items():
        if name.startswith("read "):
            _, number, part = name.split(" ", 2)
            reads[int(number)][1][part] = np.asarray(value)
    return state, reads
