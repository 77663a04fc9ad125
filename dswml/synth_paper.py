"""The paper's synthetic data (A.5), any group of rows on its own and the same bits everywhere.

Entries of X are multiples of 2^-23 and those of B are +-2, so that Z = X B^T is a sum of
integers below 2^53 and exact in double precision: no order of summation, no BLAS and no
tiling can change it. Ties are broken by the index of the label.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dswml.errors import UsageError
from dswml.streams import GROUP_ROWS, random_bits, uniform, uniform_integers

__all__ = ["PaperRows"]

_STREAM_X, _STREAM_Y, _STREAM_B = range(3)
_FRACTION_BITS = 23

#: Labels whose coefficients are expanded at once, and entries of a matrix that are worked on at once.
_TILE_LABELS = 4096
_TILE_ENTRIES = 2**22


@lru_cache(maxsize=1)
def _signs(seed: int, n_labels: int, n_features: int) -> NDArray[np.int8]:
    """B / 2, of shape (L, D): every entry is 1 or -1 with probability 1/2."""
    bits = random_bits(seed, _STREAM_B, n_labels * n_features)
    return (bits.astype(np.int8) * 2 - 1).reshape(n_labels, n_features)


@dataclass(frozen=True)
class PaperRows:
    """Rows of A.5, in groups of `GROUP_ROWS`.

    Parameters
    ----------
    n_features, n_labels : int
        D and L.
    sparsity : int
        K: rows have at least K/2 and at most K labels (K/2 is rounded down where K is odd).
    seed : int
    dtype : str
        "float32" or "float64"; the values are the same.

    Examples
    --------
    >>> x, y = PaperRows(n_features=8, n_labels=20, sparsity=4, seed=0).group(0)
    >>> lengths = y.sum(axis=1)
    >>> x.shape, bool(abs(x).max() <= 1), int(lengths.min()), int(lengths.max())
    ((1024, 8), True, 2, 4)
    """

    n_features: int
    n_labels: int
    sparsity: int
    seed: int
    dtype: str = "float32"

    is_sparse: ClassVar[bool] = False
    normalize: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 1 <= self.sparsity <= self.n_labels:
            raise UsageError(
                f"sparsity is {self.sparsity}: it must be between 1 and the number of labels, {self.n_labels}"
            )
        if self.n_features * self.n_labels >= 2**39:
            raise UsageError(
                f"{self.n_features} features times {self.n_labels} labels are too many coefficients for "
                "the paper's generator (2^39 at most): use kind 'extreme'"
            )

    @property
    def bytes_per_row(self) -> float:
        """Size of a row of X and Y in memory, at most."""
        return self.n_features * np.dtype(self.dtype).itemsize + 5 * self.sparsity + 8

    def group(self, group: int) -> tuple[NDArray[Any], sp.csr_array]:
        """Return X and Y of the group's rows."""
        integers = uniform_integers(
            self.seed, _STREAM_X, group, GROUP_ROWS * self.n_features, bits=_FRACTION_BITS + 1
        ).reshape(GROUP_ROWS, self.n_features)
        x = integers.astype(self.dtype)
        x -= 2**_FRACTION_BITS
        x *= 2.0**-_FRACTION_BITS
        largest = [self._largest(x[rows]) for rows in self._row_tiles()]
        return x, self._labels(np.concatenate(largest), group)

    def _row_tiles(self) -> list[slice]:
        at_once = max(1, _TILE_ENTRIES // max(self.n_features, min(self.n_labels, _TILE_LABELS)))
        return [slice(first, first + at_once) for first in range(0, GROUP_ROWS, at_once)]

    def _largest(self, x: NDArray[Any]) -> NDArray[np.int64]:
        """Return the K largest of Z = X B^T in each row, in falling order, as (Z 2^22) L + (L - 1 - label).

        These integers are ordered as Z is, and among equals by the label's index.
        """
        integers = x * np.float64(2**_FRACTION_BITS)
        signs = _signs(self.seed, self.n_labels, self.n_features)
        kept = np.empty((len(x), 0), dtype=np.int64)
        for first in range(0, self.n_labels, _TILE_LABELS):
            tile = signs[first : first + _TILE_LABELS]
            keys = (integers @ tile.T.astype(np.float64)).astype(np.int64)
            keys *= self.n_labels
            keys += self.n_labels - 1 - np.arange(first, first + len(tile))
            kept = np.concatenate([kept, keys], axis=1)
            if kept.shape[1] > self.sparsity:
                kept.partition(kept.shape[1] - self.sparsity, axis=1)
                kept = kept[:, -self.sparsity :]
        return np.sort(kept, axis=1)[:, ::-1]

    def _labels(self, largest: NDArray[np.int64], group: int) -> sp.csr_array:
        """Return Y: certain for the K/2 largest, Bernoulli with the sigmoid of Z for the rest of the K."""
        scaled, reverse_label = np.divmod(largest, self.n_labels)
        labels = (self.n_labels - 1 - reverse_label).astype(np.int32)
        z = scaled * 2.0 ** (1 - _FRACTION_BITS)
        certain = self.sparsity // 2
        draws = uniform(self.seed, _STREAM_Y, group, GROUP_ROWS * (self.sparsity - certain))
        active = np.ones(labels.shape, dtype=bool)
        with np.errstate(over="ignore"):
            probability = 1.0 / (1.0 + np.exp(-z[:, certain:]))
        active[:, certain:] = draws.reshape(GROUP_ROWS, -1) < probability
        order = np.argsort(labels, axis=1)
        labels = np.take_along_axis(labels, order, axis=1)
        active = np.take_along_axis(active, order, axis=1)
        indptr = np.concatenate([[0], np.cumsum(active.sum(axis=1))])
        indices = labels[active]
        ones = np.ones(len(indices), dtype=np.uint8)
        return sp.csr_array((ones, indices, indptr), shape=(GROUP_ROWS, self.n_labels))
