"""Zarr groups at local paths and fsspec URLs: opening, removing, codecs, names, honest reads."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import fsspec
import fsspec.core
import numpy as np
import zarr
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.errors import ContainsArrayError
from zarr.storage import FsspecStore, LocalStore, WrapperStore

from dswml.errors import DataError, StoreExistsError, StoreNotFoundError, UsageError, telling

__all__ = [
    "CSR_INDICES",
    "CSR_INDPTR",
    "CSR_VALUES",
    "DENSE_FLOAT",
    "LABELS",
    "absolute_url",
    "chunk_checksums",
    "filesystem",
    "missing_chunks",
    "open_group",
    "open_node",
    "options_key",
    "overlap",
    "parse_options",
    "read_array",
    "read_names",
    "remove_store",
    "store_exists",
    "write_names",
]

StorageOptions = Mapping[str, Any]
Codecs = tuple[BloscCodec | Crc32cCodec, ...]

#: Every array ends in a checksum, so that a flipped or missing byte is an error and not a number.
DENSE_FLOAT: Codecs = (Crc32cCodec(),)
CSR_VALUES: Codecs = (BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec())
CSR_INDICES: Codecs = (BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec())
CSR_INDPTR: Codecs = (BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec())
LABELS: Codecs = (BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle"), Crc32cCodec())

CHECKSUM_BYTES = 4

#: Length of a chunk that a shard does not have, in the index of the shard.
_ABSENT = 2**64 - 1

_ROOT = "zarr.json"


class _ChunkMissing(Exception):
    """A chunk that every complete store has is not there."""


def _read_file(path: Path, prototype: BufferPrototype) -> Buffer | None:
    """Read a file into memory that NumPy allocates: it asks for huge pages, which Python's bytes do not."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
            view = content.data
            while view and (count := file.readinto(view)):
                view = view[count:]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return prototype.buffer.from_array_like(content[: content.size - len(view)])


class _WholeStore(WrapperStore[Store]):
    """A store in which every chunk must exist: Zarr alone reads a lost chunk as its fill value."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if byte_range is None and isinstance(self._store, LocalStore):
            value = await asyncio.to_thread(_read_file, self._store.root / key, prototype)
        else:
            value = await self._store.get(key, prototype, byte_range)
        if value is None and "/c/" in key:
            raise _ChunkMissing(key)
        return value

    def __str__(self) -> str:
        return str(self._store)


def _is_url(url: str) -> bool:
    return "://" in url or "::" in url


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return the URL, or the absolute form of a local path, that any process can open.

    Examples
    --------
    >>> absolute_url("s3://bucket/data.zarr/")
    's3://bucket/data.zarr'
    >>> absolute_url("file:///data/a.zarr")
    '/data/a.zarr'
    """
    text = os.fspath(url)
    if not text:
        raise UsageError("the path of a store must not be empty")
    text = text.removeprefix("file://") if text.startswith("file:///") else text
    return text.rstrip("/") if _is_url(text) else os.path.abspath(os.path.expanduser(text))


def options_key(storage_options: StorageOptions | None) -> str:
    """Return options as a text that can be compared, kept as a key and sent anywhere."""
    try:
        return json.dumps(dict(storage_options or {}), sort_keys=True)
    except TypeError as error:
        raise UsageError(f"storage options must be texts, numbers, lists and mappings: {error}") from error


def parse_options(key: str) -> dict[str, Any]:
    """Return the options that `options_key` made a text of."""
    options: dict[str, Any] = json.loads(key)
    return options


