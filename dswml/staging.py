"""Parts of a long result, put aside in a store until all are there, so that work resumes where it stopped.

A task stages what it has found about some rows and then marks it; the marks are the record of what
is done. What the result is of is written beside them, so that only the same work goes on with it. Whoever
goes on reads all parts first, and those that are lost or damaged since are not done.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy.typing as npt
import zarr

from .blocks import RowBlock
from .errors import DataError, StoreExistsError
from .executor import Executor
from .sidecar import Sidecar
from .storage import open_group

__all__ = ["Part", "Staging", "check_same"]

Array = npt.NDArray[Any]

_MARK = re.compile(r"\d+ \d+ \d+")


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a result, and the number of its entries in them."""

    start: int
    stop: int
    nnz: int

    @property
    def mark(self) -> str:
        """The name under which the part is marked as done."""
        return f"{self.start} {self.stop} {self.nnz}"

    @classmethod
    def of_mark(cls, mark: str) -> Part:
        """Return the part that a mark stands for."""
        return cls(*(int(number) for number in mark.split()))


@dataclass(frozen=True)
class Staging:
    """Where the parts of one result are put aside; it may be sent to any worker.

    Attributes
    ----------
    url : str
        A Zarr store, marked incomplete, whose attribute "request" says what the result is of.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> blocks = [RowBlock(0, 0, 10), RowBlock(1, 10, 20)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     staging = Staging.begin(f"{folder}/a.zarr", {"request": {"model": "a"}})
    ...     staging.keep(Part(0, 10, nnz=3), {"labels": np.array([2, 0, 1])})
    ...     staging.parts(blocks)
    ([Part(start=0, stop=10, nnz=3)], [RowBlock(index=1, start=10, stop=20)])
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def begin(
        cls, url: str, attributes: Mapping[str, Any], storage_options: Mapping[str, Any] | None = None
    ) -> Staging:
        """Make the store."""
        group = open_group(url, "w", storage_options)
        group.attrs.put({**attributes, "complete": False})
        return cls(url, dict(storage_options or {}))

    @property
    def group(self) -> zarr.Group:
        """The store, open for changes."""
        return open_group(self.url, "r+", self.storage_options)

    @cached_property
    def _sidecar(self) -> Sidecar:
        return Sidecar(self.group, "run the same command again with --resume (resume=True)")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, dict(self.storage_options))

    def check_request(self, request: Mapping[str, Any]) -> None:
        """Refuse to go on with a result of something else, and name the difference."""
        before: Any = self.group.attrs.get("request")
        check_same(self.url, before if isinstance(before, dict) else {}, request)

    def keep(self, part: Part, values: Mapping[str, Array]) -> None:
        """Put a part aside, and mark it when all of it is there."""
        for name, array in values.items():
            self._sidecar.keep(name, part.start, array)
        self._sidecar.mark(part.mark)

    def load(self, name: str, part: Part) -> Array:
        """Return what was put aside."""
        return self._sidecar.load(name, part.start)

    def sound_parts(
        self, blocks: Sequence[RowBlock], names: Sequence[str], executor: Executor
    ) -> tuple[list[Part], list[RowBlock]]:
        """Return what `parts` does, after a look at what has these names in every part."""
        done, undone = self.parts(blocks)
        if not done:
            return done, undone
        sound = executor.map(_is_sound, done, (self, tuple(names)))
        damaged = [part for part, is_sound in zip(done, sound, strict=True) if not is_sound]
        if not damaged:
            return done, undone
        warnings.warn(
            f"{len(damaged)} of {len(done)} parts in {self.url} are lost or damaged, the first of rows "
            f"{damaged[0].start} to {damaged[0].stop}: they are made again",
            stacklevel=2,
        )
        return self.parts(blocks, set(damaged))

    def parts(
        self, blocks: Sequence[RowBlock], damaged: Container[Part] = ()
    ) -> tuple[list[Part], list[RowBlock]]:
        """Return the parts of the row blocks that are done, in order, and the blocks that are not."""
        # An object store may list a folder that was emptied as if it were a mark in it.
        marks = (mark for mark in self._sidecar.marks() if _MARK.fullmatch(mark))
        marked = {part.start: part for part in map(Part.of_mark, marks) if part not in damaged}
        done: list[Part] = []
        undone: list[RowBlock] = []
        for block in blocks:
            chain, position = [], block.start
            while position < block.stop and position in marked:
                chain.append(marked[position])
                position = chain[-1].stop
            if position == block.stop:
                done.extend(chain)
            else:
                undone.append(block)
        return done, undone

    def clear(self) -> None:
        """Remove all parts."""
        self._sidecar.clear()


def _is_sound(part: Part, of: tuple[Staging, Sequence[str]]) -> bool:
    staging, names = of
    try:
        for name in names:
            staging.load(name, part)
    except DataError:
        return False
    return True


def check_same(place: str, before: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Refuse to go on at a place where something else was begun, and name the difference."""
    for name, value in request.items():
        if before.get(name) != value:
            raise StoreExistsError(
                f"{place} was begun with {name.replace('_', ' ')} {_shown(before.get(name))}, and now "
                f"it is {_shown(value)}: give the same, or begin again with --overwrite (overwrite=True)"
            )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
