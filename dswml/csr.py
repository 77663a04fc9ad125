"""A CSR matrix in a Zarr group, in AnnData's encoding, read by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import zarr
from numpy.typing import NDArray

from dswml.errors import DataError, telling
from dswml.layout import index_dtype
from dswml.storage import read_array

__all__ = ["CsrArray", "CsrGroup", "csr_rows", "member_array"]

CsrArray: TypeAlias = sp.csr_array[Any, tuple[int, int]]


def member_array(group: zarr.Group, path: str, url: str) -> zarr.Array[Any]:
    """Open an array of a group, which must have it."""
    with telling(f"array {path} in {url} has damaged metadata"):
        array = group.get(path)
    if array is None:
        raise DataError(f"array {path} is missing from {url}: restore the store or make it again")
    if not isinstance(array, zarr.Array):
        raise DataError(f"{path} in {url} is a group where an array must be")
    if any(length and not chunk for length, chunk in zip(array.shape, array.chunks, strict=False)):
        raise DataError(
            f"array {path} in {url} has damaged metadata (chunks of {array.chunks} for {array.shape}): "
            "restore the store from a copy or make it again"
        )
    return array


@dataclass(frozen=True)
class CsrGroup:
    """The three arrays of a CSR matrix in AnnData's encoding."""

    data: zarr.Array[Any]
    indices: zarr.Array[Any]
    indptr: zarr.Array[Any]
    n_columns: int

    @classmethod
    def open(
        cls, group: zarr.Group, path: str, n_rows: int, n_columns: int, store: str, nnz: int | None = None
    ) -> CsrGroup:
        """Open the arrays below a path of a group and check that their lengths fit."""
        prefix = f"{path}/" if path else ""
        data, indices, indptr = (
            member_array(group, f"{prefix}{part}", store) for part in ("data", "indices", "indptr")
        )
        entries = indices.shape[0] if nnz is None else nnz
        for array, length in ((data, entries), (indices, entries), (indptr, n_rows + 1)):
            if array.shape != (length,):
                raise DataError(
                    f"array {array.name.strip('/')} in {store} has shape {array.shape} "
                    f"where ({length},) must be"
                )
        return cls(data, indices, indptr, n_columns)

    @property
    def arrays(self) -> list[zarr.Array[Any]]:
        return [self.data, self.indices, self.indptr]

    def read(self, start: int, stop: int, store: str) -> CsrArray:
        indptr = read_array(self.indptr, start, stop + 1, store=store)
        first, last = int(indptr[0]), int(indptr[-1])
        if not 0 <= first <= last <= self.indices.shape[0]:
            raise DataError(
                f"array {self.indptr.name.strip('/')} in {store} sends rows [{start}, {stop}) to entries "
                f"[{first}, {last}) of {self.indices.shape[0]}: make the store again"
            )
        indices = read_array(self.indices, first, last, store=store)
        data = read_array(self.data, first, last, store=store)
        return csr_rows(data, indices, indptr - first, (stop - start, self.n_columns))


def csr_rows(
    data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any], shape: tuple[int, int]
) -> CsrArray:
    """Make a CSR array of these very arrays, with 32-bit indices where they suffice."""
    indices = indices.astype(index_dtype(shape[1]), copy=False)
    if len(data) <= np.iinfo(indices.dtype).max:
        indptr = indptr.astype(indices.dtype, copy=False)
    matrix: CsrArray = sp.csr_array(shape, dtype=data.dtype)
    matrix.data, matrix.indices, matrix.indptr = data, indices, indptr
    return matrix
