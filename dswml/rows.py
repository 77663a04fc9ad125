"""Rows on their way from a source into a store, and the parsers that make them from lines of text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dswml import text as kernels
from dswml.text import SVMLIGHT, XMLREPO

__all__ = [
    "MAX_FEATURES",
    "MAX_LABELS",
    "SVMLIGHT",
    "XMLREPO",
    "ArffRows",
    "BadLine",
    "LabelledRows",
    "Lines",
    "OnRead",
    "RowBatch",
    "Scratch",
    "largest_value",
    "scale_rows",
]

#: Column numbers of X stay below this, so that 32 bits hold them.
MAX_FEATURES = 2**31 - 1
#: Labels stay below this, so that counting them takes little memory whatever a file claims.
MAX_LABELS = 2**25

#: Bad lines described for each buffer; further ones are only counted.
_MAX_DESCRIBED = 8
#: Characters of an offending text that are shown.
_MAX_SHOWN = 60

_REASONS = {
    kernels.BAD_LABEL: "{token!r} is not a list of label numbers such as 3,17",
    kernels.LABEL_RANGE: "label {number} is not in 0..{last_label}",
    kernels.LABEL_TWICE: "label {number} appears twice",
    kernels.LABEL_VALUE: "{token!r} is not 0 or 1, as the label {name!r} must be",
    kernels.BAD_FEATURE: "{token!r} is not feature:value with a whole feature number",
    kernels.FEATURE_RANGE: "feature {number} is not in {first_feature}..{last_feature}",
    kernels.FEATURE_TWICE: "feature {number} appears twice",
    kernels.BAD_VALUE: "{token!r} does not give a finite {dtype} number",
    kernels.BAD_ROW: "{token!r} does not belong in a {kind} row",
    kernels.FIELD_COUNT: "the row does not have {n_fields} values, one for each attribute",
    kernels.BAD_FIELD: "{token!r} is not an attribute number and a value",
    kernels.FIELD_RANGE: "attribute {number} is not in 0..{last_field}",
    kernels.FIELD_TWICE: "attribute {number} appears twice",
    kernels.MISSING: "the value of {name!r} is missing (?)",
    kernels.NOT_CLOSED: "the row ends without }}",
    kernels.NOT_DECLARED: "{token!r} is not among the declared values of {name!r}",
}

#: ``on_read(done, total)``: how far a source that is read in order has been read.
OnRead: TypeAlias = Callable[[int, int], None]

#: Whole lines of text; the newline of the last may be missing.
Lines: TypeAlias = bytes | memoryview

_Numbers: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was left out: its number (from 0, within what was read) and what is wrong with it."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows: X in CSR parts (dense if ``x_indptr`` is None), and the columns of Y that are 1."""

    x_indptr: NDArray[np.int64] | None
    x_indices: NDArray[np.int32] | None
    x_values: NDArray[Any]
    y_indptr: NDArray[np.int64]
    y_indices: NDArray[np.int32]
    n_lines: int = 0
    n_bad: int = 0
    bad: tuple[BadLine, ...] = ()
    #: Rows at the end that come from empty lines.
    trailing_blank: int = 0

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.y_indptr) - 1

    @property
    def nnz_x(self) -> int:
        """Entries of X: all places, if it is dense."""
        return int(self.x_values.size)

    @property
    def nnz_y(self) -> int:
        """Ones of Y."""
        return len(self.y_indices)


def largest_value(dtype: str) -> float:
    """Return the bound from which values round to infinity in the type.

    Examples
    --------
    >>> float(np.float32(np.nextafter(largest_value("float32"), 0))) < float("inf")
    True
    """
    return float.fromhex("0x1.ffffffp+127") if dtype == "float32" else float("inf")


class Scratch:
    """Memory that one parse after another fills, so that it is not asked for, page by page, each time.

    Rows parsed with it are good until the next parse. Dask's workers give freed memory back at once; there
    this saves a third of the time.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def array(self, name: str, length: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return the array of that name, with whatever it holds."""
        array = self._arrays.get(name)
        if array is None or len(array) < length:
            array = self._arrays[name] = np.empty(length, dtype=dtype)
        return array[:length]


