"""Which rows are worked on together: planned by bytes, aligned to chunks, the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

from dswml.errors import UsageError

__all__ = ["DEFAULT_BLOCK_BYTES", "RowBlock", "plan_row_blocks"]

MIB = 2**20

#: Largest row block unless asked otherwise: a task of some tenths of a second.
DEFAULT_BLOCK_BYTES = 64 * MIB

#: Small data are cut into up to this many blocks, of at least a MiB, to occupy several cores.
PARALLEL_BLOCKS = 16


#: More blocks than this are refused: 64 TB at the default size.
MAX_BLOCKS = 10**6


@dataclass(frozen=True)
class RowBlock:
    """Rows [start, stop), the unit of work.

    Examples
    --------
    >>> RowBlock(index=0, start=0, stop=10).n_rows
    10
    """

    index: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def plan_row_blocks(
    n_rows: int, chunk_rows: int, bytes_per_row: float, block_bytes: int = DEFAULT_BLOCK_BYTES
) -> tuple[RowBlock, ...]:
    """Cut rows into blocks of whole chunks, of equal size but the last.

    The plan is a function of these four numbers alone, never of the machine, so that
    sums over blocks have the same bits wherever they are computed.

    Parameters
    ----------
    n_rows : int
        Number of rows.
    chunk_rows : int
        Rows in a chunk (or shard): what is read at least.
    bytes_per_row : float
        Mean size of a row in memory.
    block_bytes : int
        Size that no block exceeds, unless a single chunk does.

    Returns
    -------
    tuple of RowBlock
        Blocks that cover all rows once, in order.

    Examples
    --------
    >>> [(b.start, b.stop) for b in plan_row_blocks(1000, 100, 1.0, block_bytes=350)]
    [(0, 300), (300, 600), (600, 900), (900, 1000)]
    """
    if n_rows < 0 or chunk_rows < 1 or bytes_per_row < 0 or block_bytes < 1:
        raise UsageError(
            f"cannot plan row blocks for n_rows={n_rows}, chunk_rows={chunk_rows}, "
            f"bytes_per_row={bytes_per_row}, block_bytes={block_bytes}"
        )
    total = n_rows * bytes_per_row
    wanted = max(1, min(PARALLEL_BLOCKS, int(total // MIB)))
    chunks = -(-n_rows // chunk_rows)
    fitting = chunks if total <= block_bytes else int(block_bytes // (bytes_per_row * chunk_rows))
    rows = chunk_rows * max(1, min(fitting, -(-chunks // wanted)))
    starts = range(0, n_rows, rows)
    if len(starts) > MAX_BLOCKS:
        raise UsageError(
            f"{n_rows} rows of {bytes_per_row:g} bytes make {len(starts)} row blocks, over {MAX_BLOCKS}: "
            "use larger ones (--block-bytes), if there are so many rows at all"
        )
    return tuple(RowBlock(i, start, min(start + rows, n_rows)) for i, start in enumerate(starts))
