"""Sums over the data that the small problem of a basis is made of, and how many directions have room.

They depend neither on the radius nor on p0. Nothing here reads the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .errors import UsageError

__all__ = ["Statistics", "plan_directions", "summed_entries"]

Array = npt.NDArray[Any]

#: A label with this many positives per direction is held as its Gram matrix.
GRAM_FROM = 2
#: Matrices of labels x directions that projected gradients take, with those of the points beside.
ITERATES = 8


def plan_directions(
    n_rows: int, n_features: int, label_counts: Array, limit: int, iterates: int = ITERATES
) -> tuple[int, Array]:
    """Return how many directions fit into ``limit`` bytes, and which labels the workers should sum.

    Counted are U and X^T X U, so many iterates of the small problem, and the statistics: the rows of
    Z where they all fit, and otherwise only those of labels with fewer positives than directions.
    The plan depends on these numbers alone, so it is the same on every machine.

    Examples
    --------
    >>> cap, place = plan_directions(1000, 50, np.full(20, 100), limit=2**30)
    >>> cap, int(place.max())
    (50, -1)
    """
    n_labels = label_counts.size
    ascending = np.sort(label_counts)

    def needed(rank: int, heavy: Array) -> int:
        light_rows = min(n_rows, int(label_counts[~heavy].sum()))
        # On the way to this rank labels lose their Gram matrix one by one: the most that there ever are.
        ranks = np.unique(np.append(np.clip((ascending - 1) // GRAM_FROM, 1, rank), rank))
        grams = n_labels - np.searchsorted(ascending, GRAM_FROM * ranks, side="right")
        entries = int((np.maximum(grams, np.count_nonzero(heavy)) * ranks**2).max())
        return 8 * (rank * (3 * n_features + iterates * n_labels + 2 * light_rows) + 3 * entries)

    def fits(rank: int) -> Array | None:
        for heavy in (np.zeros(n_labels, dtype=bool), label_counts > rank):
            if needed(rank, heavy) <= limit:
                return heavy
        return None

    low, high = 1, n_features
    heavy = fits(low)
    if heavy is None:
        raise UsageError(
            f"one direction of {n_features} features and {n_labels} labels needs more than the memory limit "
            f"of {limit / 2**20:.0f} MiB: raise memory_limit"
        )
    while low < high:
        middle = (low + high + 1) // 2
        found = fits(middle)
        if found is None:
            high = middle - 1
        else:
            low, heavy = middle, found
    place = np.full(n_labels, -1, dtype=np.int64)
    place[heavy] = np.arange(np.count_nonzero(heavy))
    return low, place


def summed_entries(n_rows: int, n_features: int, label_counts: Array, limit: int) -> int:
    """Return how many entries a direction has in the Gram matrices that the plan has the workers sum."""
    cap, place = plan_directions(n_rows, n_features, label_counts, limit)
    return int(np.count_nonzero(place >= 0)) * cap


class Statistics:
    """Sums over the data for a growing basis: G0, b_l, and C_l or the rows it is made of.

    A label with many positives is held as its Gram matrix C_l, one with few as the rows z_i
    themselves, whichever is smaller to multiply with. What is listed in ``place`` arrives as sums
    from the workers; the rest is made here from the rows.

    Parameters
    ----------
    label_counts : ndarray (L,)
        Positives of each label.
    place : ndarray (L,)
        Position of a label among those summed on the workers, or -1.
    indptr, rows : ndarray
        For each label without one, which of the light rows are active (CSC).
    """

    def __init__(self, label_counts: Array, place: Array, indptr: Array, rows: Array) -> None:
        self.counts, self.indptr, self.rows = label_counts, indptr, rows
        self.n_labels, self.nnz = label_counts.size, int(label_counts.sum())
        self._summed = np.flatnonzero(place >= 0)[np.argsort(place[place >= 0])]
        self._light = np.flatnonzero(place < 0)
        self.z = np.zeros((int(rows.max(initial=-1)) + 1, 0))
        self._empty()

    def _empty(self) -> None:
        self.rank = 0
        #: Columns that came at a time, since the basis was last rotated.
        self.widths: list[int] = []
        self.g0 = np.zeros((0, 0))
        self.positives = np.zeros((self.n_labels, 0))
        self.grams = np.zeros((self._summed.size, 0, 0))
        self.place = np.full(self.n_labels, -1, dtype=np.int64)
        self.place[self._summed] = np.arange(self._summed.size)
        self.z = self.z[:, :0]

    def append(
        self, g0_columns: Array, positives: Array, z: Array | None = None, grams: Array | None = None
    ) -> None:
        """Add new columns: G0's (r x m), the summed labels' b_l, the light rows' and the summed C_l's.

        Without the light rows the C_l are not held, which does for p0 = 1/2.
        """
        old = self.rank
        self._append_g0(g0_columns)
        rank = self.rank
        sums = np.empty((self.n_labels, rank))
        sums[:, :old] = self.positives
        self.positives = sums
        sums[self._summed, old:] = positives
        if z is None:
            return
        kernels.add_up_rows(self.indptr, self.rows, self._light, z, sums[:, old:])
        self.z = np.hstack([self.z, z]) if old else z
        made = np.setdiff1d(np.flatnonzero(self.counts > GRAM_FROM * rank), self._summed)
        held = self._summed.size
        grown = np.empty((held + made.size, rank, rank))
        if grams is not None:
            _border(self.grams[:held], grams, grown[:held])
        # The larger the rank, the fewer labels have a Gram matrix: those of `made` had one before, if any.
        grown[held:, :old, :old] = self.grams[self.place[made]] if old else 0.0
        for gram, label in zip(grown[held:], made, strict=True):
            active = self.z[self.rows[self.indptr[label] : self.indptr[label + 1]]]
            gram[:, old:] = active.T @ active[:, old:]
        _mirror(grown[held:], old)
        self.grams = grown
        self.place = np.full(self.n_labels, -1, dtype=np.int64)
        self.place[np.concatenate([self._summed, made])] = np.arange(len(grown))

    def _append_g0(self, columns: Array) -> None:
        self.rank += columns.shape[1]
        self.widths = [*self.widths, columns.shape[1]]
        g0 = np.empty((1, self.rank, self.rank))
        _border(self.g0[None], columns[None], g0)
        self.g0 = g0[0]

    def renew(self, g0: Array, positives: Array) -> None:
        """Replace all sums by those of another basis, where the C_l are not held; G0 is exactly symmetric."""
        self._empty()
        self.g0, self.positives = g0, positives
        self.rank, self.widths = len(g0), [len(g0)]

    def rotate(self, rotation: Array) -> None:
        """Replace the basis U by ``U @ rotation`` (r x r', orthonormal columns)."""
        summed = slice(self._summed.size)
        g0, positives = rotation.T @ self.g0 @ rotation, self.positives[self._summed] @ rotation
        z = grams = None
        if self.z.shape[1]:
            z = self.z @ rotation
            grams = np.matmul(rotation.T, np.matmul(self.grams[summed], rotation))
        self._empty()
        self.append(g0, positives, z, grams)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: arrays, and the widths of the pieces."""
        return {name: getattr(self, name) for name in ("g0", "positives", "grams", "z", "place", "widths")}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a state, with sums over rows made again if another kind of statistics left them out."""
        for name, value in state.items():
            setattr(self, name, value)
        self.rank = self.g0.shape[1]
        if self.positives.shape[1] < self.rank:
            self._remake()

    def _remake(self) -> None:
        g0, z, widths = self.g0, self.z, self.widths
        self._empty()
        self.extend(g0, z, widths)

    def extend(self, g0: Array, z: Array, widths: Sequence[int]) -> None:
        """Append pieces of the given widths, after which G0 is ``g0``, when no label is summed elsewhere."""
        start = self.rank
        for width in widths:
            old, new = self.rank, self.rank + width
            piece = np.ascontiguousarray(z[:, old - start : new - start])
            self.append(g0[:new, old:new], np.zeros((0, width)), piece)


def _border(corner: Array, columns: Array, out: Array) -> None:
    """Make symmetric matrices of their upper left corner and their last columns, exactly symmetric."""
    old = corner.shape[1]
    out[:, :old, :old] = corner
    out[:, :, old:] = columns
    _mirror(out, old)


def _mirror(matrices: Array, old: int) -> None:
    """Make matrices exactly symmetric whose rows from ``old`` on are those of their columns."""
    matrices[:, old:, :old] = np.swapaxes(matrices[:, :old, old:], 1, 2)
    block = matrices[:, old:, old:]
    block += np.swapaxes(block, 1, 2)
    block /= 2
