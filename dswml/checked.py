"""Arrays in a Zarr group that are read back only with the bits that were written."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from .errors import DataError, telling
from .format import fill_value
from .storage import DENSE_FLOAT, Codecs, read_array

__all__ = ["array_digest", "read_checked", "write_checked"]

Array = npt.NDArray[Any]

#: Bytes of a chunk on disk.
CHUNK_BYTES = 2**25
#: Most bytes that the codecs make of one: more can only be claimed, to fill the memory.
MOST_PACKED = 256


def array_digest(values: Array) -> str:
    """Return the sha256 of the values, the same on every machine."""
    kind = "<i8" if values.dtype.kind in "iu" else "<f8"
    return hashlib.sha256(np.ascontiguousarray(values, dtype=kind).data).hexdigest()


def write_checked(
    group: zarr.Group, name: str, values: Array, dtype: np.dtype[Any], codecs: Codecs = DENSE_FLOAT
) -> str:
    """Write an array of at least one dimension, in chunks of rows, and return its digest."""
    rows = max(1, min(len(values), CHUNK_BYTES // max(values[:1].nbytes, 1)))
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=(rows, *(max(length, 1) for length in values.shape[1:])),
        dtype=dtype,
        compressors=codecs,
        fill_value=fill_value(dtype),
        config={"write_empty_chunks": True},
    )
    if values.size:
        array[:] = values
    return array_digest(values)


def read_checked(
    group: zarr.Group,
    name: str,
    dtype: np.dtype[Any],
    ndim: int,
    digest: Any,
    *,
    kind: str,
    place: str,
    remedy: str,
) -> Array:
    """Return the array, or say that it is lost, damaged or changed.

    Parameters
    ----------
    group, name, dtype, ndim
        Which array, and what it must be.
    digest : str
        What `write_checked` returned.
    kind, place, remedy : str
        What the array is a part of, such as "model", where that is, and what to do without it.
    """
    with telling(f"array {name} of the {kind} {place} has damaged metadata"):
        array = group.get(name)
    if not isinstance(array, zarr.Array) or array.ndim != ndim or array.dtype != dtype:
        shape = {1: "a vector", 2: "a matrix"}.get(ndim, f"an array of {ndim} dimensions")
        raise DataError(f"array {name} of the {kind} {place} is missing or not {shape} of {dtype}: {remedy}")
    if array.nbytes > MOST_PACKED * array.nbytes_stored():
        raise DataError(f"array {name} of the {kind} {place} claims more than there is of it: {remedy}")
    values = np.ascontiguousarray(read_array(array, 0, array.shape[0], store=place)).reshape(array.shape)
    if array_digest(values) != digest:
        raise DataError(
            f"array {name} of the {kind} {place} does not match its checksum: it was changed; {remedy}"
        )
    return values
