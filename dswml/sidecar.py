"""Small objects kept in a store while it is written: values that fill no unit yet, marks of what is done."""

from __future__ import annotations

import io
import zlib
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from dswml.errors import DataError, telling

__all__ = ["Sidecar"]

_FOLDER = "_progress"
_CHECKSUM_BYTES = 4


class Sidecar:
    """What a group under construction holds beside its arrays; removed when it is complete.

    Parameters
    ----------
    group : zarr.Group
        The group, at the root of its store.
    remedy : str
        What a user is told to do where something in it is lost or damaged.
    """

    def __init__(
        self, group: zarr.Group, remedy: str = "begin the store again with --overwrite (overwrite=True)"
    ) -> None:
        self._store = group.store
        self._remedy = remedy
        self._prototype = default_buffer_prototype()

    def mark(self, piece: str) -> None:
        """Record that a piece of the work is done."""
        self._put(f"done/{quote(piece, safe='')}", b"")

    def marks(self) -> set[str]:
        """Return the pieces that are done."""
        return {unquote(key) for key in self._keys("done/")}

    def keep(self, name: str, first: int, values: NDArray[Any]) -> None:
        """Put aside values of an array that begin at a place and fill no unit of it."""
        file = io.BytesIO()
        np.save(file, values, allow_pickle=False)
        self._put(f"fragments/{quote(name, safe='')}/{first}", file.getvalue() + _checksum(file.getvalue()))

    def kept(self) -> list[tuple[str, int]]:
        """Return array and place of all that was put aside, in order."""
        keys = (key.split("/") for key in self._keys("fragments/"))
        return sorted((unquote(name), int(first)) for name, first in keys)

    def load(self, name: str, first: int) -> NDArray[Any]:
        """Return values that were put aside, if they are as they were."""
        key = f"{_FOLDER}/fragments/{quote(name, safe='')}/{first}"
        value = sync(self._store.get(key, self._prototype))
        if value is None:
            raise DataError(f"{key} is missing from {self._store}: {self._remedy}")
        content = value.to_bytes()
        content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if checksum != _checksum(content):
            raise DataError(f"{key} in {self._store} is damaged: {self._remedy}")
        with telling(f"{key} in {self._store} is damaged: {self._remedy}"):
            values: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        return values

    def clear(self) -> None:
        """Remove everything."""
        sync(self._store.delete_dir(_FOLDER))

    def _put(self, key: str, value: bytes) -> None:
        buffer = self._prototype.buffer.from_bytes(value)
        sync(self._store.set(f"{_FOLDER}/{key}", buffer))

    def _keys(self, folder: str) -> list[str]:
        prefix = f"{_FOLDER}/{folder}"

        async def listed() -> list[str]:
            return [key.removeprefix(prefix) async for key in self._store.list_prefix(prefix)]

        # A process killed while it wrote a local file leaves the file under a temporary name.
        return [key for key in sync(listed()) if not key.endswith(".partial")]


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")
