"""Where predictions go: what every form of them has in common, and the sparse matrix in a Zarr store."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from .csr import member_array
from .errors import DataError, DswmlError, StoreExistsError
from .executor import Executor
from .format import fill_value
from .layout import ArrayLayout, index_dtype, plan_layout
from .pieces import UnitBuffer
from .progress import OnProgress, reporting
from .staging import Part, Staging
from .storage import (
    CSR_INDICES,
    CSR_INDPTR,
    CSR_VALUES,
    LABELS,
    filesystem,
    missing_chunks,
    open_group,
    overlap,
    remove_store,
    store_exists,
    write_names,
)

__all__ = ["PREDICTION_FORMAT", "Output", "ZarrOutput", "is_half_removed", "telling_of_full_disk"]

Array = npt.NDArray[Any]

PREDICTION_FORMAT = "dswml-prediction"
PREDICTION_VERSION = 1


@dataclass(frozen=True)
class Output(ABC):
    """Where predictions go; it may be sent to any worker.

    Attributes
    ----------
    url : str
        Place of the result.
    n_rows, n_labels : int
    label_names : tuple of str or None
    scores : bool
        Whether scores are written, or ones.
    storage_options : mapping
    """

    url: str
    n_rows: int
    n_labels: int
    label_names: tuple[str, ...] | None
    scores: bool
    storage_options: Mapping[str, Any] = field(repr=False)

    @property
    @abstractmethod
    def staging_url(self) -> str:
        """Place of the parts until all are there."""

    @property
    @abstractmethod
    def part_names(self) -> tuple[str, ...]:
        """What is put aside for every part."""

    @abstractmethod
    def encode(self, rows: Any, first_row: int) -> dict[str, Array]:
        """Return rows of labels (CSR of scores or ones, sorted by label) as they are put aside."""

    @abstractmethod
    def assemble(
        self, staging: Staging, parts: Sequence[Part], executor: Executor, on_progress: OnProgress | None
    ) -> None:
        """Put all parts together."""

    @abstractmethod
    def complete(self, staging: Staging) -> None:
        """Remove the parts and mark the result as complete."""

    def remove(self) -> None:
        """Remove the result and its parts, if they are there."""
        remove_store(self.staging_url, self.storage_options)

    def check_place(self, *read: str | None) -> None:
        """Refuse a place where the result would damage what it is made from."""
        for place in read:
            for own in (self.url, self.staging_url):
                if place is not None and overlap(own, place, self.storage_options):
                    raise StoreExistsError(
                        f"{own} is in, above or at {place}, which is read: choose another place"
                    )

    @abstractmethod
    def is_finished(self, begun: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
        """Tell whether the result is there, by the attributes of the store of the parts if need be."""

    @abstractmethod
    def count(self) -> int | None:
        """Return the number of entries of the result that is there, if it is known."""

    def begin(
        self, request: Mapping[str, Any], rule: str, *, resume: bool, overwrite: bool
    ) -> Staging | None:
        """Return where parts are put aside, new or, if that is asked for, of an interrupted prediction.

        None if that one is finished.
        """
        attrs = self._begun()
        if overwrite:
            ours = attrs.get("format") == PREDICTION_FORMAT or is_half_removed(attrs)
            if not ours and store_exists(self.staging_url, self.storage_options):
                raise StoreExistsError(
                    f"{self.staging_url} is not a prediction: it is not overwritten; choose another place"
                )
            self.remove()
            attrs = {}
        interrupted = attrs.get("format") == PREDICTION_FORMAT and attrs.get("complete") is False
        if interrupted and not resume:
            raise StoreExistsError(
                f"{self.staging_url} holds an interrupted prediction: go on with --resume (resume=True), "
                "or start over with --overwrite (overwrite=True)"
            )
        if interrupted:
            staging = Staging(self.staging_url, self.storage_options)
            staging.check_request(request)
            return staging
        if resume and self.is_finished(attrs, request):
            return None
        for url in (self.url, self.staging_url):
            if store_exists(url, self.storage_options):
                what = "exists and is no interrupted prediction" if resume else "exists"
                raise StoreExistsError(
                    f"{url} {what}: choose another place, or replace it with --overwrite (overwrite=True)"
                )
        attributes = {
            "format": PREDICTION_FORMAT,
            "format_version": PREDICTION_VERSION,
            "rule": rule,
            "request": dict(request),
        }
        return Staging.begin(self.staging_url, attributes, self.storage_options)

    def _begun(self) -> dict[str, Any]:
        """Return the attributes of the Zarr store at the place of the parts, if there is one."""
        fs, path = filesystem(self.staging_url, self.storage_options)
        if not fs.exists(f"{path}/zarr.json"):
            return {}
        return dict(open_group(self.staging_url, "r", self.storage_options).attrs)


@contextmanager
def telling_of_full_disk(url: str) -> Iterator[None]:
    """Say of a full disk where room is needed; an executor would take it for a worker's own."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DswmlError(
            f"the prediction to {url} stopped ({error.strerror}): make room there, and go on with the same "
            "command and --resume (resume=True)"
        ) from error


def is_half_removed(attrs: Mapping[str, Any]) -> bool:
    """Tell whether these are the attributes of a store whose removal was interrupted."""
    return attrs.get("complete") is False and "format" not in attrs