def filesystem(url: str, storage_options: StorageOptions | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of a URL or path, and the path in it."""
    try:
        fs, path = fsspec.core.url_to_fs(absolute_url(url), **dict(storage_options or {}))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"cannot open {url}: {error} (for s3:// install the extra: pip install 'dswml[s3]')"
        ) from error
    return fs, path


def overlap(one: str, other: str, storage_options: StorageOptions | None = None) -> bool:
    """Tell whether two places are the same or one is inside the other, whatever links lead there.

    Examples
    --------
    >>> overlap("memory://a.zarr/X", "memory://a.zarr"), overlap("memory://a.zarr", "memory://a.zarr.csv")
    (True, False)
    """
    (fs, path), (other_fs, other_path) = (_place(url, storage_options) for url in (one, other))
    return fs is other_fs and (path.startswith(other_path) or other_path.startswith(path))


def _place(url: str, storage_options: StorageOptions | None) -> tuple[type, str]:
    """Return the kind of file system and the true path in it, with a slash at its end."""
    fs, path = filesystem(url.rpartition("::")[2], storage_options)
    path = os.path.realpath(path) if isinstance(fs, LocalFileSystem) else posixpath.normpath(path)
    return type(fs), path.rstrip("/") + "/"


def _zarr_store(url: str, storage_options: StorageOptions | None, *, read_only: bool) -> Store:
    if not _is_url(url):
        return LocalStore(url, read_only=read_only)
    filesystem(url, storage_options)
    return FsspecStore.from_url(url, dict(storage_options or {}), read_only=read_only)


def store_exists(url: str | os.PathLike[str], storage_options: StorageOptions | None = None) -> bool:
    """Tell whether there is anything at all at the place; an empty directory is nothing."""
    url = absolute_url(url)
    fs, path = filesystem(url, storage_options)
    with telling(f"{url} cannot be reached"):
        fs.invalidate_cache()
        return bool(fs.exists(path) and (fs.isfile(path) or fs.ls(path, detail=False)))


def remove_store(url: str | os.PathLike[str], storage_options: StorageOptions | None = None) -> None:
    """Delete the Zarr store at the place, and nothing that is not one.

    The root is marked incomplete first and deleted last, so that a removal that is
    interrupted leaves a store that is refused and can be removed again.
    """
    url = absolute_url(url)
    if not store_exists(url, storage_options):
        return
    fs, path = filesystem(url, storage_options)
    root = f"{path}/{_ROOT}"
    with telling(f"{url} cannot be reached"):
        if not fs.exists(root):
            raise StoreExistsError(
                f"{url} exists and is not a Zarr store: it is not deleted; choose another place"
            )
        fs.pipe_file(root, b'{"zarr_format": 3, "node_type": "group", "attributes": {"complete": false}}')
        for entry in fs.ls(path, detail=False):
            if not entry.endswith(f"/{_ROOT}"):
                fs.rm(entry, recursive=True)
        fs.rm_file(root)
        if fs.isdir(path):
            fs.rmdir(path)
        fs.invalidate_cache()


def open_group(
    url: str | os.PathLike[str],
    mode: Literal["r", "r+", "w"] = "r",
    storage_options: StorageOptions | None = None,
) -> zarr.Group:
    """Open the Zarr v3 group at a local path or fsspec URL.

    Parameters
    ----------
    url : str or path
        Where the group is.
    mode : {"r", "r+", "w"}
        Read, change, or create. Creating never overwrites. A group opened with "r"
        treats a missing chunk as an error; see `read_array`.
    storage_options : mapping, optional
        Passed to fsspec.

    Returns
    -------
    zarr.Group

    Raises
    ------
    StoreNotFoundError
        Nothing is there.
    StoreExistsError
        ``mode="w"`` and something is there.
    DataError
        What is there is not a Zarr v3 group, or cannot be read.
    """
    url = absolute_url(url)
    if mode == "w" and store_exists(url, storage_options):
        raise StoreExistsError(f"{url} exists: choose another place or ask to overwrite it")
    if mode == "r+" and not store_exists(url, storage_options):
        raise StoreNotFoundError(f"there is no store at {url}: check the path or URL")
    store = _zarr_store(url, storage_options, read_only=mode == "r")
    with telling(f"{url} cannot be reached"):
        try:
            if mode == "w":
                return zarr.create_group(store, zarr_format=3)
            if mode == "r":
                return zarr.open_group(_WholeStore(store), mode="r", zarr_format=3)
            return zarr.open_group(store, mode="r+", zarr_format=3)
        except ContainsArrayError as error:
            raise DataError(f"{url} is a Zarr array, not a group") from error
        except FileNotFoundError as error:
            if not store_exists(url, storage_options):
                raise StoreNotFoundError(f"there is no store at {url}: check the path or URL") from error
            raise DataError(f"{url} is not a Zarr v3 group (it has no {_ROOT})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{url} cannot be opened as a Zarr v3 group: {error}") from error


def open_node(
    url: str | os.PathLike[str], storage_options: StorageOptions | None = None
) -> zarr.Array[Any] | zarr.Group:
    """Open somebody's own Zarr array or group, of any format version, for reading."""
    url = absolute_url(url)
    if not store_exists(url, storage_options):
        raise StoreNotFoundError(f"there is no store at {url}: check the path or URL")
    with telling(f"{url} cannot be reached"):
        try:
            return zarr.open(_zarr_store(url, storage_options, read_only=True), mode="r")
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise DataError(f"{url} cannot be opened as a Zarr array or group: {error}") from error


def read_array(array: zarr.Array[Any], start: int, stop: int, *, store: str) -> NDArray[Any]:
    """Read rows [start, stop) of an array, or say which chunk of which store is lost or damaged."""
    try:
        if array.shards is None:
            return np.asarray(array[start:stop])
        # Chunk by chunk: measured to be about twice as fast as asking Zarr for whole shards.
        values: NDArray[Any] = np.empty((stop - start, *array.shape[1:]), dtype=array.dtype)
        rows = array.chunks[0]
        for chunk in range(start // rows, -(-stop // rows)):
            first, last = max(start, chunk * rows), min(stop, (chunk + 1) * rows)
            values[first - start : last - start] = array[first:last]
        return values
    except (_ChunkMissing, ValueError, RuntimeError, OSError) as error:
        raise DataError(_damage(array, start, stop, store, error)) from error
    except (MemoryError, OverflowError) as error:
        raise DataError(
            f"array {array.name.strip('/')} in {store} has shape {array.shape}, and there is no memory for "
            f"[{start}, {stop}) of it"
        ) from error


def _damage(array: zarr.Array[Any], start: int, stop: int, store: str, error: Exception) -> str:
    """Find the first chunk that cannot be read on its own and describe it."""
    rows = array.chunks[0]
    for chunk in range(start // rows, -(-stop // rows)):
        try:
            array[chunk * rows : min((chunk + 1) * rows, array.shape[0])]
        except _ChunkMissing:
            what = "is missing"
        except OSError as cause:
            what = f"cannot be read ({type(cause).__name__}: {cause})"
        except (ValueError, RuntimeError) as cause:
            what = f"is damaged ({cause})"
        else:
            continue
        return (
            f"chunk {chunk} of array {array.name.strip('/')} in {store} {what}: "
            "restore the store from a copy or make it again"
        )
    return f"array {array.name.strip('/')} in {store} cannot be read in [{start}, {stop}): {error}"


def chunk_checksums(array: zarr.Array[Any], *, store: str) -> bytes:
    """Return the stored checksums of all chunks in order, reading only those few bytes of each."""
    keys = [f"{array.path}/{key}" for key in _chunk_keys(array)]
    inner = math.prod(array.shards) // math.prod(array.chunks) if array.shards else 0
    try:
        return b"".join(sync(_gather_checksums(array.store, keys, inner)))
    except _ChunkMissing as error:
        raise DataError(f"{error} is missing from {store}: restore the store or make it again") from error
    except (ValueError, OSError) as error:
        raise DataError(f"a chunk of array {array.path} in {store} is damaged: {error}") from error


def _chunk_keys(array: zarr.Array[Any]) -> list[str]:
    grid = array.shards or array.chunks
    counts = [range(-(-length // piece)) for length, piece in zip(array.shape, grid, strict=True)]
    return [array.metadata.encode_chunk_key(index) for index in itertools.product(*counts)]


def missing_chunks(array: zarr.Array[Any]) -> list[str]:
    """Return the keys of the chunks (or shards) of an array that are not in its store."""
    expected = _chunk_keys(array)

    async def present() -> set[str]:
        prefix = f"{array.path}/"
        return {key.removeprefix(prefix) async for key in array.store.list_prefix(prefix)}

    there = sync(present())
    return [key for key in expected if key not in there]


async def _gather_checksums(store: Store, keys: Sequence[str], inner: int) -> list[bytes]:
    """Read the last bytes of each object or, of a shard, of each of its inner chunks."""
    slots = asyncio.Semaphore(64)
    prototype = default_buffer_prototype()

    async def get(key: str, request: ByteRequest) -> bytes:
        async with slots:
            value = await store.get(key, prototype, request)
        if value is None:
            raise _ChunkMissing(key)
        return value.to_bytes()

    async def checksums(key: str) -> bytes:
        if not inner:
            return await get(key, SuffixByteRequest(CHECKSUM_BYTES))
        index = await get(key, SuffixByteRequest(inner * 16 + CHECKSUM_BYTES))
        places = np.frombuffer(index[:-CHECKSUM_BYTES], dtype="<u8").reshape(-1, 2).astype(object)
        ends = [start + length for start, length in places if length != _ABSENT]
        requests = [RangeByteRequest(end - CHECKSUM_BYTES, end) for end in ends]
        return b"".join(await asyncio.gather(*(get(key, request) for request in requests)))

    return list(await asyncio.gather(*(checksums(key) for key in keys)))


def write_names(group: zarr.Group, key: str, names: Sequence[str]) -> None:
    """Store a list of names as the UTF-8 text of a JSON list in a uint8 array."""
    text = np.frombuffer(json.dumps(list(names), ensure_ascii=False).encode(), dtype=np.uint8)
    array = group.create_array(
        key, shape=text.shape, chunks=text.shape, dtype=text.dtype, compressors=LABELS, fill_value=0
    )
    array[:] = text


def read_names(group: zarr.Group, key: str) -> tuple[str, ...] | None:
    """Return the names stored by `write_names`, or None if there are none."""
    store = str(group.store).removeprefix("file://")
    with telling(f"{key} in {store} has damaged metadata"):
        array = group.get(key)
    if array is None:
        return None
    if not isinstance(array, zarr.Array) or array.dtype != np.uint8 or array.ndim != 1:
        raise DataError(f"{key} in {store} is not an array of names")
    text = read_array(array, 0, array.shape[0], store=store).tobytes()
    try:
        names = json.loads(text)
    except ValueError as error:
        raise DataError(f"{key} in {store} is not a JSON list of names: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{key} in {store} is not a JSON list of names")
    return tuple(names)
