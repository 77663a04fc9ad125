"""Which part of a source fills which chunks of a store: integer planning, and the buffers that fill them.

A first reading of the source (a survey) leaves marks: positions with the numbers of rows and entries before
them. From these the store's chunks are shared out among pieces, each chunk to the piece in whose range its
first element lies. A piece begins to read at the last mark that is early enough for all its chunks and reads
on, past the next piece's first rows if need be, until they are full. So no chunk is touched by two pieces,
and nothing is put aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dswml.layout import ArrayLayout

__all__ = ["Marks", "Piece", "UnitBuffer", "plan_pieces"]

#: One line a batch of rows: its position in the source, and the elements before it of the three streams that
#: are cut into chunks: rows, entries of X (rows, if it is dense), and entries of Y.
Marks = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Chunks that one task fills: for each stream the elements [start, stop), and where to begin reading."""

    index: int
    position: int
    #: Elements of the streams before `position`.
    before: tuple[int, int, int]
    ranges: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]

    @property
    def name(self) -> str:
        """The name under which the piece is marked as done."""
        return f"piece-{self.index}"


def plan_pieces(marks: Marks, layouts: Sequence[ArrayLayout], span: int) -> tuple[Piece, ...]:
    """Share out all chunks among pieces of about `span` positions each.

    Parameters
    ----------
    marks : ndarray of int64, shape (n, 4)
        Position, and elements of each stream before it, rising; the first line is where everything begins.
    layouts : sequence of ArrayLayout
        How the streams are cut.
    span : int
        Positions that a piece covers at least, unless it is the last.

    Returns
    -------
    tuple of Piece
        In order; every element of every stream belongs to exactly one.

    Examples
    --------
    >>> marks = np.array([[0, 0, 0, 0], [10, 3, 9, 3], [20, 6, 18, 6], [30, 9, 27, 9]])
    >>> layouts = (ArrayLayout(13, 4, 4), ArrayLayout(36, 10, 10), ArrayLayout(12, 5, 5))
    >>> for piece in plan_pieces(marks, layouts, span=20):
    ...     print(piece.position, piece.ranges)
    0 ((0, 8), (0, 20), (0, 10))
    20 ((8, 13), (20, 36), (10, 12))
    """
    units = np.array([layout.unit for layout in layouts])
    lengths = np.array([layout.length for layout in layouts])
    cuts = [0]
    for line in range(1, len(marks)):
        if marks[line, 0] - marks[cuts[-1], 0] >= span:
            cuts.append(line)
    starts = np.minimum(-(-marks[cuts, 1:] // units) * units, lengths)
    stops = np.concatenate([starts[1:], lengths[np.newaxis]])
    pieces: list[Piece] = []
    last_early = [np.searchsorted(marks[:, 1 + k], starts[:, k], side="right") - 1 for k in range(3)]
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        # A stream of which the piece holds nothing does not matter to where it begins.
        early = [last_early[k][number] for k in range(3) if start[k] < stop[k]]
        if not early:
            continue
        mark = marks[min(early)]
        pieces.append(
            Piece(
                index=len(pieces),
                position=int(mark[0]),
                before=(int(mark[1]), int(mark[2]), int(mark[3])),
                ranges=tuple((int(a), int(b)) for a, b in zip(start, stop, strict=True)),  # type: ignore[arg-type]
            )
        )
    return tuple(pieces)


class UnitBuffer:
    """Gathers the elements [start, stop) of a stream and hands them on one whole unit at a time.

    Parameters
    ----------
    layout : ArrayLayout
        How the stream is cut.
    start, stop : int
        First element, at the beginning of a unit, and end, at that of another or of the stream.
    parts : sequence of (dtype, tuple of int)
        Type of each of the arrays that run in parallel along the stream, and shape of one element of it.
    write : callable
        ``write(first, *values)`` stores a unit; the values may be overwritten afterwards.

    Examples
    --------
    >>> buffer = UnitBuffer(ArrayLayout(5, 2, 2), 2, 5, [(np.int64, ())], lambda first, a: print(first, a))
    >>> buffer.push(0, np.arange(4) * 10)
    2 [20 30]
    >>> buffer.push(4, np.array([40]))
    4 [40]
    >>> buffer.next
    5
    """

    def __init__(
        self,
        layout: ArrayLayout,
        start: int,
        stop: int,
        parts: Sequence[tuple[Any, tuple[int, ...]]],
        write: Callable[..., None],
    ) -> None:
        self._unit = layout.unit
        self._stop = stop
        self._write = write
        self._first = start
        size = min(layout.unit, stop - start)
        self._parts = [np.empty((size, *shape), dtype=dtype) for dtype, shape in parts]
        #: The element that is waited for; all before it have been taken, and written if they fill a unit.
        self.next = start

    @property
    def written(self) -> int:
        """End of the elements that have been written."""
        return self._first if self.next < self._stop else self._stop

    def push(self, first: int, *values: NDArray[Any]) -> None:
        """Take in elements from `first` on, passing over those already taken and those of other pieces."""
        end = min(first + len(values[0]), self._stop)
        while self.next < end:
            unit_end = min(self._first + self._unit, self._stop)
            until = min(end, unit_end)
            for part, value in zip(self._parts, values, strict=True):
                part[self.next - self._first : until - self._first] = value[self.next - first : until - first]
            self.next = until
            if until == unit_end:
                self._write(self._first, *(part[: until - self._first] for part in self._parts))
                self._first = until
