"""The first reading of a source: every row checked and counted, nothing kept but sums and marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dswml.errors import DataError
from dswml.pieces import Marks
from dswml.rows import MAX_FEATURES, BadLine, OnRead, RowBatch
from dswml.text import count_columns

__all__ = ["BadLineMet", "RowSource", "Survey", "combine_surveys", "survey_span"]

#: Bad lines that are described in a survey; further ones are only counted.
MAX_DESCRIBED = 20


class RowSource(Protocol):
    """Where rows come from: positions, ranges of them that can be read on their own, and their rows."""

    @property
    def url(self) -> str:
        """The file."""

    @property
    def sequential(self) -> bool:
        """Whether the rows can only be read from the first to the last."""

    def spans(self, segment_bytes: int) -> tuple[tuple[int, int], ...]:
        """Cut the rows into ranges of positions that can be read on their own."""

    def positions(self, segment_bytes: int) -> int:
        """Return how many positions make up so many bytes."""

    def batches(
        self, start: int, stop: int | None = None, *, on_read: OnRead | None = None
    ) -> Iterator[tuple[int, RowBatch]]:
        """Yield the rows in [start, stop) and the position where each batch begins.

        A batch is good until the next is asked for.
        """


class BadLineMet(DataError):
    """The span of the given number holds a bad line, and bad lines are not to be skipped."""

    def __init__(self, span: int) -> None:
        super().__init__(span)
        self.span = span


@dataclass(frozen=True)
class Survey:
    """What consecutive rows hold.

    Attributes
    ----------
    marks : ndarray of int64, shape (n, 4)
        For each batch its position, and rows, entries of X and entries of Y before it.
    n_rows, nnz_x, nnz_y : int
        Rows, entries of X (rows, if it is dense) and ones of Y.
    n_lines, n_bad : int
        Lines of text, and how many of them were left out.
    bad : tuple of BadLine
        The first of those.
    k_hat : int
        Largest number of labels on a row.
    label_counts : ndarray of int64
        Rows that carry each label, up to the largest label found.
    first_feature, last_feature : int
        Smallest and largest column found in X.
    rows_without_label, rows_without_feature : int
        Rows of zeros in Y and in X.
    trailing_blank : int
        Rows at the end that come from empty lines.
    """

    marks: Marks
    n_rows: int
    nnz_x: int
    nnz_y: int
    n_lines: int
    n_bad: int
    bad: tuple[BadLine, ...]
    k_hat: int
    label_counts: NDArray[np.int64]
    first_feature: int
    last_feature: int
    rows_without_label: int
    rows_without_feature: int
    trailing_blank: int


_EMPTY = Survey(
    marks=np.empty((0, 4), dtype=np.int64),
    n_rows=0,
    nnz_x=0,
    nnz_y=0,
    n_lines=0,
    n_bad=0,
    bad=(),
    k_hat=0,
    label_counts=np.zeros(0, dtype=np.int64),
    first_feature=MAX_FEATURES,
    last_feature=-1,
    rows_without_label=0,
    rows_without_feature=0,
    trailing_blank=0,
)


def _survey_batch(position: int, batch: RowBatch, label_counts: NDArray[np.int64]) -> Survey:
    """Survey one batch; its labels are added to `label_counts`, which must be long enough."""
    labels = np.diff(batch.y_indptr)
    count_columns(batch.y_indices, label_counts)
    if batch.x_indptr is None or batch.x_indices is None:
        featured = batch.x_values.any(axis=1)
        nnz_x, first, last = batch.n_rows, 0, batch.x_values.shape[1] - 1
    else:
        starts = batch.x_indptr
        if not batch.x_values.all():
            starts = np.concatenate([[0], np.cumsum(batch.x_values != 0)])[starts]
        featured = np.diff(starts) > 0
        nnz_x = len(batch.x_indices)
        first = int(batch.x_indices.min(initial=MAX_FEATURES))
        last = int(batch.x_indices.max(initial=-1))
    return Survey(
        marks=np.array([[position, 0, 0, 0]], dtype=np.int64),
        n_rows=batch.n_rows,
        nnz_x=nnz_x,
        nnz_y=batch.nnz_y,
        n_lines=batch.n_lines,
        n_bad=batch.n_bad,
        bad=batch.bad,
        k_hat=int(labels.max(initial=0)),
        label_counts=_EMPTY.label_counts,
        first_feature=first,
        last_feature=last,
        rows_without_label=int(np.count_nonzero(labels == 0)),
        rows_without_feature=int(np.count_nonzero(~featured)),
        trailing_blank=batch.trailing_blank,
    )


def combine_surveys(parts: list[Survey]) -> Survey:
    """Join the surveys of consecutive rows."""
    label_counts = np.zeros(max(len(part.label_counts) for part in parts), dtype=np.int64)
    marks, bad = [], []
    before = np.zeros(4, dtype=np.int64)
    n_lines = trailing_blank = 0
    for part in parts:
        label_counts[: len(part.label_counts)] += part.label_counts
        marks.append(part.marks + before)
        before[1:] += (part.n_rows, part.nnz_x, part.nnz_y)
        bad += [replace(line, line=line.line + n_lines) for line in part.bad]
        n_lines += part.n_lines
        all_blank = part.trailing_blank == part.n_rows
        trailing_blank = trailing_blank + part.trailing_blank if all_blank else part.trailing_blank
    return Survey(
        marks=np.concatenate(marks),
        n_rows=int(before[1]),
        nnz_x=int(before[2]),
        nnz_y=int(before[3]),
        n_lines=n_lines,
        n_bad=sum(part.n_bad for part in parts),
        bad=tuple(bad[:MAX_DESCRIBED]),
        k_hat=max(part.k_hat for part in parts),
        label_counts=label_counts,
        first_feature=min(part.first_feature for part in parts),
        last_feature=max(part.last_feature for part in parts),
        rows_without_label=sum(part.rows_without_label for part in parts),
        rows_without_feature=sum(part.rows_without_feature for part in parts),
        trailing_blank=trailing_blank,
    )


def survey_span(
    span: tuple[int, int, int], payload: tuple[RowSource, bool], *, on_read: OnRead | None = None
) -> Survey:
    """Read a span of the source.

    Parameters
    ----------
    span : (int, int, int)
        Its number, and the positions where it starts and stops.
    payload : (RowSource, bool)
        The source, and whether bad lines are skipped; otherwise the first raises `BadLineMet`.
    on_read : callable, optional
        Told how far a sequential source has been read.
    """
    number, start, stop = span
    source, skip = payload
    parts = [_EMPTY]
    label_counts = np.zeros(0, dtype=np.int64)
    for position, batch in source.batches(start, stop, on_read=on_read):
        if batch.n_bad and not skip:
            raise BadLineMet(number)
        n_labels = int(batch.y_indices.max(initial=-1)) + 1
        if n_labels > len(label_counts):
            longer = np.zeros(max(n_labels, 2 * len(label_counts)), dtype=np.int64)
            longer[: len(label_counts)] = label_counts
            label_counts = longer
        parts.append(_survey_batch(position, batch, label_counts))
        if len(parts) >= 1024:
            parts = [combine_surveys(parts)]
    return replace(combine_surveys(parts), label_counts=np.trim_zeros(label_counts, "b"))
