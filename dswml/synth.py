"""Synthetic data sets of any size, written blockwise by an executor: the same data whoever writes them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dswml.blocks import RowBlock, plan_row_blocks
from dswml.dataset import Dataset, DatasetWriter
from dswml.errors import StoreExistsError, UsageError
from dswml.executor import Executor, InProcessExecutor
from dswml.layout import plan_layout
from dswml.storage import open_group, store_exists
from dswml.streams import GROUP_ROWS, check_seed
from dswml.synth_extreme import ExtremeRows
from dswml.synth_paper import PaperRows

__all__ = ["Kind", "synthesize"]

Kind = Literal["paper", "extreme"]
OnProgress: TypeAlias = Callable[[str, int, int], None]
Rows: TypeAlias = PaperRows | ExtremeRows

#: Memory of the rows that one task draws, give or take the arithmetic.
_PIECE_BYTES = 32 * 2**20

#: What a seed means; another number when the same seed would give other data.
_GENERATOR_VERSION = 1


def synthesize(
    dest: str | os.PathLike[str],
    *,
    rows: int,
    features: int,
    labels: int,
    sparsity: int,
    seed: int = 0,
    kind: Kind = "paper",
    features_per_row: int = 76,
    normalize: Literal["l2"] | None = None,
    dtype: str = "float32",
    chunk_rows: int | None = None,
    executor: Executor | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> Dataset:
    """Write a synthetic data set into a Zarr store.

    The data are a function of the seed, the kind and its parameters: the chunks, the executor and
    the number of its workers change nothing, and more rows only add rows at the end.

    Parameters
    ----------
    dest : str or path
        Local path or fsspec URL of the store.
    rows, features, labels : int
        N, D and L.
    sparsity : int
        "paper": the K of A.5, rows have K/2 to K labels. "extreme": the mean number of labels of a row.
    seed : int
    kind : {"paper", "extreme"}
        "paper": dense X and labels as in A.5 of the paper. "extreme": sparse X with Zipf-distributed
        features and a planted low-rank map to labels of power-law frequency.
    features_per_row : int
        Mean number of features of a row; "extreme" only.
    normalize : None or "l2"
        "l2": rows of unit Euclidean norm; "extreme" only.
    dtype : {"float32", "float64"}
        Type of X.
    chunk_rows : int, optional
        Rows in a chunk; chosen by size without it.
    executor : Executor, optional
        Who does the work; by default the threads of this process.
    overwrite : bool
        Remove the store that is there first.
    storage_options : mapping, optional
        Passed to fsspec.
    on_progress : callable, optional
        ``on_progress(phase, done, total)``.

    Returns
    -------
    Dataset

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = synthesize(f"{folder}/a5.zarr", rows=200, features=100, labels=100, sparsity=6)
    ...     data.n_rows, data.n_features, data.n_labels, data.k_hat
    (200, 100, 100, 6)
    """
    if min(rows, features, labels) < 1:
        raise UsageError(f"{rows} rows, {features} features and {labels} labels: each must be at least 1")
    if dtype not in ("float32", "float64"):
        raise UsageError(f"dtype is {dtype!r}: it must be 'float32' or 'float64'")
    law = _law(kind, features, labels, sparsity, check_seed(seed), features_per_row, normalize, dtype)
    source = {"generator": kind, "generator_version": _GENERATOR_VERSION, **asdict(law)}
    report = on_progress or (lambda phase, done, total: None)
    writer = None if overwrite else _interrupted(dest, rows, source, storage_options)
    if writer is not None:
        chunk_rows = writer.layout.rows.chunk
    elif chunk_rows is None:
        chunk_rows = _aligned_chunk_rows(law, rows)
    pieces = _pieces(law, rows, chunk_rows)
    with InProcessExecutor() if executor is None else nullcontext(executor) as runner:
        counts = _count_all(law, pieces, runner, report)
        if writer is None:
            writer = DatasetWriter.create(
                dest,
                n_rows=rows,
                n_features=features,
                n_labels=labels,
                nnz_x=sum(counts.nnz_x) if law.is_sparse else None,
                nnz_y=sum(counts.nnz_y),
                x_dtype=dtype,
                chunk_rows=chunk_rows,
                normalize=normalize,
                source=source,
                overwrite=overwrite,
                storage_options=storage_options,
            )
        _write_all(law, pieces, counts, writer, runner, report)
        return writer.finish(k_hat=counts.k_hat, label_counts=counts.labels, executor=runner)


def _law(
    kind: Kind,
    features: int,
    labels: int,
    sparsity: int,
    seed: int,
    features_per_row: int,
    normalize: Literal["l2"] | None,
    dtype: str,
) -> Rows:
    if kind == "extreme":
        return ExtremeRows(features, labels, features_per_row, sparsity, seed, normalize, dtype)
    if kind != "paper":
        raise UsageError(f"kind is {kind!r}: it must be 'paper' or 'extreme'")
    if normalize is not None:
        raise UsageError(f"normalize is {normalize!r}, but the paper does not scale X: use kind 'extreme'")
    return PaperRows(features, labels, sparsity, seed, dtype)


@dataclass(frozen=True)
class _Counts:
    """What must be known of some rows before the store can be laid out."""

    nnz_x: tuple[int, ...]
    nnz_y: tuple[int, ...]
    k_hat: int
    labels: NDArray[np.int64]


def _draw(law: Rows, piece: RowBlock) -> tuple[Any, sp.csr_array]:
    """Return X and Y of the piece's rows; it begins with a group but may end inside one."""
    groups = [law.group(group) for group in range(piece.start // GROUP_ROWS, -(-piece.stop // GROUP_ROWS))]
    xs, ys = zip(*groups, strict=True)
    x = sp.vstack(xs, format="csr") if law.is_sparse else np.concatenate(xs)
    return x[: piece.n_rows], sp.vstack(ys, format="csr")[: piece.n_rows]


def _count(piece: RowBlock, law: Rows) -> _Counts:
    x, y = _draw(law, piece)
    return _Counts(
        nnz_x=(x.nnz if law.is_sparse else x.size,),
        nnz_y=(y.nnz,),
        k_hat=int(np.diff(y.indptr).max()),
        labels=np.bincount(y.indices, minlength=law.n_labels),
    )


def _add(counts: list[_Counts]) -> _Counts:
    return _Counts(
        nnz_x=sum((part.nnz_x for part in counts), ()),
        nnz_y=sum((part.nnz_y for part in counts), ()),
        k_hat=max(part.k_hat for part in counts),
        labels=np.sum([part.labels for part in counts], axis=0),
    )


def _write_piece(item: tuple[RowBlock, int, int], payload: tuple[Rows, DatasetWriter]) -> None:
    piece, first_x, first_y = item
    law, writer = payload
    x, y = _draw(law, piece)
    writer.write_rows(piece.start, x, y, first_x=first_x, first_y=first_y)
    writer.mark_done(_name(piece))


def _name(piece: RowBlock) -> str:
    return f"rows {piece.start} to {piece.stop}"


def _count_all(law: Rows, pieces: Sequence[RowBlock], executor: Executor, report: OnProgress) -> _Counts:
    report("counting", 0, len(pieces))
    return executor.reduce(
        _count, _add, pieces, law, on_result=lambda done: report("counting", done, len(pieces))
    )


def _write_all(
    law: Rows,
    pieces: Sequence[RowBlock],
    counts: _Counts,
    writer: DatasetWriter,
    executor: Executor,
    report: OnProgress,
) -> None:
    starts_x, starts_y = (np.cumsum([0, *nnz[:-1]]).tolist() for nnz in (counts.nnz_x, counts.nnz_y))
    done = writer.done()
    items = [item for item in zip(pieces, starts_x, starts_y, strict=True) if _name(item[0]) not in done]
    report("writing", 0, len(items))
    finished = itertools.count(1)
    executor.map(
        _write_piece,
        items,
        (law, writer),
        on_result=lambda index, result: report("writing", next(finished), len(items)),
    )


def _interrupted(
    dest: str | os.PathLike[str],
    n_rows: int,
    source: Mapping[str, Any],
    storage_options: Mapping[str, Any] | None,
) -> DatasetWriter | None:
    """Return the writer of the same data set, if its writing was interrupted there; refuse anything else."""
    if not store_exists(dest, storage_options):
        return None
    attrs = open_group(dest, "r", storage_options).attrs
    if attrs.get("complete") is False and attrs.get("n_rows") == n_rows and attrs.get("source") == source:
        return DatasetWriter.resume(dest, storage_options=storage_options)
    raise StoreExistsError(
        f"{os.fspath(dest)} exists: choose another place, or overwrite it with --overwrite (overwrite=True)"
    )


def _aligned_chunk_rows(law: Rows, n_rows: int) -> int:
    """Rows of a chunk of the usual size, a multiple or a divisor of a group's: tasks write whole chunks."""
    nnz_x = n_rows * law.features_per_row if isinstance(law, ExtremeRows) else None
    chunk = plan_layout(n_rows, law.n_features, nnz_x, n_rows, np.dtype(law.dtype).itemsize).rows.chunk
    if chunk == n_rows:
        return chunk
    return chunk - chunk % GROUP_ROWS if chunk > GROUP_ROWS else 1 << (chunk.bit_length() - 1)


def _pieces(law: Rows, n_rows: int, chunk_rows: int) -> tuple[RowBlock, ...]:
    """Cut the rows into tasks that begin with a group and, where chunks are aligned to groups, a shard."""
    unit = plan_layout(n_rows, 1, None, 1, 1, chunk_rows=chunk_rows).rows.unit
    return plan_row_blocks(
        n_rows, unit if unit % GROUP_ROWS == 0 else GROUP_ROWS, law.bytes_per_row, _PIECE_BYTES
    )
