"""What a data set looks like on disk: its version, its attributes and its arrays."""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zarr

from dswml.errors import DataError, IncompleteStoreError
from dswml.layout import ArrayLayout, Layout, index_dtype
from dswml.storage import CSR_INDICES, CSR_INDPTR, CSR_VALUES, DENSE_FLOAT, LABELS

__all__ = [
    "COUNTS",
    "FORMAT",
    "FORMAT_VERSION",
    "check_attributes",
    "check_facts",
    "create_arrays",
    "fill_value",
    "layout_of",
    "new_attributes",
]

FORMAT = "dswml-dataset"
FORMAT_VERSION = 1
#: Attributes that are known before the first row is written.
COUNTS = ("n_rows", "n_features", "n_labels", "nnz_y")


def check_attributes(attrs: Mapping[str, Any], url: str) -> None:
    """Refuse a group that is not a complete data set of a version this program knows."""
    if attrs.get("complete") is False and attrs.get("format", FORMAT) == FORMAT:
        raise IncompleteStoreError(
            f"the store {url} is incomplete: its writing was interrupted; "
            "run the same command again to resume it (an import with --resume, resume=True), "
            "or with --overwrite (overwrite=True) to start over"
        )
    if attrs.get("format") != FORMAT:
        raise DataError(
            f"{url} is not a dswml data set (its format attribute is {attrs.get('format')!r}): name what "
            "'dswml import' or 'dswml synth' has written"
        )
    version = attrs.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{url} has data set format version {version!r}; this program reads version {FORMAT_VERSION}: "
            "install a newer dswml"
        )
    check_facts(attrs, url, (*COUNTS, "nnz_x", "k_hat"))
    if attrs.get("complete") is not True:
        raise IncompleteStoreError(f"the store {url} is not marked complete: make it again")


def check_facts(attrs: Mapping[str, Any], url: str, counts: Sequence[str] = COUNTS) -> None:
    """Refuse attributes that are not of the kind that every data set has, complete or not."""
    kinds: dict[str, tuple[Any, str]] = {
        **dict.fromkeys(counts, (int, "a count")),
        "sparse": (bool, "true or false"),
        "store_id": (str, "a text"),
    }
    for name, (kind, words) in kinds.items():
        value = attrs.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise DataError(
                f"attribute {name} of {url} is {value!r} where {words} must be: make the store again"
            )


def new_attributes(
    n_rows: int,
    n_features: int,
    n_labels: int,
    nnz_x: int | None,
    nnz_y: int,
    *,
    normalize: str | None,
    source: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the root attributes of a data set that is not complete yet."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "complete": False,
        "store_id": uuid.uuid4().hex,
        "sparse": nnz_x is not None,
        "n_rows": n_rows,
        "n_features": n_features,
        "n_labels": n_labels,
        "nnz_x": n_rows * n_features if nnz_x is None else nnz_x,
        "nnz_y": nnz_y,
        "normalize": normalize,
        "source": dict(source or {}),
        "created_with": {name: importlib.metadata.version(name) for name in ("dswml", "numpy", "zarr")},
    }


def fill_value(dtype: np.dtype[Any]) -> float | int:
    """Return a value that no data take, so that Zarr leaves no chunk out as empty."""
    if dtype.kind == "f":
        return float("nan")
    return 255 if dtype == np.uint8 else -1


def layout_of(array: zarr.Array[Any]) -> ArrayLayout:
    """Return how an existing array is cut."""
    length, chunk = int(array.shape[0]), int(array.chunks[0])
    unit = int(array.shards[0]) if array.shards else chunk
    if min(chunk, unit) < 1 or not 0 <= length < 2**62:
        raise DataError(
            f"array {array.path} is recorded with {length} entries in units of {unit}: its store is damaged; "
            "begin it again with --overwrite (overwrite=True)"
        )
    return ArrayLayout(length, chunk, unit)


def create_arrays(
    group: zarr.Group,
    layout: Layout,
    dtype: np.dtype[Any],
    n_rows: int,
    n_features: int,
    n_labels: int,
    *,
    sparse: bool,
) -> None:
    """Create the empty arrays X and Y; sparse ones in AnnData's ``csr_matrix`` 0.1.0 encoding."""

    def create(
        name: str, cut: ArrayLayout, dtype: np.dtype[Any], codecs: Any, columns: tuple[int, ...] = ()
    ) -> None:
        group.create_array(
            name,
            shape=(cut.length, *columns),
            chunks=(cut.chunk, *columns),
            shards=None if cut.shard is None else (cut.shard, *columns),
            dtype=dtype,
            compressors=codecs,
            fill_value=fill_value(dtype),
        )

    def create_csr(
        name: str, entries: ArrayLayout, dtype: np.dtype[Any], n_columns: int, codecs: Any
    ) -> None:
        group.create_group(
            name,
            attributes={
                "encoding-type": "csr_matrix",
                "encoding-version": "0.1.0",
                "shape": [n_rows, n_columns],
            },
        )
        create(f"{name}/data", entries, dtype, codecs)
        create(f"{name}/indices", entries, index_dtype(n_columns), CSR_INDICES)
        create(f"{name}/indptr", layout.indptr, np.dtype(np.int64), CSR_INDPTR)

    if sparse:
        create_csr("X", layout.x, dtype, n_features, CSR_VALUES)
    else:
        create("X", layout.x, dtype, DENSE_FLOAT, (n_features,))
        group["X"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    create_csr("Y", layout.y, np.dtype(np.uint8), n_labels, LABELS)
