"""The label side of the small problem, held by the workers: every shard has its m_l, b_l and C_l or rows.

The process that trains keeps G0, the rows of Z and M, from which any shard can be made again. Only numbers
and r x r matrices cross the network between two steps of the solution. A shard is a `Part` as threads share
them in one process, and does the same arithmetic, so a solution has the same bits wherever it is found.
When a worker is lost with its shards, the solution is begun again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .executor import Executor, HomesLostError
from .label_sums import Statistics
from .small_problem import Part, Quadratic, cut_labels

__all__ = ["ShardedQuadratic", "ShardedStatistics", "forget_shards", "shards_nbytes"]

Array = npt.NDArray[Any]

#: What this process holds, by run and number of the shard.
_shards: dict[tuple[str, int], Statistics] = {}
_parts: dict[tuple[str, int], Part] = {}


def shards_nbytes(label_counts: Array, rank: int) -> int:
    """Most bytes that all shards take together: rows, b, M as it comes and goes, two iterates and gradients.

    Examples
    --------
    >>> shards_nbytes(np.array([2, 1]), rank=10)
    1360
    """
    return 8 * rank * (7 * label_counts.size + int(label_counts.sum()))


def forget_shards(run: str) -> None:
    """Drop the shards of a run that this process holds."""
    for held in (_shards, _parts):
        for key in [key for key in held if key[0] == run]:
            held.pop(key, None)


def _receive(number: int, payload: tuple[str, int, float, Array], value: tuple[Any, ...]) -> bool:
    """Bring a shard up to date and set its iterate; False if what it must have had before is not here."""
    (run, n_rows, p0, g0), (known, pattern, widths, z, mt) = payload, value
    _parts.pop((run, number), None)
    if pattern is not None:
        _shards[run, number] = Statistics(*pattern)
    statistics = _shards.get((run, number))
    if statistics is None or statistics.rank != known:
        return False
    statistics.extend(g0, z, widths)
    part = Part(statistics, 0, len(mt), n_rows, p0)
    part.begin(mt)
    _parts[run, number] = part
    return True


def _ask(number: int, payload: tuple[str, str, tuple[Any, ...]]) -> tuple[Any] | None:
    """Call a method of a part; None if it is not here."""
    run, name, arguments = payload
    part = _parts.get((run, number))
    return None if part is None else (getattr(part, name)(*arguments),)


class ShardedStatistics(Statistics):
    """Statistics whose labels are with the workers; here are G0 and the rows of Z.

    Parameters
    ----------
    executor : Executor
    run : str
        Names the shards.
    label_counts, indptr, rows : ndarray
        As in `Statistics`; no label is summed on the workers.
    """

    def __init__(self, executor: Executor, run: str, label_counts: Array, indptr: Array, rows: Array) -> None:
        super().__init__(label_counts, np.full(label_counts.size, -1), indptr, rows)
        self.executor, self.run = executor, run
        self.ranges = cut_labels(label_counts, 0)
        self._rows_of = [np.unique(rows[indptr[first] : indptr[stop]]) for first, stop in self.ranges]
        self._homes: Sequence[str] = ()
        self._known: dict[int, tuple[str, int]] = {}  # home of a shard, and how many pieces it has

    def append(
        self, g0_columns: Array, positives: Array, z: Array | None = None, grams: Array | None = None
    ) -> None:
        assert z is not None
        self._append_g0(g0_columns)
        self.z = np.hstack([self.z, z])

    def rotate(self, rotation: Array) -> None:
        self._known.clear()
        g0, z = rotation.T @ self.g0 @ rotation, self.z @ rotation
        self._empty()
        self.append(g0, self.positives, z)

    def restore(self, state: dict[str, Any]) -> None:
        self._known.clear()
        super().restore(state | {"positives": self.positives[:, :0], "grams": self.grams[:0]})

    def _remake(self) -> None:
        pass  # by the workers

    def deliver(self, mt: Array, n_rows: int, p0: float) -> None:
        """Send every shard what it lacks, and its part of M^T."""
        self._homes = self.executor.homes(len(self.ranges), self._homes)
        self._known = {each: known for each, known in self._known.items() if known[0] == self._homes[each]}

        def value(number: int) -> tuple[Any, ...]:
            first, stop = self.ranges[number]
            rows = self._rows_of[number]
            pieces = self._known.get(number, ("", 0))[1]
            known = sum(self.widths[:pieces])
            pattern = None
            if not pieces:
                indptr = self.indptr[first : stop + 1]
                own = np.searchsorted(rows, self.rows[indptr[0] : indptr[-1]])
                pattern = (self.counts[first:stop], np.full(stop - first, -1), indptr - indptr[0], own)
            return known, pattern, self.widths[pieces:], self.z[rows, known:], mt[first:stop]

        payload = (self.run, n_rows, p0, self.g0)
        there = self.executor.at_homes(_receive, self._homes, payload, value)
        self._known = {
            number: (self._homes[number], len(self.widths)) for number, has in enumerate(there) if has
        }
        if not all(there):
            raise HomesLostError

    def ask(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Return what a method of every shard returns, in order."""
        found = self.executor.at_homes(_ask, self._homes, (self.run, name, arguments))
        self._known = {each: known for each, known in self._known.items() if found[each] is not None}
        if None in found:
            raise HomesLostError
        return [each[0] for each in found if each is not None]


class ShardedQuadratic(Quadratic):
    """The small problem on `ShardedStatistics`."""

    statistics: ShardedStatistics

    def __init__(self, statistics: ShardedStatistics, n_rows: int, p0: float) -> None:
        self.statistics, self.n_rows, self.p0 = statistics, n_rows, p0

    @property
    def decomposes(self) -> bool:
        return False

    def begin(self, mt: Array) -> None:
        self.statistics.deliver(mt, self.n_rows, self.p0)

    def each(self, name: str, *arguments: Any) -> list[Any]:
        return self.statistics.ask(name, arguments)
