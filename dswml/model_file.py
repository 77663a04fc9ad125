"""The file that a model is kept in: a Zarr group that Zarr alone can read, with a digest of every array.

It holds U and M with W = U M, the history, the names, label counts and thresholds where there are
any, and attributes that say how rows must be prepared and how the fit went. It holds no code, and
loading runs none. Version 2 can say that labels are chosen by thresholds of their own or by rank; a
model without either is written as version 1, which every program reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import zarr

from .checked import read_checked, write_checked
from .errors import DataError, IncompleteStoreError, StoreExistsError, telling
from .solution import Record
from .storage import (
    CSR_INDPTR,
    DENSE_FLOAT,
    open_group,
    read_names,
    remove_store,
    store_exists,
    write_names,
)

if TYPE_CHECKING:
    from .model import Model

__all__ = ["MODEL_FORMAT", "check_place", "history_records", "history_table", "read_model", "write_model"]

Array = npt.NDArray[Any]
Url = str | os.PathLike[str]

MODEL_FORMAT = "dswml-model"
#: Versions that are read.
VERSIONS = (1, 2)
#: Arrays that a model need not have.
_OPTIONAL = ("label_counts", "label_thresholds")
_NAMES = ("label_names", "feature_names")
_TYPES = {"label_counts": np.dtype(np.int64)}
_DIMENSIONS = {"U": 2, "M": 2, "history": 2, "label_counts": 1, "label_thresholds": 1}


def write_model(
    model: Model, url: Url, *, overwrite: bool = False, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Write a model to a local path or fsspec URL, marked complete last."""
    check_place(url, overwrite=overwrite, storage_options=storage_options)
    remove_store(url, storage_options)
    plain = model.top_k is None and model.label_thresholds is None
    attributes: dict[str, Any] = {"format": MODEL_FORMAT, "format_version": 1 if plain else 2}
    group = open_group(url, "w", storage_options)
    group.attrs.put({**attributes, "complete": False})
    columns, history = history_table(model.history)
    arrays = {"U": model.u, "M": model.m, "history": history}
    for name in _OPTIONAL:
        values = getattr(model, name)
        if values is not None:
            arrays[name] = values
    digests = {}
    for name, values in arrays.items():
        dtype = _TYPES.get(name, np.dtype(np.float64))
        codecs = DENSE_FLOAT if dtype.kind == "f" else CSR_INDPTR
        digests[name] = write_checked(group, name, values, dtype, codecs)
    for name in _NAMES:
        names = getattr(model, name)
        if names is not None:
            write_names(group, name, names)
            digests[name] = _names_digest(names)
    group.attrs.put(
        {
            **attributes,
            "sha256": digests,
            "history_columns": columns,
            "p0": model.p0,
            "loss": model.loss,
            "threshold": model.threshold,
            **({} if plain else {"top_k": model.top_k}),
            "normalize": model.normalize,
            "intercept": model.intercept,
            "info": dict(model.info),
            "complete": True,
        }
    )


def check_place(url: Url, *, overwrite: bool, storage_options: Mapping[str, Any] | None = None) -> None:
    """Refuse a place where something is that a model must not replace."""
    if not store_exists(url, storage_options):
        return
    place = os.fspath(url)
    if not overwrite:
        raise StoreExistsError(f"{place} exists: choose another place, or overwrite=True (--overwrite)")
    attrs = dict(open_group(url, "r", storage_options).attrs)
    interrupted = attrs.get("complete") is False and "format" not in attrs  # by the removal of a store
    if attrs.get("format") != MODEL_FORMAT and not interrupted:
        raise StoreExistsError(f"{place} is not a model: it is not overwritten; choose another place")


