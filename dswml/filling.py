"""The second reading of a source: rows go through buffers into whole chunks of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dswml.errors import DataError
from dswml.pieces import Piece, UnitBuffer
from dswml.rows import scale_rows
from dswml.survey import RowSource
from dswml.writer import DatasetWriter

__all__ = ["FillPayload", "fill_piece", "fill_pieces"]

#: The source, where it goes, and what is done to the rows of X.
FillPayload: TypeAlias = tuple[RowSource, DatasetWriter, Literal["l2"] | None]


def fill_piece(piece: Piece, payload: FillPayload) -> None:
    """Write the chunks of one piece and mark it as done."""
    fill_pieces([piece], payload)


def fill_pieces(
    pieces: Sequence[Piece], payload: FillPayload, *, on_done: Callable[[int], None] | None = None
) -> None:
    """Read from where the first of consecutive pieces begins until the chunks of all are written.

    Parameters
    ----------
    pieces : sequence of Piece
        In order, and without a gap.
    payload : (RowSource, DatasetWriter, None or "l2")
        The source, where it goes, and what is done to the rows of X.
    on_done : callable, optional
        Told how many of the pieces are done, each time one is.
    """
    source, writer, normalize = payload
    rows_buffer, x_buffer, y_buffer = buffers = _buffers(pieces, writer)
    row, x, y = pieces[0].before
    n_done = 0
    for _, batch in source.batches(pieces[0].position):
        values = scale_rows(batch) if normalize == "l2" else batch.x_values
        y_starts = y + batch.y_indptr[:-1]
        if batch.x_indptr is None or batch.x_indices is None:
            rows_buffer.push(row, y_starts)
            x_buffer.push(row, values)
        else:
            rows_buffer.push(row, x + batch.x_indptr[:-1], y_starts)
            x_buffer.push(x, batch.x_indices, values)
            x += len(values)
        y_buffer.push(y, batch.y_indices)
        row += batch.n_rows
        y += batch.nnz_y
        if row >= writer.n_rows:
            ends = [writer.nnz_y] if writer.nnz_x is None else [writer.nnz_x, writer.nnz_y]
            rows_buffer.push(writer.n_rows, *(np.array([end]) for end in ends))
        while n_done < len(pieces) and all(
            buffer.written >= stop for buffer, (_, stop) in zip(buffers, pieces[n_done].ranges, strict=True)
        ):
            writer.mark_done(pieces[n_done].name)
            n_done += 1
            if on_done is not None:
                on_done(n_done)
        if n_done == len(pieces):
            return
    raise DataError(f"{source.url} changed while it was imported: import it again with --overwrite")


def _buffers(pieces: Sequence[Piece], writer: DatasetWriter) -> tuple[UnitBuffer, UnitBuffer, UnitBuffer]:
    """Make the buffers for rows, X and Y that hold the chunks of consecutive pieces."""
    starts = [start for start, _ in pieces[0].ranges]
    stops = [stop for _, stop in pieces[-1].ranges]
    row_start, column, value = ((dtype, ()) for dtype in (np.int64, np.int32, np.dtype(writer.x_dtype)))
    layout = writer.layout
    y = UnitBuffer(
        layout.y, starts[2], stops[2], [column], lambda first, indices: writer.write_csr("Y", first, indices)
    )
    if writer.nnz_x is None:
        rows = UnitBuffer(
            layout.indptr,
            starts[0],
            stops[0],
            [row_start],
            lambda first, y_starts: writer.write_indptr("Y", first, y_starts),
        )
        dense = (value[0], (writer.n_features,))
        return rows, UnitBuffer(layout.x, starts[1], stops[1], [dense], writer.write_dense), y

    def write_starts(first: int, x_starts: NDArray[np.int64], y_starts: NDArray[np.int64]) -> None:
        writer.write_indptr("X", first, x_starts)
        writer.write_indptr("Y", first, y_starts)

    rows = UnitBuffer(layout.indptr, starts[0], stops[0], [row_start, row_start], write_starts)
    x = UnitBuffer(
        layout.x,
        starts[1],
        stops[1],
        [column, value],
        lambda first, *parts: writer.write_csr("X", first, *parts),
    )
    return rows, x, y
