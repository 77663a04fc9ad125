"""The folder that checkpoints are kept in: a Zarr group with a numbered group for each of the last two.

A checkpoint is complete when its attributes say so, which is the last thing written; until then the
one before it counts. Its attributes hold numbers and texts, a digest of every array, and a digest of
themselves. It holds no code and no credentials. Whoever goes on from a folder writes a name of its
own into it, so that a process that was thought dead cannot spoil the work of its successor.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from .checked import read_checked, write_checked
from .errors import DataError, DswmlError, IncompleteStoreError, StoreExistsError, telling
from .storage import absolute_url, filesystem, open_group, remove_store, store_exists

__all__ = ["CHECKPOINTS_FORMAT", "Checkpoint", "CheckpointFolder", "Values", "newest_checkpoint"]

Array = npt.NDArray[Any]
#: Arrays of at least one dimension, lists of matrices with as many rows, and numbers and texts.
Values = dict[str, Any]

CHECKPOINTS_FORMAT = "dswml-checkpoints"
VERSION = 1
#: Folders within the folder: of the fit that follows a search.
PARTS = ("model",)
_NUMBER = re.compile(r"checkpoint-(\d{6,})")
_REMEDY = "begin again with --overwrite (overwrite=True)"


class TakenOverError(DswmlError):
    """Another process goes on from the folder."""


class _NewerError(DataError):
    """A newer program wrote this."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: its number, what the work is of, and its state."""

    number: int
    request: dict[str, Any]
    values: Values