def read_model(url: Url, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of a `Model`, or refuse a file that is incomplete, newer or damaged."""
    place = os.fspath(url)
    with telling(f"the model {place} is damaged: take a copy of it, or train again"):
        return _read_fields(open_group(url, "r", storage_options), place)


def _read_fields(group: zarr.Group, place: str) -> dict[str, Any]:
    attrs: dict[str, Any] = dict(group.attrs)
    _check_kind(attrs, place)
    digests = attrs.get("sha256")
    if not isinstance(digests, dict):
        raise DataError(
            f"attribute sha256 of the model {place} is missing: the file was changed; train again"
        )
    u, m, history = (_read(group, name, digests, place) for name in ("U", "M", "history"))
    if u.shape[1] != m.shape[0]:
        raise DataError(f"U of {place} has shape {u.shape} and M {m.shape}: they do not belong together")
    n_labels = m.shape[1]
    optional = {name: _read(group, name, digests, place) for name in _OPTIONAL if name in digests}
    for name, values in optional.items():
        if values.shape != (n_labels,):
            raise DataError(f"the model {place} has {n_labels} labels and {len(values)} {name}")
    if np.isnan(optional.get("label_thresholds", np.zeros(0))).any():
        raise DataError(f"the model {place} has a label threshold that is NaN: set the thresholds again")
    numbers = _checked_numbers(attrs, place)
    n_features = u.shape[0] - bool(numbers["intercept"])
    names = {
        "label_names": _read_names(group, "label_names", n_labels, digests, place),
        "feature_names": _read_names(group, "feature_names", n_features, digests, place),
    }
    if attrs.get("loss") not in ("square", "exponential") or attrs.get("normalize") not in (None, "l2"):
        raise DataError(
            f"the model {place} has loss {attrs.get('loss')!r} and normalize {attrs.get('normalize')!r}, "
            "which this program does not know: install a newer dswml"
        )
    top_k = attrs.get("top_k")
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k <= n_labels):
        raise DataError(f"attribute top_k of the model {place} is {top_k!r} where a number of labels must be")
    info = attrs.get("info")
    info = info if isinstance(info, dict) else {}
    if not isinstance(info.get("data", {}), dict):
        raise DataError(f"the model {place} tells of its data {info['data']!r}: it was changed; train again")
    return {
        "u": u,
        "m": m,
        **numbers,
        **names,
        "top_k": top_k,
        "loss": attrs["loss"],
        "normalize": attrs["normalize"],
        **optional,
        "info": info,
        "history": history_records(attrs.get("history_columns"), history, f"the model {place}"),
    }


def _names_digest(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def _check_kind(attrs: Mapping[str, Any], place: str) -> None:
    if attrs.get("format") != MODEL_FORMAT:
        raise DataError(
            f"{place} is not a dswml model (its format attribute is {attrs.get('format')!r}): name what "
            "'dswml train' or 'dswml tune' has written as --model"
        )
    if attrs.get("format_version") not in VERSIONS:
        raise DataError(
            f"{place} has model format version {attrs.get('format_version')!r}; this program reads version "
            f"{' and '.join(map(str, VERSIONS))}: install a newer dswml"
        )
    if attrs.get("complete") is not True:
        raise IncompleteStoreError(
            f"the model {place} is incomplete: its writing was interrupted; train again"
        )


def history_table(history: Sequence[Record]) -> tuple[list[str], Array]:
    """Return the columns and the numbers of a history, a row for each record."""
    columns = [column.name for column in fields(Record)]
    rows = np.array([[float(value) for value in asdict(record).values()] for record in history])
    return columns, rows.reshape(-1, len(columns))


def history_records(names: Any, history: Array, of: str) -> tuple[Record, ...]:
    """Return the records that `history_table` made a table of."""
    types = {column.name: str(column.type) for column in fields(Record)}
    if not isinstance(names, list) or set(names) != set(types) or history.shape[1] != len(names):
        raise DataError(f"the history of {of} has columns {names!r}, not {list(types)!r}")
    casts = {"int": int, "float": float, "bool": bool}
    rows = (dict(zip(names, row, strict=True)) for row in history)
    return tuple(Record(**{name: casts[types[name]](value) for name, value in row.items()}) for row in rows)


def _checked_numbers(attrs: Mapping[str, Any], place: str) -> dict[str, float]:
    numbers = {}
    for name in ("p0", "threshold", "intercept"):
        value = attrs.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(f"attribute {name} of the model {place} is {value!r} where a number must be")
        numbers[name] = float(value)
    if not 0 < numbers["p0"] < 1:
        raise DataError(f"attribute p0 of the model {place} is {numbers['p0']:g}, not between 0 and 1")
    return numbers


def _read_names(
    group: zarr.Group, name: str, count: int, digests: Mapping[str, Any], place: str
) -> tuple[str, ...] | None:
    names = read_names(group, name)
    if names is not None and len(names) != count:
        raise DataError(
            f"the model {place} has {count} {name.split('_')[0]}s and {len(names)} names for them"
        )
    if name in digests and (names is None or _names_digest(names) != digests[name]):
        raise DataError(
            f"array {name} of the model {place} does not match its checksum: it was changed; train again"
        )
    return names


def _read(group: zarr.Group, name: str, digests: Mapping[str, Any], place: str) -> Array:
    dtype = _TYPES.get(name, np.dtype(np.float64))
    digest, remedy = digests.get(name), "train again"
    return read_checked(
        group, name, dtype, _DIMENSIONS[name], digest, kind="model", place=place, remedy=remedy
    )
