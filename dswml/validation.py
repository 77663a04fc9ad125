"""What is required of data: one check of a row block, used at ingestion, on first use and on demand."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dswml.blocks import RowBlock
from dswml.csr import CsrArray
from dswml.errors import DataError
from dswml.executor import Executor, InProcessExecutor
from dswml.scans import DECREASING, OUTSIDE, REPEATED, bits_of, scan_entries, scan_rows, scan_structure
from dswml.stored import Dataset

__all__ = ["BlockFacts", "ValidationReport", "binary_rows", "check_block", "check_dataset", "validate"]


@dataclass(frozen=True)
class BlockFacts:
    """What the check of consecutive row blocks has counted.

    Attributes
    ----------
    nnz_x, nnz_y : tuple of int
        Entries of X (all places, if dense) and of Y in each block.
    k_hat : int
        Largest number of labels on a row.
    label_counts : ndarray of int64
        Rows that carry each label.
    rows_without_label, rows_without_feature : int
        Rows of zeros in Y and in X.
    content_x, content_y : int
        Hashes of the content that do not depend on the cut into blocks.
    """

    nnz_x: tuple[int, ...]
    nnz_y: tuple[int, ...]
    k_hat: int
    label_counts: NDArray[np.int64]
    rows_without_label: int
    rows_without_feature: int
    content_x: int
    content_y: int

    @property
    def digest(self) -> str:
        """Hash of all content, in hexadecimal."""
        return f"{self.content_x:016x}{self.content_y:016x}"


def _combine(parts: list[BlockFacts]) -> BlockFacts:
    return BlockFacts(
        nnz_x=tuple(n for part in parts for n in part.nnz_x),
        nnz_y=tuple(n for part in parts for n in part.nnz_y),
        k_hat=max(part.k_hat for part in parts),
        label_counts=np.sum([part.label_counts for part in parts], axis=0, dtype=np.int64),
        rows_without_label=sum(part.rows_without_label for part in parts),
        rows_without_feature=sum(part.rows_without_feature for part in parts),
        content_x=sum(part.content_x for part in parts) % 2**64,
        content_y=sum(part.content_y for part in parts) % 2**64,
    )


def binary_rows(values: Any, *, first_row: int = 0, place: str = "memory") -> CsrArray:
    """Return rows of labels, dense or sparse, as CSR with uint8 ones and sorted indices.

    Raises
    ------
    DataError
        A label is neither 0 nor 1.

    Examples
    --------
    >>> binary_rows(np.array([[True, False], [True, True]])).indices.tolist()
    [0, 0, 1]
    >>> binary_rows(np.array([[0, 1], [2, 0]]), first_row=10)
    Traceback (most recent call last):
    dswml.errors.DataError: row 11, column 0 of Y in memory is 2: every label must be 0 or 1
    """
    rows: CsrArray
    if sp.issparse(values):
        rows = sp.csr_array(values)
        _check_structure(rows, "Y", first_row, place)
    else:
        dense = np.asarray(values)
        row, column = np.nonzero(dense)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(dense)))])
        rows = sp.csr_array((dense[row, column], column.astype(np.int32), indptr), shape=dense.shape)
    wrong = np.flatnonzero((rows.data != 0) & (rows.data != 1))
    if wrong.size:
        raise DataError(f"{_entry(rows, int(wrong[0]), 'Y', first_row, place)}: every label must be 0 or 1")
    ones: CsrArray = sp.csr_array(
        (rows.data.astype(np.uint8), rows.indices, rows.indptr), shape=rows.shape, copy=False
    )
    if not ones.data.all():
        ones = ones.copy()
        ones.eliminate_zeros()
    return ones if ones.has_sorted_indices else ones.sorted_indices()


def check_block(
    x: NDArray[Any] | CsrArray, y: CsrArray, *, first_row: int = 0, place: str = "memory"
) -> BlockFacts:
    """Check rows of X and Y and count what is in them.

    Parameters
    ----------
    x : ndarray or csr_array
        Rows of features.
    y : csr_array
        The same rows of labels, holding ones only.
    first_row : int
        Number of the first row, for the message.
    place : str
        Where the rows are from, for the message.

    Returns
    -------
    BlockFacts

    Raises
    ------
    DataError
        NaN or infinity in X, a label other than 0 and 1, different numbers of rows, column
        indices repeated or out of range, row starts that decrease.

    Examples
    --------
    >>> y = sp.csr_array(np.array([[1, 0], [1, 1]], dtype=np.uint8))
    >>> check_block(np.ones((2, 3)), y).label_counts.tolist()
    [2, 1]
    >>> check_block(np.array([[1.0], [np.nan]]), y, place="a.zarr")
    Traceback (most recent call last):
    dswml.errors.DataError: row 1, column 0 of X in a.zarr is nan: every feature must be a finite number
    """
    if x.shape[0] != y.shape[0]:
        raise DataError(
            f"X has {x.shape[0]} rows and Y has {y.shape[0]} rows in {place}: they must have the same number"
        )
    nnz_x, featureless, content_x = _scan_features(x, first_row, place)
    _check_structure(y, "Y", first_row, place)
    wrong = np.flatnonzero(y.data != 1)
    if wrong.size:
        found = _entry(y, int(wrong[0]), "Y", first_row, place)
        raise DataError(f"{found}: every stored label must be 1")
    _, labelless, content_y = scan_entries(
        y.indptr, y.indices, y.data, y.shape[1], first_row, *bits_of(y.data)[1:]
    )
    return BlockFacts(
        nnz_x=(nnz_x,),
        nnz_y=(int(y.nnz),),
        k_hat=int(np.diff(y.indptr).max(initial=0)),
        label_counts=np.bincount(y.indices, minlength=y.shape[1]).astype(np.int64),
        rows_without_label=labelless,
        rows_without_feature=featureless,
        content_x=content_x,
        content_y=int(content_y),
    )


def _scan_features(x: NDArray[Any] | CsrArray, first_row: int, place: str) -> tuple[int, int, int]:
    """Return entries, rows of zeros and content of rows of X, which must be finite."""
    requirement = "every feature must be a finite number"
    if isinstance(x, np.ndarray):
        bits, *masks = bits_of(np.ascontiguousarray(x))
        row, column, featureless, content = scan_rows(bits, first_row, *masks)
        if row >= 0:
            found = f"row {first_row + row}, column {column} of X in {place} is {x[row, column]}"
            raise DataError(f"{found}: {requirement}")
        return x.size, int(featureless), int(content)
    _check_structure(x, "X", first_row, place)
    bits, *masks = bits_of(x.data)
    entry, featureless, content = scan_entries(x.indptr, x.indices, bits, x.shape[1], first_row, *masks)
    if entry >= 0:
        raise DataError(f"{_entry(x, entry, 'X', first_row, place)}: {requirement}")
    return int(x.nnz), int(featureless), int(content)


def _entry(matrix: CsrArray, entry: int, name: str, first_row: int, place: str) -> str:
    row = first_row + int(np.searchsorted(matrix.indptr, entry, side="right")) - 1
    value = matrix.data[entry]
    return f"row {row}, column {matrix.indices[entry]} of {name} in {place} is {value}"


def _check_structure(matrix: CsrArray, name: str, first_row: int, place: str) -> None:
    """Check row starts and column indices, so that no kernel reads beyond its arrays."""
    indptr, indices = matrix.indptr, matrix.indices
    n_columns = matrix.shape[1]
    if indptr[0] != 0 or indptr[-1] != len(indices) or len(indices) != len(matrix.data):
        raise DataError(
            f"the row starts (indptr) of {name} in {place} run from {indptr[0]} to {indptr[-1]} over "
            f"{len(indices)} indices and {len(matrix.data)} values at row {first_row}"
        )
    fault, row, found = scan_structure(indptr, indices, n_columns)
    if fault == DECREASING:
        raise DataError(
            f"the row starts (indptr) of {name} in {place} decrease at row {first_row + row}: "
            "they must never decrease"
        )
    if fault == OUTSIDE:
        raise DataError(
            f"row {first_row + row} of {name} in {place} has column index {indices[found]}, "
            f"outside [0, {n_columns})"
        )
    if fault == REPEATED:
        raise DataError(f"row {first_row + row} of {name} in {place} has column index {found} more than once")


def _check_task(block: RowBlock, dataset: Dataset) -> BlockFacts:
    x, y = dataset.read_x(block.start, block.stop), dataset.read_y(block.start, block.stop)
    return check_block(x, y, first_row=block.start, place=dataset.url or "memory")


def check_dataset(dataset: Dataset, executor: Executor | None = None) -> BlockFacts:
    """Check every row block, in parallel, and return what was counted in all."""
    if executor is None:
        with InProcessExecutor() as local:
            return check_dataset(dataset, local)
    return executor.reduce(_check_task, _combine, dataset.blocks, dataset)


@dataclass(frozen=True)
class ValidationReport:
    """What `validate` found in valid data.

    Attributes
    ----------
    n_rows, n_features, n_labels, nnz_x, nnz_y, k_hat : int
        As in the data set.
    rows_without_label, rows_without_feature : int
        Rows of zeros in Y and in X; allowed.
    labels_without_positive : int
        Labels that no row carries; nothing can be learnt about them.
    """

    n_rows: int
    n_features: int
    n_labels: int
    nnz_x: int
    nnz_y: int
    k_hat: int
    rows_without_label: int
    rows_without_feature: int
    labels_without_positive: int


def validate(dataset: Dataset, executor: Executor | None = None) -> ValidationReport:
    """Read all data, check them and what is recorded about them.

    Parameters
    ----------
    dataset : Dataset
        The data.
    executor : Executor, optional
        Who reads and checks; by default this process.

    Returns
    -------
    ValidationReport

    Raises
    ------
    DataError
        On the first thing that is wrong.

    Warns
    -----
    UserWarning
        Some labels have no positive row.
    """
    facts = check_dataset(dataset, executor)
    place = dataset.url or "memory"
    recorded = (
        ("nnz_x", dataset.nnz_x, sum(facts.nnz_x)),
        ("nnz_y", dataset.nnz_y, sum(facts.nnz_y)),
        ("k_hat", dataset.k_hat, facts.k_hat),
    )
    for name, written, counted in recorded:
        if written != counted:
            raise DataError(f"{place} records {name} = {written}, but its data have {counted}: make it again")
    wrong = np.flatnonzero(dataset.label_counts != facts.label_counts)
    if wrong.size:
        label = int(wrong[0])
        raise DataError(
            f"{place} records {dataset.label_counts[label]} rows with label {label}, but its data have "
            f"{facts.label_counts[label]}: make it again"
        )
    warn_unused_labels(facts.label_counts, place)
    return ValidationReport(
        n_rows=dataset.n_rows,
        n_features=dataset.n_features,
        n_labels=dataset.n_labels,
        nnz_x=dataset.nnz_x,
        nnz_y=dataset.nnz_y,
        k_hat=dataset.k_hat,
        rows_without_label=facts.rows_without_label,
        rows_without_feature=facts.rows_without_feature,
        labels_without_positive=int(np.count_nonzero(facts.label_counts == 0)),
    )


def warn_unused_labels(label_counts: NDArray[np.int64], place: str) -> None:
    """Warn, with their number, of labels that no row carries."""
    unused = np.flatnonzero(label_counts == 0)
    if unused.size:
        warnings.warn(
            f"{unused.size} of {label_counts.size} labels in {place} have no positive row "
            f"(the first is label {unused[0]}): nothing can be learnt about them",
            UserWarning,
            stacklevel=3,
        )