@dataclass(frozen=True)
class ZarrOutput(Output):
    """A sparse matrix, rows x labels, in AnnData's ``csr_matrix`` encoding, of scores or of ones."""

    @property
    def staging_url(self) -> str:
        return self.url

    @property
    def part_names(self) -> tuple[str, ...]:
        return ("indptr", "indices", "data") if self.scores else ("indptr", "indices")

    def encode(self, rows: Any, first_row: int) -> dict[str, Array]:
        parts = {
            "indptr": rows.indptr.astype(np.int64),
            "indices": rows.indices.astype(index_dtype(self.n_labels)),
            "data": rows.data,
        }
        return {name: parts[name] for name in self.part_names}

    def assemble(
        self, staging: Staging, parts: Sequence[Part], executor: Executor, on_progress: OnProgress | None
    ) -> None:
        first = np.concatenate([[0], np.cumsum([part.nnz for part in parts], dtype=np.int64)])
        nnz = int(first[-1])
        group = staging.group
        dtype = np.dtype(np.float64 if self.scores else np.uint8)
        layout = plan_layout(self.n_rows, self.n_labels, nnz, 0, dtype.itemsize)
        for name, cut, kind, codecs in (
            ("data", layout.x, dtype, CSR_VALUES if self.scores else LABELS),
            ("indices", layout.x, index_dtype(self.n_labels), CSR_INDICES),
            ("indptr", layout.indptr, np.dtype(np.int64), CSR_INDPTR),
        ):
            group.create_array(
                name,
                shape=(cut.length,),
                chunks=(cut.chunk,),
                shards=None if cut.shard is None else (cut.shard,),
                dtype=kind,
                compressors=codecs,
                fill_value=fill_value(kind),
                overwrite=True,
            )
        job = _Assembly(staging, tuple(parts), first, layout.x, layout.indptr, self.scores)
        reporting(executor, "writing", on_progress).map(_assemble_part, range(len(parts)), job)
        for name in ("data", "indices", "indptr"):
            array = group[name]
            missing = missing_chunks(array) if isinstance(array, zarr.Array) else [name]
            if missing:
                raise DataError(
                    f"chunk {missing[0]} of array {name} was not written to {self.url}: "
                    "run the same command again with --resume (resume=True)"
                )
        if self.label_names is not None and "label_names" not in group:
            write_names(group, "label_names", self.label_names)

        # From here on the parts are not needed, and an interruption that loses them loses nothing.
        group.attrs["assembled"] = nnz

    def complete(self, staging: Staging) -> None:
        staging.clear()
        group = staging.group
        attributes = {name: value for name, value in dict(group.attrs).items() if name != "assembled"}
        encoding = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
        shape = [self.n_rows, self.n_labels]
        group.attrs.put({**attributes, **encoding, "shape": shape, "complete": True})

    def is_finished(self, begun: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
        ours = begun.get("format") == PREDICTION_FORMAT and begun.get("complete") is True
        return ours and begun.get("request") == request

    def count(self) -> int:
        return member_array(open_group(self.url, "r", self.storage_options), "indices", self.url).shape[0]


@dataclass(frozen=True)
class _Assembly:
    """The parts of a matrix, the number of entries before each, and how its arrays are cut."""

    staging: Staging
    parts: tuple[Part, ...]
    first: Array
    entries: ArrayLayout
    rows: ArrayLayout
    scores: bool


def _assemble_part(index: int, job: _Assembly) -> None:
    """Write the units of the arrays that begin in one part, with the help of the parts after it."""
    group = job.staging.group
    last = index + 1 == len(job.parts)

    def units(layout: ArrayLayout, start: int, stop: int) -> tuple[int, int]:
        begin, end = (min(-(-place // layout.unit) * layout.unit, layout.length) for place in (start, stop))
        return begin, layout.length if last else end

    def write(*names: str) -> Any:
        arrays: list[Any] = [group[name] for name in names]

        def write_unit(start: int, *values: Array) -> None:
            for array, value in zip(arrays, values, strict=True):
                with telling_of_full_disk(job.staging.url):
                    array[start : start + len(value)] = value

        return write_unit

    part = job.parts[index]
    row_range = units(job.rows, part.start, part.stop)
    entry_range = units(job.entries, int(job.first[index]), int(job.first[index + 1]))
    labels: Any = group["indices"]
    values: Any = group["data"]
    rows = UnitBuffer(job.rows, *row_range, [(np.int64, ())], write("indptr"))
    entries = UnitBuffer(
        job.entries, *entry_range, [(labels.dtype, ()), (values.dtype, ())], write("indices", "data")
    )
    for place in range(index, len(job.parts)):
        if rows.next >= row_range[1] and entries.next >= entry_range[1]:
            return
        part, first = job.parts[place], int(job.first[place])
        if rows.next < row_range[1]:
            starts = job.staging.load("indptr", part) + first
            rows.push(part.start, starts if place + 1 == len(job.parts) else starts[:-1])
        if entries.next < entry_range[1]:
            indices = job.staging.load("indices", part)
            data = job.staging.load("data", part) if job.scores else np.ones(len(indices), np.uint8)
            entries.push(first, indices, data)