class _Buffers:
    """The arrays that a kernel fills, large enough for whatever the text holds."""

    def __init__(self, lines: Lines, bytes_per_entry: int, scratch: Scratch | None) -> None:
        self.text = np.frombuffer(lines, dtype=np.uint8)
        if self.text.size and self.text[-1] != ord("\n"):
            self.text = np.append(self.text, np.uint8(ord("\n")))  # the kernels would run past the end
        array = (scratch or Scratch()).array
        size = self.text.size
        self.x_indptr = array("x_indptr", size + 1, np.int64)
        self.x_indices = array("x_indices", size // bytes_per_entry + 1, np.int32)
        self.x_values = array("x_values", size // bytes_per_entry + 1, np.float64)
        self.y_indptr = array("y_indptr", size + 1, np.int64)
        self.y_indices = array("y_indices", size // 2 + 1, np.int32)
        self.fields = array("fields", size // 4 + 1, np.int32)
        # The shortest number that can be undecided is one like 1e-320.
        self._undecided = array("undecided", 2 * (size // 6 + 1), np.int64).reshape(-1, 2)
        self._bad = np.empty((_MAX_DESCRIBED, 4), dtype=np.int64)

    def fill(
        self, parse: Callable[..., tuple[int, ...]], delimiter: str, names: Callable[[int], str], **facts: Any
    ) -> RowBatch:
        """Call ``parse(*known numbers, undecided, bad)``, a second time if Python has to decide some."""
        known: _Numbers = np.empty(0, np.int64), np.empty(0, np.float64)
        counts = parse(*known, self._undecided, self._bad)
        if counts[5]:
            spans = self._undecided[: counts[5]].copy()
            values = [float(self.text[start:stop].tobytes()) for start, stop in spans.tolist()]
            counts = parse(spans[:, 0].copy(), np.array(values), self._undecided, self._bad)
        n_rows, nx, ny, n_lines, n_bad, _, blank = counts
        bad = []
        for line, code, at, number in self._bad[:n_bad].tolist():
            token = self._token(at, None if code == kernels.BAD_ROW else delimiter)
            reason = _REASONS[code].format(token=token, number=number, name=names(number), **facts)
            bad.append(BadLine(line, reason))
        return RowBatch(
            self.x_indptr[: n_rows + 1],
            self.x_indices[:nx],
            self.x_values[:nx],
            self.y_indptr[: n_rows + 1],
            self.y_indices[:ny],
            n_lines,
            n_bad,
            tuple(bad),
            blank,
        )

    def _token(self, at: int, delimiter: str | None) -> str:
        line = self.text[at : at + 4 * _MAX_SHOWN].tobytes().split(b"\n")[0].rstrip(b"\r")
        token = line.decode("utf-8", "replace")
        token = token if delimiter is None else re.split(delimiter, token, maxsplit=1)[0] or token
        return token if len(token) <= _MAX_SHOWN else token[:_MAX_SHOWN] + "..."


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """How to read rows ``l1,l2,... f1:v1 f2:v2 ...``; called on whole lines, it gives the rows.

    Parameters
    ----------
    dialect : int
        `XMLREPO` (every line is a row) or `SVMLIGHT` (empty lines, comments and ``qid:`` are passed over).
    n_features, n_labels : int
        Bounds of the column numbers.
    base : int
        Number of the first feature in the text, 0 or 1.
    dtype : str
        Type in which every value must be finite.

    Examples
    --------
    >>> rows = LabelledRows(XMLREPO, n_features=3, n_labels=5)(b"0,4 1:0.5 2:2\\n 0:1\\n")
    >>> rows.y_indptr.tolist(), rows.y_indices.tolist()
    ([0, 2, 2], [0, 4])
    >>> rows.x_indptr.tolist(), rows.x_indices.tolist(), rows.x_values.tolist()
    ([0, 2, 3], [1, 2, 0], [0.5, 2.0, 1.0])
    >>> LabelledRows(SVMLIGHT, n_labels=5)(b"7 1:1\\n").bad
    (BadLine(line=0, reason='label 7 is not in 0..4'),)
    """

    dialect: int
    n_features: int = MAX_FEATURES
    n_labels: int = MAX_LABELS
    base: int = 0
    dtype: str = "float64"

    def __call__(self, lines: Lines, scratch: Scratch | None = None) -> RowBatch:
        buffers = _Buffers(lines, 4, scratch)

        def parse(known_at: Any, known: Any, undecided: Any, bad: Any) -> tuple[int, ...]:
            counts: tuple[int, ...] = kernels.parse_labelled_rows(
                buffers.text, self.dialect, self.base, self.n_features, self.n_labels,
                largest_value(self.dtype), known_at, known, buffers.x_indptr, buffers.x_indices,
                buffers.x_values, buffers.y_indptr, buffers.y_indices, undecided, bad,
            )  # fmt: skip
            return counts

        return buffers.fill(
            parse,
            r"\s",
            str,
            last_label=self.n_labels - 1,
            first_feature=self.base,
            last_feature=self.n_features - 1 + self.base,
            dtype=self.dtype,
        )


@dataclass(frozen=True)
class ArffRows:
    """How to read the data section of an ARFF file; called on whole lines, it gives the rows.

    Parameters
    ----------
    sparse : bool
        Whether rows are written ``{i v,j v,...}``.
    columns : ndarray of int64
        For each attribute its column of X, in rising order, or ``-1 - label``.
    names : tuple of str
        Names of the attributes.
    words : dict
        Attribute number to the two values of an attribute that is not a number; they become 0 and 1.
    dtype : str
        Type in which every value must be finite.

    Examples
    --------
    >>> rows = ArffRows(True, np.array([0, -1, 1, -2]), ("a", "l0", "b", "l1"))(b"{0 2.5,3 1}\\n{}\\n")
    >>> rows.x_indptr.tolist(), rows.x_indices.tolist(), rows.x_values.tolist(), rows.y_indices.tolist()
    ([0, 1, 1], [0], [2.5], [1])
    """

    sparse: bool
    columns: NDArray[np.int64]
    names: tuple[str, ...]
    words: tuple[tuple[int, bytes, bytes], ...] = ()
    dtype: str = "float64"

    def __call__(self, lines: Lines, scratch: Scratch | None = None) -> RowBatch:
        buffers = _Buffers(lines, 2, scratch)
        word_at = np.full((len(self.columns), 4), -1, dtype=np.int64)
        blob = b""
        for attribute, zero, one in self.words:
            start = len(blob)
            word_at[attribute] = start, start + len(zero), start + len(zero), start + len(zero) + len(one)
            blob += zero + one
        words = np.frombuffer(blob, dtype=np.uint8)

        def parse(known_at: Any, known: Any, undecided: Any, bad: Any) -> tuple[int, ...]:
            counts: tuple[int, ...] = kernels.parse_arff_rows(
                buffers.text, self.sparse, self.columns, words, word_at, largest_value(self.dtype),
                known_at, known, buffers.x_indptr, buffers.x_indices, buffers.x_values,
                buffers.y_indptr, buffers.y_indices, buffers.fields, undecided, bad,
            )  # fmt: skip
            return counts

        batch = buffers.fill(
            parse,
            r"[\s,}]",
            lambda number: self.names[number] if 0 <= number < len(self.names) else "",
            kind="sparse" if self.sparse else "dense",
            n_fields=len(self.columns),
            last_field=len(self.columns) - 1,
            dtype=self.dtype,
        )
        if self.sparse:
            return batch
        n_features = int(np.count_nonzero(self.columns >= 0))
        values = batch.x_values.reshape(batch.n_rows, n_features)
        return replace(batch, x_indptr=None, x_indices=None, x_values=values)


def scale_rows(batch: RowBatch) -> NDArray[np.float64]:
    """Return the values of X with every row scaled to unit Euclidean norm, in float64; zero rows stay.

    Examples
    --------
    >>> scale_rows(LabelledRows(XMLREPO)(b"0 0:3 7:4\\n1\\n")).tolist()
    [0.6, 0.8]
    """
    values = np.ascontiguousarray(batch.x_values, dtype=np.float64)
    scaled = np.empty_like(values)
    if batch.x_indptr is not None:
        kernels.scale_to_unit(batch.x_indptr, values, scaled)
    else:
        n_rows, width = values.shape
        indptr = np.arange(n_rows + 1, dtype=np.int64) * width
        kernels.scale_to_unit(indptr, values.reshape(-1), scaled.reshape(-1))
    return scaled
