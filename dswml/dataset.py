"""The public face of the data layer: open a data set, create one, write one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from dswml.blocks import DEFAULT_BLOCK_BYTES, RowBlock
from dswml.errors import IncompleteStoreError, StoreExistsError, UsageError
from dswml.executor import Executor, InProcessExecutor
from dswml.features import prepare
from dswml.layout import plan_layout
from dswml.sources import ArrayDataset, as_dataset
from dswml.storage import open_group, store_exists
from dswml.stored import Dataset, Normalize, StoredDataset
from dswml.validation import check_dataset, warn_unused_labels
from dswml.writer import DatasetWriter

__all__ = ["Dataset", "DatasetWriter", "create_dataset", "open_dataset"]


def open_dataset(
    url: str | os.PathLike[str],
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Open the data set at a local path or fsspec URL.

    Parameters
    ----------
    url : str or path
        Where it is.
    block_bytes : int
        Largest size of a row block in memory.
    storage_options : mapping, optional
        Passed to fsspec.

    Returns
    -------
    Dataset

    Raises
    ------
    StoreNotFoundError
        Nothing is there.
    IncompleteStoreError
        Its writing was interrupted.
    DataError
        It is not a data set, is damaged, or has a format version this program does not know.
    """
    return StoredDataset(url, block_bytes, storage_options)


def create_dataset(
    url: str | os.PathLike[str],
    X: Any,
    Y: Any = None,
    *,
    label_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    normalize: Normalize = None,
    overwrite: bool = False,
    chunk_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
) -> Dataset:
    """Check data and write them into a store, block by block.

    A write that was interrupted is resumed by the same call with the same data.

    Parameters
    ----------
    url : str or path
        Where to write: a local path or fsspec URL.
    X, Y
        The data, in any form that `dswml.sources.as_dataset` takes.
    label_names, feature_names : sequence of str, optional
        Names in column order; by default those that the data have.
    normalize : None or "l2"
        Scale the rows of X to unit Euclidean norm, and record it.
    overwrite : bool
        Replace the store that is there.
    chunk_bytes : int, optional
        Bytes of X in a chunk; by default 16 MiB dense, 4 MiB sparse, less for small data.
    storage_options : mapping, optional
        Passed to fsspec.
    executor : Executor, optional
        Who checks and writes; by default this process.

    Returns
    -------
    Dataset
        The data set in the store.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     data = create_dataset(f"{folder}/d.zarr", np.eye(3), np.eye(3, dtype=int))
    ...     data.n_rows, data.k_hat, data.read_x(1, 2).tolist()
    (3, 1, [[0.0, 1.0, 0.0]])
    """
    if normalize not in (None, "l2"):
        raise UsageError(f"normalize must be None or 'l2', not {normalize!r}")
    with ExitStack() as stack:
        if executor is None:
            executor = stack.enter_context(InProcessExecutor())
        return _create(
            url,
            as_dataset(X, Y),
            executor,
            normalize=normalize,
            overwrite=overwrite,
            storage_options=storage_options,
            label_names=label_names,
            feature_names=feature_names,
            chunk_bytes=chunk_bytes,
        )


def _create(
    url: str | os.PathLike[str],
    data: Dataset,
    executor: Executor,
    *,
    normalize: Normalize,
    overwrite: bool,
    storage_options: Mapping[str, Any] | None,
    label_names: Sequence[str] | None,
    feature_names: Sequence[str] | None,
    chunk_bytes: int | None,
) -> Dataset:
    resumable = not overwrite and _is_incomplete(url, storage_options)
    if isinstance(data, ArrayDataset) and not data.is_sparse:
        shape = (data.n_rows, data.n_features)
        layout = plan_layout(*shape, None, 0, data.x_dtype.itemsize, chunk_bytes=chunk_bytes)
        data = data.aligned(layout.rows.unit)
    facts = check_dataset(data, executor)
    warn_unused_labels(facts.label_counts, "Y")
    source = {"kind": "arrays", "normalize": normalize, "digest": facts.digest}
    if resumable:
        writer = DatasetWriter.resume(url, storage_options=storage_options)
        if writer.source != source:
            raise IncompleteStoreError(
                f"{writer.url} holds an interrupted write of other data: choose another place or overwrite it"
            )
    else:
        writer = DatasetWriter.create(
            url,
            n_rows=data.n_rows,
            n_features=data.n_features,
            n_labels=data.n_labels,
            nnz_x=sum(facts.nnz_x) if data.is_sparse else None,
            nnz_y=sum(facts.nnz_y),
            x_dtype=data.x_dtype,
            chunk_bytes=chunk_bytes,
            label_names=data.label_names if label_names is None else label_names,
            feature_names=data.feature_names if feature_names is None else feature_names,
            normalize=normalize or data.normalize,
            source=source,
            overwrite=overwrite,
            storage_options=storage_options,
        )
    first_x = np.concatenate([[0], np.cumsum(facts.nnz_x)])
    first_y = np.concatenate([[0], np.cumsum(facts.nnz_y)])
    done = writer.done()
    pieces = [
        _Piece(block, int(first_x[block.index]), int(first_y[block.index]))
        for block in data.blocks
        if _piece_name(block) not in done
    ]
    executor.map(_write_piece, pieces, (writer, data, normalize))
    return writer.finish(k_hat=facts.k_hat, label_counts=facts.label_counts, executor=executor)


@dataclass(frozen=True)
class _Piece:
    """A row block and the entries of X and Y that come before it."""

    block: RowBlock
    first_x: int
    first_y: int


def _write_piece(piece: _Piece, payload: tuple[DatasetWriter, Dataset, Normalize]) -> None:
    writer, data, normalize = payload
    block = piece.block
    x = prepare(data.read_x(block.start, block.stop), normalize, 0.0)
    y = data.read_y(block.start, block.stop)
    writer.write_rows(block.start, x, y, first_x=piece.first_x, first_y=piece.first_y)
    writer.mark_done(_piece_name(block))


def _piece_name(block: RowBlock) -> str:
    return f"rows {block.start} to {block.stop}"


def _is_incomplete(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> bool:
    """Tell whether an interrupted store is there; a complete one is an error."""
    if not store_exists(url, storage_options):
        return False
    if open_group(url, "r", storage_options).attrs.get("complete") is not False:
        raise StoreExistsError(
            f"{os.fspath(url)} exists: choose another place or overwrite it with overwrite=True"
        )
    return True
