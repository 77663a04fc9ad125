"""Random numbers that depend on the seed and the place they are for, not on who draws them or in what order.

Rows are drawn in groups of `GROUP_ROWS`, each from a counter-based stream (Philox) of its own, keyed by
(seed, purpose, group). Only the raw 64-bit output is used, which NumPy promises never to change.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from dswml.errors import UsageError

__all__ = ["GROUP_ROWS", "check_seed", "generator", "random_bits", "uniform", "uniform_integers"]

#: Rows that are drawn together. Part of what a seed means: another number gives other data.
GROUP_ROWS = 1024

_GROUP_BITS = 56


def check_seed(seed: int) -> int:
    """Return the seed if it is one."""
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed is {seed}, but it must be between 0 and 2^64 - 1")
    return seed


def _philox(seed: int, purpose: int, group: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, purpose << _GROUP_BITS | group], dtype=np.uint64))


def generator(seed: int, purpose: int, group: int) -> np.random.Generator:
    """Return the generator of one stream, for kernels that draw one number after another."""
    return np.random.Generator(_philox(seed, purpose, group))


def uniform(seed: int, purpose: int, group: int, size: int) -> NDArray[np.float64]:
    """Return numbers uniform on [0, 1), of 53 bits each.

    Examples
    --------
    >>> bool((uniform(7, 0, 3, 1000) == uniform(7, 0, 3, 2000)[:1000]).all())
    True
    """
    raw = np.asarray(_philox(seed, purpose, group).random_raw(size), dtype=np.uint64)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _halves(raw: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Both 32-bit halves of each number, the low one first on every machine."""
    halves = raw.view(np.uint32)
    return halves if sys.byteorder == "little" else halves.reshape(-1, 2)[:, ::-1].reshape(-1)


def uniform_integers(seed: int, purpose: int, group: int, size: int, *, bits: int) -> NDArray[np.uint32]:
    """Return integers uniform on [0, 2**bits), with at most 32 bits.

    Examples
    --------
    >>> drawn = uniform_integers(0, 0, 0, 10_000, bits=4)
    >>> int(drawn.min()), int(drawn.max())
    (0, 15)
    """
    raw = np.asarray(_philox(seed, purpose, group).random_raw((size + 1) // 2), dtype=np.uint64)
    return _halves(raw)[:size] >> np.uint32(32 - bits)


def random_bits(seed: int, purpose: int, size: int) -> NDArray[np.uint8]:
    """Return zeros and ones with probability 1/2 each.

    Examples
    --------
    >>> sorted(set(random_bits(0, 0, 100).tolist()))
    [0, 1]
    """
    raw = np.asarray(_philox(seed, purpose, 0).random_raw((size + 63) // 64), dtype="<u8")
    return np.unpackbits(raw.view(np.uint8), count=size, bitorder="little")
