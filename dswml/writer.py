"""Writing a data set into a Zarr store by many workers at once, resumable, marked complete last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import DTypeLike, NDArray

from dswml.csr import CsrArray, member_array
from dswml.errors import DataError, IncompleteStoreError, StoreExistsError, UsageError
from dswml.executor import Executor, InProcessExecutor
from dswml.format import (
    COUNTS,
    FORMAT,
    FORMAT_VERSION,
    check_facts,
    create_arrays,
    fill_value,
    layout_of,
    new_attributes,
)
from dswml.layout import MAX_FILES, ArrayLayout, Layout, plan_layout
from dswml.sidecar import Sidecar
from dswml.storage import (
    CSR_INDPTR,
    absolute_url,
    missing_chunks,
    open_group,
    options_key,
    parse_options,
    remove_store,
    store_exists,
    write_names,
)
from dswml.stored import Normalize, StoredDataset

__all__ = ["DatasetWriter"]

#: Mark of a store whose arrays all exist.
_PREPARED = "prepared"


@dataclass(frozen=True)
class DatasetWriter:
    """The open end of a data set under construction; it may be sent to any worker.

    Pieces of the data are written in any order and by any number of processes. Each
    array is cut into units (chunks, or shards where chunks are gathered into shards), and a
    unit is only ever written whole by one call. `write_rows` takes any rows: what
    does not fill a unit is kept aside and joined by `finish`. The other methods write whole
    units and refuse anything else.

    Make one with `DatasetWriter.create` or, after an interruption, `DatasetWriter.resume`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp, tempfile
    >>> x = np.ones((4, 3), dtype=np.float32)
    >>> y = sp.csr_array(np.array([[1, 0], [0, 1], [0, 0], [1, 1]], dtype=np.uint8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = DatasetWriter.create(
    ...         f"{folder}/d.zarr", n_rows=4, n_features=3, n_labels=2, nnz_y=4, x_dtype="float32"
    ...     )
    ...     writer.write_rows(2, x[2:], y[2:], first_y=2)
    ...     writer.write_rows(0, x[:2], y[:2], first_y=0)
    ...     data = writer.finish(k_hat=2, label_counts=[2, 2])
    ...     data.read_y(0, 4).toarray().tolist()
    [[1, 0], [0, 1], [0, 0], [1, 1]]
    """

    url: str
    n_rows: int
    n_features: int
    n_labels: int
    nnz_x: int | None
    nnz_y: int
    x_dtype: str
    layout: Layout
    store_id: str
    source: Mapping[str, Any] = field(default_factory=dict)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def create(
        cls,
        url: str | os.PathLike[str],
        *,
        n_rows: int,
        n_features: int,
        n_labels: int,
        nnz_y: int,
        nnz_x: int | None = None,
        x_dtype: DTypeLike = np.float32,
        chunk_rows: int | None = None,
        chunk_bytes: int | None = None,
        max_files: int = MAX_FILES,
        label_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        normalize: Normalize = None,
        source: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> DatasetWriter:
        """Begin a store, marked incomplete.

        Parameters
        ----------
        url : str or path
            Where to write.
        n_rows, n_features, n_labels : int
            N, D and L.
        nnz_y : int
            Ones of Y.
        nnz_x : int, optional
            Entries of a sparse X; without it X is dense.
        x_dtype : {"float32", "float64"}
            Type of X.
        chunk_rows, chunk_bytes : int, optional
            Rows, or bytes of X, in a chunk; see `dswml.layout.plan_layout`.
        max_files : int
            Files in one array beyond which chunks are gathered into shards.
        label_names, feature_names : sequence of str, optional
            Names in column order.
        normalize : None or "l2"
            What has been done to the rows.
        source : mapping, optional
            Where the data come from; JSON values.
        overwrite : bool
            Remove what is there first, if it is a Zarr store.
        storage_options : mapping, optional
            Passed to fsspec.
        """
        place = absolute_url(url)
        dtype = np.dtype(x_dtype)
        if dtype not in (np.float32, np.float64):
            raise UsageError(f"X is stored as float32 or float64, not {dtype}")
        for what, names, count in (("label", label_names, n_labels), ("feature", feature_names, n_features)):
            if names is not None and len(names) != count:
                raise DataError(f"{len(names)} {what} names are given for {count} {what}s")
        layout = plan_layout(
            n_rows,
            n_features,
            nnz_x,
            nnz_y,
            dtype.itemsize,
            chunk_rows=chunk_rows,
            chunk_bytes=chunk_bytes,
            max_files=max_files,
        )
        if store_exists(place, storage_options):
            if not overwrite:
                raise StoreExistsError(
                    f"{place} exists: choose another place, or overwrite it with --overwrite (overwrite=True)"
                )
            remove_store(place, storage_options)
        group = open_group(place, "w", storage_options)
        group.attrs.put(
            new_attributes(n_rows, n_features, n_labels, nnz_x, nnz_y, normalize=normalize, source=source)
        )
        create_arrays(group, layout, dtype, n_rows, n_features, n_labels, sparse=nnz_x is not None)
        if label_names is not None:
            write_names(group, "label_names", label_names)
        if feature_names is not None:
            write_names(group, "feature_names", feature_names)
        Sidecar(group).mark(_PREPARED)
        return cls.resume(place, storage_options=storage_options)

    @classmethod
    def resume(
        cls, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> DatasetWriter:
        """Take up a store whose writing was interrupted; `done` tells which pieces it has."""
        place = absolute_url(url)
        group = open_group(place, "r+", storage_options)
        attrs: dict[str, Any] = dict(group.attrs)
        if attrs.get("format") != FORMAT or attrs.get("format_version") != FORMAT_VERSION:
            raise IncompleteStoreError(
                f"{place} cannot be resumed: half removed, or not a data set of this version; overwrite it"
            )
        if attrs.get("complete") is not False:
            raise StoreExistsError(f"{place} is complete: there is nothing to resume")
        if _PREPARED not in Sidecar(group).marks():
            raise IncompleteStoreError(
                f"{place} was interrupted before its arrays existed and cannot be resumed: overwrite it"
            )
        check_facts(attrs, place)
        counts = {name: attrs[name] for name in COUNTS}
        sparse = attrs["sparse"]
        x = member_array(group, "X/data" if sparse else "X", place)
        rows = member_array(group, "X/indptr", place) if sparse else x
        layout = Layout(
            rows=layout_of(rows),
            indptr=layout_of(member_array(group, "Y/indptr", place)),
            x=layout_of(x),
            y=layout_of(member_array(group, "Y/indices", place)),
        )
        return cls(
            url=place,
            **counts,
            nnz_x=x.shape[0] if sparse else None,
            x_dtype=str(x.dtype),
            layout=layout,
            store_id=attrs["store_id"],
            source=attrs.get("source") or {},
            storage_options=dict(storage_options or {}),
        )

    def write_rows(
        self,
        first_row: int,
        x: NDArray[Any] | CsrArray,
        y: CsrArray,
        *,
        first_y: int,
        first_x: int = 0,
    ) -> None:
        """Write any consecutive rows.

        Parameters
        ----------
        first_row : int
            Number of the first of them.
        x : ndarray or csr_array
            Their features.
        y : csr_array
            Their labels.
        first_x, first_y : int
            Entries of X (if sparse) and of Y in all rows before.
        """
        if isinstance(x, np.ndarray):
            self._write("X", first_row, x, aligned=False)
        else:
            self._write_csr_rows("X", first_row, first_x, x, x.data)
        y = y if y.has_sorted_indices else y.sorted_indices()
        self._write_csr_rows("Y", first_row, first_y, y, None)

    def _write_csr_rows(
        self, name: str, first_row: int, first: int, rows: CsrArray, data: NDArray[Any] | None
    ) -> None:
        starts = rows.indptr.astype(np.int64) + first
        last = first_row + rows.shape[0] == self.n_rows
        values = np.ones(rows.nnz, dtype=np.uint8) if data is None else data
        self._write(f"{name}/indptr", first_row, starts if last else starts[:-1], aligned=False)
        self._write(f"{name}/indices", first, rows.indices, aligned=False)
        self._write(f"{name}/data", first, values, aligned=False)

    def write_dense(self, first_row: int, values: NDArray[Any]) -> None:
        """Write whole units of rows of a dense X."""
        self._write("X", first_row, values, aligned=True)

    def write_csr(
        self,
        name: Literal["X", "Y"],
        first_entry: int,
        indices: NDArray[Any],
        data: NDArray[Any] | None = None,
    ) -> None:
        """Write whole units of entries; without data they are ones."""
        values = np.ones(len(indices), dtype=np.uint8) if data is None else data
        if len(values) != len(indices):
            raise UsageError(f"{len(values)} values of {name} come with {len(indices)} indices")
        self._write(f"{name}/indices", first_entry, indices, aligned=True)
        self._write(f"{name}/data", first_entry, values, aligned=True)

    def write_indptr(self, name: Literal["X", "Y"], first_row: int, indptr: NDArray[Any]) -> None:
        """Write whole units of row starts; the last unit ends with the number of entries."""
        self._write(f"{name}/indptr", first_row, indptr, aligned=True)

    def mark_done(self, piece: str) -> None:
        """Record in the store that a piece of the work is done."""
        self._sidecar.mark(f"piece {piece}")

    def done(self) -> set[str]:
        """Return the pieces recorded as done."""
        marks = self._sidecar.marks()
        return {mark.removeprefix("piece ") for mark in marks if mark.startswith("piece ")}

    def finish(
        self,
        *,
        k_hat: int,
        label_counts: NDArray[Any] | Sequence[int],
        executor: Executor | None = None,
    ) -> StoredDataset:
        """Join what was kept aside, check that nothing is missing, and mark the store complete.

        Parameters
        ----------
        k_hat : int
            Largest number of labels on a row.
        label_counts : sequence of int
            Rows that carry each label.
        executor : Executor, optional
            Who joins; by default this process.
        """
        counts = np.asarray(label_counts, dtype=np.int64)
        if counts.shape != (self.n_labels,) or int(counts.sum()) != self.nnz_y:
            raise DataError(
                f"label counts of shape {counts.shape} that sum to {counts.sum()} do not fit "
                f"{self.n_labels} labels and {self.nnz_y} ones"
            )
        group = self._group
        self._join(executor)
        for name in self._arrays:
            missing = missing_chunks(self._array(name))
            if missing:
                raise IncompleteStoreError(
                    f"{self.url} cannot be completed: {len(missing)} chunks of array {name} were never "
                    f"written, the first is {missing[0]}; write them, or begin again and overwrite the store"
                )
        array = group.create_array(
            "label_counts",
            shape=counts.shape,
            chunks=counts.shape,
            dtype=counts.dtype,
            compressors=CSR_INDPTR,
            fill_value=fill_value(counts.dtype),
            overwrite=True,
        )
        array[:] = counts
        group.attrs["k_hat"] = int(k_hat)
        self._sidecar.clear()
        group.attrs["complete"] = True
        return StoredDataset(self.url, storage_options=self.storage_options)

    @property
    def _group(self) -> zarr.Group:
        return _open_for_writing(self.url, options_key(self.storage_options), self.store_id)

    def _array(self, name: str) -> zarr.Array[Any]:
        return _open_array(self.url, options_key(self.storage_options), self.store_id, name)

    @property
    def _sidecar(self) -> Sidecar:
        return Sidecar(self._group)

    @property
    def _arrays(self) -> dict[str, ArrayLayout]:
        csr = (("indptr", self.layout.indptr), ("indices", self.layout.y), ("data", self.layout.y))
        arrays = {f"Y/{part}": layout for part, layout in csr}
        if self.nnz_x is None:
            return {"X": self.layout.x, **arrays}
        x = self.layout.x
        return {"X/indptr": self.layout.indptr, "X/indices": x, "X/data": x, **arrays}

    def _write(self, name: str, first: int, values: NDArray[Any], *, aligned: bool) -> None:
        if name not in self._arrays:
            raise UsageError(
                f"{self.url} has no array {name}: its X is {'dense' if self.nnz_x is None else 'CSR'}"
            )
        layout = self._arrays[name]
        stop = first + len(values)
        if not 0 <= first <= stop <= layout.length:
            raise UsageError(f"[{first}, {stop}) of array {name} is outside its {layout.length} places")
        unit = layout.unit
        head = min(stop, -(-first // unit) * unit)
        tail = stop if stop == layout.length else max(head, stop // unit * unit)
        if aligned and (head != first or tail != stop):
            raise UsageError(
                f"[{first}, {stop}) of array {name} does not begin and end with its units of {unit}: "
                "two workers could write the same chunk"
            )
        array = self._array(name)
        if head > first:
            self._sidecar.keep(name, first, values[: head - first])
        if tail > head:
            array[head:tail] = values[head - first : tail - first]
        if stop > max(tail, head):
            self._sidecar.keep(name, max(tail, head), values[max(tail, head) - first :])

    def _join(self, executor: Executor | None) -> None:
        """Write the units whose values were put aside in several parts."""
        units: dict[tuple[str, int], list[int]] = {}
        for name, first in self._sidecar.kept():
            units.setdefault((name, first // self._arrays[name].unit), []).append(first)
        items = [(name, unit, tuple(firsts)) for (name, unit), firsts in units.items()]
        with ExitStack() as stack:
            if executor is None:
                executor = stack.enter_context(InProcessExecutor())
            executor.map(_join_unit, items, self)


def _join_unit(item: tuple[str, int, tuple[int, ...]], writer: DatasetWriter) -> None:
    """Write one unit from its parts, if they cover it.

    Parts may overlap where a resumed write was cut otherwise than the one before it, and parts
    that do not cover a unit may be left of one that was written whole since.
    """
    name, unit, firsts = item
    layout = writer._arrays[name]
    start, stop = unit * layout.unit, min((unit + 1) * layout.unit, layout.length)
    parts: list[NDArray[Any]] = []
    position = start
    for first in firsts:
        part = writer._sidecar.load(name, first)
        if first > position:
            return
        parts.append(part[position - first :])
        position = max(position, first + len(part))
    if position == stop:
        writer._array(name)[start:stop] = np.concatenate(parts)


@lru_cache(maxsize=16)
def _open_for_writing(url: str, options: str, store_id: str) -> zarr.Group:
    group = open_group(url, "r+", parse_options(options))
    if group.attrs.get("store_id") != store_id:
        raise DataError(f"the store {url} was replaced by another while it was being written")
    return group


@lru_cache(maxsize=128)
def _open_array(url: str, options: str, store_id: str, name: str) -> zarr.Array[Any]:
    array = member_array(_open_for_writing(url, options, store_id), name, url)
    layout_of(array)  # refuses one that is damaged
    return array
