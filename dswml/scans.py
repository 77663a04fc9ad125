"""Compiled scans of a row block: is its CSR structure sound, are its values finite, what is its content.

They take the bits of the values, release the interpreter lock and allocate nothing of the
size of the block. The content hash adds a mixed word for every nonzero (row, column, value): it
does not depend on how rows are cut into blocks, on the order of the entries of a row, or on
whether the matrix is dense or sparse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dswml.selection import compiled

__all__ = ["DECREASING", "OUTSIDE", "REPEATED", "bits_of", "scan_entries", "scan_rows", "scan_structure"]

Array = NDArray[Any]

#: Faults of a CSR structure.
SOUND, DECREASING, OUTSIDE, REPEATED = range(4)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def bits_of(values: Array) -> tuple[Array, np.uint64, np.uint64]:
    """Return the bits of real values, the mask of what is not their sign, and that of their exponent."""
    if values.dtype == np.float32:
        return values.view(np.uint32), np.uint64(0x7FFFFFFF), np.uint64(0x7F800000)
    if values.dtype == np.float64:
        return values.view(np.uint64), np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0x7FF0000000000000)
    return values, np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def _word(position: Any, bits: Any) -> Any:
    """Mix a place and a value (the finalizer of splitmix64)."""
    word = (position + np.uint64(1)) * _GOLDEN ^ bits
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


@compiled
def scan_rows(bits: Array, first_row: int, magnitude: Any, exponent: Any) -> tuple[int, int, int, Any]:
    """Scan a dense block: place of the first value that is not finite (or -1), rows of zeros, content."""
    n_rows, n_columns = bits.shape
    empty = 0
    content = np.uint64(0)
    for i in range(n_rows):
        start = np.uint64(first_row + i) * np.uint64(n_columns)
        zeros = 0
        for j in range(n_columns):
            value = np.uint64(bits[i, j])
            if value & magnitude == 0:
                zeros += 1
                continue
            if value & exponent == exponent:
                return i, j, empty, content
            content += _word(start + np.uint64(j), value)
        if zeros == n_columns:
            empty += 1
    return -1, -1, empty, content


@compiled
def scan_entries(
    indptr: Array,
    indices: Array,
    bits: Array,
    n_columns: int,
    first_row: int,
    magnitude: Any,
    exponent: Any,
) -> tuple[int, int, Any]:
    """Scan the entries of sound CSR rows: first that is not finite (or -1), rows of zeros, content."""
    empty = 0
    content = np.uint64(0)
    for i in range(indptr.size - 1):
        start = np.uint64(first_row + i) * np.uint64(n_columns)
        zeros = 0
        for k in range(indptr[i], indptr[i + 1]):
            value = np.uint64(bits[k])
            if value & magnitude == 0:
                zeros += 1
                continue
            if value & exponent == exponent:
                return k, empty, content
            content += _word(start + np.uint64(indices[k]), value)
        if zeros == indptr[i + 1] - indptr[i]:
            empty += 1
    return -1, empty, content


@compiled
def scan_structure(indptr: Array, indices: Array, n_columns: int) -> tuple[int, int, int]:
    """Return the first fault of a CSR structure, its row, and the offending entry or column."""
    for i in range(indptr.size - 1):
        start, stop = indptr[i], indptr[i + 1]
        if stop < start or stop > indices.size:
            return DECREASING, i, 0
        previous = -1
        increasing = True
        for k in range(start, stop):
            column = indices[k]
            if column < 0 or column >= n_columns:
                return OUTSIDE, i, k
            increasing &= column > previous
            previous = column
        if not increasing:
            row = np.sort(indices[start:stop])
            for k in range(1, row.size):
                if row[k] == row[k - 1]:
                    return REPEATED, i, row[k]
    return SOUND, 0, 0
