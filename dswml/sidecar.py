"""Small objects kept in a store while it is written: values that fill no unit yet, marks of what is done."""

from __future__ import annotations

import io
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


class Sidecar:
    """What a group under construction holds beside its arrays; removed when it is complete.

    Parameters
    ----------
    group : zarr.Group
        The group, at the root of its store.
    """

    def __init__(self, group: zarr.Group) -> None:
        self._store = group.store
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
        self._put(f"fragments/{quote(name, safe='')}/{first}", file.getvalue())

    def kept(self) -> list[tuple[str, int]]:
        """Return array and place of all that was put aside, in order."""
        keys = (key.split("/") for key in self._keys("fragments/"))
        return sorted((unquote(name), int(first)) for name, first in keys)

    def load(self, name: str, first: int) -> NDArray[Any]:
        """Return values that were put aside."""
        key = f"{_FOLDER}/fragments/{quote(name, safe='')}/{first}"
        value = sync(self._store.get(key, self._prototype))
        if value is None:
            raise DataError(f"{key} is missing from {self._store}: begin the store again")
        with telling(f"{key} in {self._store} is damaged: begin the store again"):
            values: NDArray[Any] = np.load(io.BytesIO(value.to_bytes()), allow_pickle=False)
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
