"""Text files, plain or compressed, read as slices of whole lines in bounded memory, from any byte range."""

from __future__ import annotations

import bz2
import gzip
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from dswml.errors import DataError, StoreNotFoundError, UsageError
from dswml.rows import Lines, OnRead, RowBatch, Scratch
from dswml.storage import absolute_url, filesystem

__all__ = ["MAX_LINE_BYTES", "SLICE_BYTES", "TextFile", "TextRows", "identity"]

MIB = 2**20

#: Text that is parsed at once: small enough for a core's cache, large enough to hide the overhead.
SLICE_BYTES = MIB
#: A longer line is refused: memory stays bounded even where a file never ends its line.
MAX_LINE_BYTES = 16 * MIB

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}


def identity(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a file is, its size and when it changed: what tells that it is still the same."""
    fs, path = filesystem(url, storage_options)
    try:
        size = int(fs.size(path))
    except FileNotFoundError:
        raise StoreNotFoundError(f"there is no file {url}") from None
    except OSError as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    try:
        modified = fs.modified(path).isoformat()
    except NotImplementedError:
        modified = None
    return {"path": url, "size": size, "modified": modified}


@dataclass(frozen=True)
class TextFile:
    """A file of lines at a local path or fsspec URL; it may be sent to any worker.

    Parameters
    ----------
    url : str
        Where it is.
    size : int
        Bytes of it.
    compression : {None, "gzip", "bzip2", "zstd"}
        How its bytes are packed.
    storage_options : mapping
        Passed to fsspec.
    """

    url: str
    size: int
    compression: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> TextFile:
        """Find the file and how it is compressed, from its first bytes."""
        place = absolute_url(url)
        options = dict(storage_options or {})
        size = identity(place, options)["size"]
        first = cls(place, size, None, options).read(0, 8)
        found = [name for magic, name in _MAGIC.items() if first.startswith(magic)]
        return cls(place, size, found[0] if found else None, options)

    def read(self, start: int, stop: int) -> bytes:
        """Return the stored bytes [start, stop), fewer at the end of the file."""
        fs, path = filesystem(self.url, self.storage_options)
        if start >= self.size:
            return b""
        try:
            return cast(bytes, fs.cat_file(path, start=start, end=min(stop, self.size)))
        except OSError as error:
            raise DataError(f"{self.url} cannot be read on this machine: {error}") from error

    @contextmanager
    def stream(self, on_read: OnRead | None = None) -> Iterator[Callable[[int], bytes]]:
        """Yield a function that returns up to so many of the next bytes of text."""
        damage: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, *_zstd_errors())
        fs, path = filesystem(self.url, self.storage_options)
        with fs.open(path, "rb") as stored, _decompressor(stored, self.compression) as text:

            def read(n_bytes: int) -> bytes:
                if on_read is not None:
                    on_read(min(stored.tell(), self.size), self.size)
                try:
                    return cast(bytes, text.read(n_bytes))
                except damage as error:
                    raise DataError(
                        f"{self.url} cannot be unpacked ({error}): it is cut off or damaged; fetch it again"
                    ) from error

            yield read

    def head(self, n_bytes: int) -> bytes:
        """Return the first bytes of the text."""
        with self.stream() as read:
            parts, missing = [], n_bytes
            while missing and (part := read(missing)):
                parts.append(part)
                missing -= len(part)
        return b"".join(parts)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines one by one, with their ends; for headers."""
        with self.stream() as read:
            for _, lines in _stream_slices(read, self.url, skip=0):
                yield from lines.splitlines(keepends=True)


@contextmanager
def _decompressor(stored: BinaryIO, compression: str | None) -> Iterator[Any]:
    if compression == "gzip":
        with gzip.GzipFile(fileobj=stored) as text:
            yield text
    elif compression == "bzip2":
        with bz2.BZ2File(stored) as packed:
            yield packed
    elif compression == "zstd":
        try:
            import zstandard
        except ImportError:
            raise UsageError(
                "reading .zst needs the package zstandard: install it with pip install 'dswml[zstd]'"
            ) from None
        yield _ZstdReader(stored, zstandard.ZstdDecompressor())
    else:
        yield stored


class _ZstdReader:
    """Unpacks zstd frames, and unlike zstandard's own reader knows when the last of them is cut off.

    A block of 4 bytes can unpack to 128 KiB: what is fed at once bounds what comes out at once.
    """

    _FEED = 1024

    def __init__(self, stored: BinaryIO, decompressor: Any) -> None:
        self._stored = stored
        self._decompressor = decompressor
        self._frame: Any = None
        self._packed = b""
        self._ready = bytearray()

    def read(self, n_bytes: int) -> bytes:
        while len(self._ready) < n_bytes:
            packed = self._packed or self._stored.read(self._FEED)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                break
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready += self._frame.decompress(packed)
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        result = bytes(self._ready[:n_bytes])
        del self._ready[:n_bytes]
        return result


def _zstd_errors() -> tuple[type[Exception], ...]:
    try:
        import zstandard
    except ImportError:
        return ()
    return (zstandard.ZstdError,)


def _refuse_line(url: str, position: int) -> DataError:
    return DataError(
        f"the line that begins at byte {position} of {url} is longer than {MAX_LINE_BYTES // MIB} MiB: "
        "is this a text file with a row on each line?"
    )


def _stream_slices(read: Callable[[int], bytes], url: str, skip: int) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines and where they begin, from a stream, leaving out the first bytes."""
    position, pending = 0, b""
    while block := read(SLICE_BYTES):
        pending += block
        cut = pending.rfind(b"\n") + 1
        if position < skip:
            cut = min(len(pending), skip - position)
        elif cut:
            yield position, pending[:cut]
        elif len(pending) > MAX_LINE_BYTES:
            raise _refuse_line(url, position)
        position, pending = position + cut, pending[cut:]
    if pending:
        yield position, pending


def _range_slices(file: TextFile, start: int, stop: int, first: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the lines that begin in [start, stop), and where; the first line of all begins at `first`."""
    stop = min(stop, file.size)
    if start > first:
        start = _next_line(file, start)
    while start < stop:
        wanted = SLICE_BYTES
        while True:
            block = file.read(start, start + wanted)
            at_end = start + len(block) >= file.size
            if start + len(block) >= stop:
                cut = block.find(b"\n", stop - 1 - start) + 1
                cut = cut or (len(block) if at_end else block.rfind(b"\n") + 1)
            else:
                cut = block.rfind(b"\n") + 1
            if cut:
                break
            if wanted > MAX_LINE_BYTES:
                raise _refuse_line(file.url, start)
            if len(block) < min(wanted, file.size - start):
                raise DataError(f"{file.url} became shorter while it was read")
            wanted *= 2
        yield start, memoryview(block)[:cut]
        start += cut


def _next_line(file: TextFile, position: int) -> int:
    """Return where the first line that begins at or after the position begins."""
    at = position - 1
    while at < file.size:
        block = file.read(at, at + SLICE_BYTES)
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
        if at - position > MAX_LINE_BYTES:
            raise _refuse_line(file.url, position)
    return file.size


@dataclass(frozen=True)
class TextRows:
    """The rows of a text file; positions are bytes of the text.

    Parameters
    ----------
    file : TextFile
        The file.
    parse : callable
        Makes rows of whole lines, in the memory it is given.
    first_byte, first_line : int
        Where the rows begin: after how many bytes, and (from 1) on which line.
    """

    file: TextFile
    parse: Callable[[Lines, Scratch | None], RowBatch]
    first_byte: int = 0
    first_line: int = 1

    @property
    def url(self) -> str:
        """The file."""
        return self.file.url

    @property
    def sequential(self) -> bool:
        """Whether the rows can only be read from the first to the last."""
        return self.file.compression is not None

    def spans(self, segment_bytes: int) -> tuple[tuple[int, int], ...]:
        """Cut the rows into ranges of positions that can be read on their own."""
        if self.sequential:
            return ((0, self.file.size),)
        starts = range(self.first_byte, max(self.file.size, self.first_byte + 1), segment_bytes)
        return tuple((start, min(start + segment_bytes, self.file.size)) for start in starts)

    def positions(self, segment_bytes: int) -> int:
        """Return how many positions make up so many bytes of text."""
        return segment_bytes

    def batches(
        self, start: int, stop: int | None = None, *, on_read: OnRead | None = None
    ) -> Iterator[tuple[int, RowBatch]]:
        """Yield the rows whose lines begin in [start, stop), and where each batch begins.

        A batch is good until the next is asked for. A compressed file is always read from its first row to
        its last.
        """
        if not self.sequential:
            end = self.file.size if stop is None else stop
            scratch = Scratch()
            for position, lines in _range_slices(self.file, start, end, self.first_byte):
                yield position, self.parse(lines, scratch)
            return
        threads = len(os.sched_getaffinity(0))
        with self.file.stream(on_read) as read, ThreadPoolExecutor(threads, "dswml-parse") as pool:
            under_way: deque[tuple[int, Future[RowBatch]]] = deque()
            for position, text in _stream_slices(read, self.url, self.first_byte):
                under_way.append((position, pool.submit(self.parse, text, None)))
                if len(under_way) > 2 * threads:
                    began, future = under_way.popleft()
                    yield began, future.result()
            while under_way:
                began, future = under_way.popleft()
                yield began, future.result()
