"""Which worker an item goes to: the one that had it before, so that what it keeps is met again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["place"]


def place(n_items: int, workers: Mapping[str, int], before: Sequence[str] = ()) -> tuple[str, ...]:
    """Give every item a worker, in proportion to the workers' threads.

    An item stays where it was as long as its worker is there and has not more than its share.
    The others are dealt out so that neighbours stay together.

    Parameters
    ----------
    n_items : int
        Number of items.
    workers : mapping
        Threads of each worker, by its address; at least one.
    before : sequence of str
        The workers of the items when they were last placed.

    Examples
    --------
    >>> place(6, {"a": 1, "b": 2})
    ('a', 'a', 'b', 'b', 'b', 'b')
    >>> place(6, {"a": 1, "c": 2}, before=("a", "a", "b", "b", "b", "b"))
    ('a', 'a', 'c', 'c', 'c', 'c')
    """
    room: dict[str, int] = {}
    threads = sum(workers.values())
    passed = dealt = 0
    for worker in sorted(workers):
        passed += workers[worker]
        room[worker] = n_items * passed // threads - dealt
        dealt += room[worker]
    homes: list[str | None] = [None] * n_items
    for item, worker in enumerate(before[:n_items]):
        if room.get(worker, 0):
            homes[item] = worker
            room[worker] -= 1
    free = (worker for worker in room for _ in range(room[worker]))
    return tuple(next(free) if home is None else home for home in homes)
