"""The paper's synthetic data (A.5), any group of rows on its own and the same bits everywhere.

Entries of X are multiples of 2^-23 and those of B are +-2, so that Z = X B^T is a sum of
integers below 2^53 and exact in double precision: no order of summation, no BLAS and no
tiling can change it. Ties are broken by the index of the label.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dswml.errors import UsageError
from dswml.streams import GROUP_ROWS, random_bits, uniform, uniform_integers

__all__ = ["PaperRows"]

_STREAM_X, _STREAM_Y, _STREAM_B = range(3)
_FRACTION_BITS = 23
_TILE_LABELS = 4096


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
    >>> rows = PaperRows(n_features=8, n_labels=20, sparsity=4, seed=0)
    >>> x = rows.x(0)
    >>> lengths, labels = rows.y(0)
    >>> x.shape, bool(abs(x).max() <= 1), int(lengths.min()), int(lengths.max())
    ((1024, 8), True, 2, 4)
    """

    n_features: int
    n_labels: int
    sparsity: int
    seed: int
    dtype: str = "float32"

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

    def x_integers(self, group: int) -> NDArray[np.int32]:
        """X of the group's rows times 2^23."""
        entries = uniform_integers(
            self.seed, _STREAM_X, group, GROUP_ROWS * self.n_features, bits=_FRACTION_BITS + 1
        )
        centred: NDArray[np.int32] = entries.astype(np.int32) - np.int32(2**_FRACTION_BITS)
        return centred.reshape(GROUP_ROWS, self.n_features)

    def x(self, group: int) -> NDArray[np.floating]:
        """X of the group's rows: uniform on [-1, 1]."""
        x: NDArray[np.floating] = self.x_integers(group).astype(self.dtype)
        x *= 2.0**-_FRACTION_BITS
        return x

    def _largest(self, group: int) -> NDArray[np.int64]:
        """Return the K largest of Z = X B^T in each row, in falling order, as (Z 2^22) L + (L - 1 - label).

        These integers are ordered as Z is, and among equals by the label's index.
        """
        x = self.x_integers(group).astype(np.float64)
        signs = _signs(self.seed, self.n_labels, self.n_features)
        kept = np.empty((GROUP_ROWS, 0), dtype=np.int64)
        for first in range(0, self.n_labels, _TILE_LABELS):
            tile = signs[first : first + _TILE_LABELS]
            keys = (x @ tile.T.astype(np.float64)).astype(np.int64)
            keys *= self.n_labels
            keys += self.n_labels - 1 - np.arange(first, first + len(tile))
            keys = np.concatenate([kept, keys], axis=1)
            if keys.shape[1] > self.sparsity:
                keys.partition(keys.shape[1] - self.sparsity, axis=1)
                keys = keys[:, -self.sparsity :]
            kept = keys
        return np.sort(kept, axis=1)[:, ::-1]

    def y(self, group: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the number of labels of each of the group's rows, and the labels, row after row."""
        scaled, reverse_label = np.divmod(self._largest(group), self.n_labels)
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
        return active.sum(axis=1, dtype=np.int32), labels[active]
