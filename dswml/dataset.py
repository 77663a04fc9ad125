"""The public face of the data layer: open a data set, create one, write one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dswml.blocks import DEFAULT_BLOCK_BYTES
from dswml.stored import Dataset, StoredDataset
from dswml.writer import DatasetWriter

__all__ = ["Dataset", "DatasetWriter", "open_dataset"]


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