@dataclass
class CheckpointFolder:
    """A folder that this process writes checkpoints to.

    Attributes
    ----------
    url : str
    last : int or None
        Number of the checkpoint that counts.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    last: int | None = None
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)

    def take(self) -> None:
        """Make the folder if there is none, and say that this process writes to it from now on.

        Checkpoints that do not count are removed.
        """
        fs, path = filesystem(self.url, self.storage_options)
        new = _is_unused(self.url, self.storage_options)
        if new and store_exists(self.url, self.storage_options):
            fs.rm(path, recursive=True)
        group = open_group(self.url, "w" if new else "r+", self.storage_options)
        group.attrs.put({"format": CHECKPOINTS_FORMAT, "format_version": VERSION, "owner": self.owner})
        self._prune()
        if self.last is None:  # what work before this one left of its parts
            for part in PARTS:
                if store_exists(f"{self.url}/{part}", self.storage_options):
                    fs.rm(f"{path}/{part}", recursive=True)

    def write(self, request: Mapping[str, Any], values: Values) -> None:
        """Write a checkpoint; it counts when all of it is there, and the one before it is kept."""
        if open_group(self.url, "r", self.storage_options).attrs.get("owner") != self.owner:
            raise TakenOverError(f"another process goes on from the checkpoint in {self.url}: this one ends")
        self._prune()
        number = (self.last or 0) + 1
        try:
            self._write(number, request, values)
        except BaseException:
            with suppress(Exception):
                self._remove(number)
            raise
        self.last = number

    def _write(self, number: int, request: Mapping[str, Any], values: Values) -> None:
        group = open_group(_place(self.url, number), "w", self.storage_options)
        group.attrs.put({"complete": False})
        arrays = {}
        for name, value in values.items():
            widths = None
            if isinstance(value, list) and isinstance(next(iter(value), None), np.ndarray):
                widths, value = [each.shape[1] for each in value], np.hstack(value)
            if isinstance(value, np.ndarray):
                # BLAS may round the transpose of a matrix otherwise than the matrix.
                order = "F" if value.ndim == 2 and abs(value.strides[0]) < abs(value.strides[1]) else "C"
                kind = np.dtype(np.int64 if value.dtype.kind in "iu" else np.float64)
                digest = write_checked(group, name, value, kind)
                arrays[name] = {"type": str(kind), "ndim": value.ndim, "order": order, "sha256": digest}
                arrays[name] |= {} if widths is None else {"widths": widths}
        numbers = {name: value for name, value in values.items() if name not in arrays}
        attributes: dict[str, Any] = {
            "format": "dswml-checkpoint",
            "format_version": VERSION,
            "request": dict(request),
            "numbers": numbers,
            "arrays": arrays,
            "complete": True,
        }
        group.attrs.put({**attributes, "sha256": _digest(attributes)})

    def _prune(self) -> None:
        for number in _numbers(self.url, self.storage_options):
            if number != self.last:
                self._remove(number)

    def _remove(self, number: int) -> None:
        place = _place(self.url, number)
        if _is_begun(place, self.storage_options):
            remove_store(place, self.storage_options)
        elif store_exists(place, self.storage_options):
            fs, path = filesystem(place, self.storage_options)
            fs.rm(path, recursive=True)


def newest_checkpoint(url: str, storage_options: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """Return the newest checkpoint in a folder, or None if none was completed there.

    One that is damaged is passed over for the one before it, with a warning; where there is no other,
    it is refused, and so is one of a newer format.
    """
    url = absolute_url(url)
    if _is_unused(url, storage_options):
        return None
    damage: DataError | None = None
    for number in reversed(_numbers(url, storage_options)):
        try:
            found = _read(_place(url, number), number, storage_options)
        except _NewerError:
            raise
        except IncompleteStoreError:
            continue
        except DataError as error:
            damage = damage or error
            continue
        if damage is not None:
            warnings.warn(f"{damage}; the checkpoint before it is used instead", stacklevel=2)
        return found
    if damage is not None:
        raise damage
    return None


def _read(place: str, number: int, storage_options: Mapping[str, Any] | None) -> Checkpoint:
    begun = _is_begun(place, storage_options)
    group = open_group(place, "r", storage_options) if begun else None
    if group is None or group.attrs.get("complete") is not True:
        raise IncompleteStoreError(f"the writing of the checkpoint {place} was interrupted: {_REMEDY}")
    attrs: dict[str, Any] = dict(group.attrs)
    _check_version(attrs, place)
    digest = attrs.pop("sha256", None)
    if digest != _digest(attrs):
        raise DataError(
            f"attributes of the checkpoint {place} do not match their checksum: they were changed; {_REMEDY}"
        )
    with telling(f"the checkpoint {place} is damaged: {_REMEDY}"):
        values = dict(attrs["numbers"])
        for name, array in attrs["arrays"].items():
            values[name] = _read_array(group, name, array, place)
        return Checkpoint(number, dict(attrs["request"]), values)


def _read_array(group: zarr.Group, name: str, about: Mapping[str, Any], place: str) -> Array | list[Array]:
    array = group.get(name)
    # Nothing is compressed, so an array that claims more than there is would only fill the memory.
    if isinstance(array, zarr.Array) and array.nbytes > array.nbytes_stored():
        raise DataError(f"array {name} of the checkpoint {place} is truncated: {_REMEDY}")
    dtype = np.dtype(about["type"])
    values = read_checked(
        group, name, dtype, about["ndim"], about["sha256"], kind="checkpoint", place=place, remedy=_REMEDY
    )
    if "widths" in about:
        parts = np.split(values, np.cumsum(about["widths"])[:-1], axis=1)
        return [np.ascontiguousarray(part) for part in parts]
    return np.asfortranarray(values) if about["order"] == "F" else values


def _check_version(attrs: Mapping[str, Any], place: str) -> None:
    version = attrs.get("format_version")
    if isinstance(version, int) and version > VERSION:
        raise _NewerError(
            f"{place} has checkpoint format version {version}; this program reads version {VERSION}: "
            "install a newer dswml"
        )


def _place(url: str, number: int) -> str:
    return f"{url}/checkpoint-{number:06d}"


def _is_unused(url: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Tell whether nothing is there, or what the crash of a process that made the folder left.

    Anything else but a folder of checkpoints is refused.
    """
    if not store_exists(url, storage_options):
        return True
    fs, path = filesystem(url, storage_options)
    begun = _is_begun(url, storage_options)
    attrs: dict[str, Any] = dict(open_group(url, "r", storage_options).attrs) if begun else {}
    left = {entry.rpartition("/")[2] for entry in fs.ls(path, detail=False)}
    if not attrs and all(name == "zarr.json" or name.endswith(".partial") for name in left):
        return True
    if attrs.get("format") != CHECKPOINTS_FORMAT:
        raise StoreExistsError(f"{url} is not a folder of checkpoints: choose another place")
    _check_version(attrs, url)
    return False


def _is_begun(place: str, storage_options: Mapping[str, Any] | None) -> bool:
    fs, path = filesystem(place, storage_options)
    fs.invalidate_cache()
    return bool(fs.exists(f"{path}/zarr.json"))


def _numbers(url: str, storage_options: Mapping[str, Any] | None) -> list[int]:
    """Numbers of all checkpoints in the folder, complete or not."""
    fs, path = filesystem(url, storage_options)
    fs.invalidate_cache()
    names = (entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False))
    return sorted(int(match[1]) for name in names if (match := _NUMBER.fullmatch(name)))


def _digest(attributes: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest()
