"""Sends values to all workers of a Dask cluster, so that no task graph carries them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Client, Future

from .executor import Shared

__all__ = ["LOOK_EVERY", "Broadcast", "SendError", "wait_for"]

T = TypeVar("T")

#: Seconds between two looks at whether what is waited for can still come.
LOOK_EVERY = 2.0
#: Seconds that a scheduler may go on trying to reach a worker that is gone: two attempts to connect.
HELD_UP_SECONDS = 60.0

#: So many values sent one after the other are sent once more as one. A basis that grows by one
#: direction in every iteration would otherwise be thousands of values that every task depends on.
BUNDLE = 16


class SendError(Exception):
    """A value did not reach the workers, because some or all of them were lost on the way."""


def wait_for(client: Client, result: Coroutine[Any, Any, T], look: Callable[[], object]) -> T:
    """Return what comes of a call on the client's loop; give it up when a look meanwhile raises."""
    pending = asyncio.run_coroutine_threadsafe(result, client.loop.asyncio_loop)
    while True:
        try:
            return pending.result(LOOK_EVERY)
        except TimeoutError:
            if pending.done():  # the call itself says so
                raise
        try:
            look()
        except BaseException:
            pending.cancel()
            raise


@dataclass
class _Bundle:
    """Shared values that travel as one list."""

    keys: tuple[str, ...]
    future: Future[list[Any]] | None = None

    @property
    def is_there(self) -> bool:
        return self.future is not None and self.future.status == "finished"


class Broadcast:
    """What has been sent to the workers of one client, until it is forgotten.

    Every worker holds a copy of a value, so that it outlives all workers but the last.

    Parameters
    ----------
    client : distributed.Client
    workers : callable
        Returns the workers that there are, by address.
    """

    def __init__(self, client: Client, workers: Callable[[], Mapping[str, Any]]) -> None:
        self._client, self._workers = client, workers
        self._held_up_until = 0.0
        self._bundles: dict[str, _Bundle] = {}  # by their first key

    def send(self, value: Any, kind: str = "payload", home: str | None = None) -> Future[Any]:
        """Send a value, to one worker or to all; it is dropped when the future is."""
        key = f"{kind}-{uuid.uuid4().hex}"
        wanted = set(self._workers()) if home is None else {home}

        def look() -> None:
            gone = wanted.difference(self._workers())
            if gone:
                raise SendError(f"{', '.join(sorted(gone))} left while a value was sent there")

        everywhere = home is None and time.monotonic() >= self._held_up_until
        only = None if home is None else [home]
        sent = self._client.scatter({key: value}, workers=only, broadcast=everywhere, asynchronous=True)
        try:
            return wait_for(self._client, sent, look)[key]
        except SendError:
            # The scheduler goes on trying to send the value to the worker that is gone until it is wanted no
            # more, and makes copies of no other meanwhile: those are sent to one worker, for others to fetch.
            Future(key, self._client).release()
            self._held_up_until = time.monotonic() + HELD_UP_SECONDS
            raise
        except (OSError, TimeoutError) as error:
            raise SendError(f"{type(error).__name__}: {error}") from error

    def send_once(self, shared: Sequence[Shared]) -> list[Future[list[Any]]]:
        """Send those values that are not there yet; return lists that hold all of them in order."""
        stack: list[_Bundle] = []
        for bundle in self._known(tuple(piece.key for piece in shared)):
            stack.append(bundle)
            while len(stack) >= BUNDLE and len({len(each.keys) for each in stack[-BUNDLE:]}) == 1:
                joined = _Bundle(tuple(key for each in stack[-BUNDLE:] for key in each.keys))
                stack[-BUNDLE:] = [joined]
        values = {piece.key: piece.value for piece in shared}
        futures = []
        for bundle in stack:
            if bundle.future is None:
                bundle.future = self.send([values[key] for key in bundle.keys], "shared")
                self.forget(bundle.keys)  # of smaller bundles
                self._bundles[bundle.keys[0]] = bundle
            futures.append(bundle.future)
        return futures

    def _known(self, keys: tuple[str, ...]) -> Iterable[_Bundle]:
        """Cut the keys into the bundles that are there and single ones that are not."""
        position = 0
        while position < len(keys):
            bundle = self._bundles.get(keys[position])
            if (
                bundle is None
                or bundle.keys != keys[position : position + len(bundle.keys)]
                or not bundle.is_there
            ):
                bundle = _Bundle(keys[position : position + 1])
            yield bundle
            position += len(bundle.keys)

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the values of these keys, and others that were sent in one bundle with them."""
        gone = set(keys)
        for first in [first for first, bundle in self._bundles.items() if gone.intersection(bundle.keys)]:
            del self._bundles[first]

    def close(self) -> None:
        """Drop everything that was sent once."""
        self._bundles.clear()
