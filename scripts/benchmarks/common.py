"""What all benchmarks share: how to time, what a result is, and the data that they run on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from dswml.dask_executor import DaskExecutor
from dswml.dataset import Dataset, open_dataset
from dswml.importers import import_dataset

LOOPBACK = "127.0.0.1"
MIB, GB = 2**20, 10**9
ROOT = Path(__file__).resolve().parents[2]
#: Real data sets, below the folder of real data.
SETS = {
    "delicious": "mulan/delicious.arff",
    "bibtex": "mulan/bibtex.arff",
    "stackex_cs": "xmlrepo/stackex_cs.txt",
    "stackex_philosophy": "xmlrepo/stackex_philosophy.txt",
}


@dataclass(frozen=True)
class Goal:
    """A figure that must be at most, or at least, its limit; None where it could not be measured."""

    text: str
    measured: float | None
    limit: float
    at_most: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return bool(self.measured <= self.limit if self.at_most else self.measured >= self.limit)


@dataclass(frozen=True)
class Table:
    """Lines of text under a header; the first cell of a line names it."""

    caption: str
    header: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Curve:
    """Points of one kind in a chart."""

    name: str
    x: list[float]
    y: list[float]
    errors: list[float] | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes."""

    title: str
    description: str
    x_title: str
    y_title: str
    curves: list[Curve]
    log_x: bool = True
    log_y: bool = True
    level: float | None = None
    level_name: str = ""


@dataclass
class Result:
    """What a benchmark found; everything in it can be written as JSON."""

    name: str
    title: str
    question: str
    goals: list[Goal] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    flame: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as dictionaries, with what was met."""
        found = asdict(self)
        for told, goal in zip(found["goals"], self.goals, strict=True):
            told["met"] = goal.met
        return found


@dataclass(frozen=True)
class Setting:
    """Where a benchmark works, and how long: ``tiny`` shows in seconds that it runs, and measures nothing."""

    scratch: Path
    tiny: bool = False
    repeats: int = 3
    peers: Path | None = None

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return the one or the other."""
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Spread:
    """Median and extremes of a few measurements."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3g} ({self.low:.3g} to {self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the extremes."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio(dividends: Sequence[float], divisors: Sequence[float]) -> Spread:
    """Return how many times as much one took as the other, pair by pair of measurements made in turn."""
    return spread([a / max(b, 1e-9) for a, b in zip(dividends, divisors, strict=True)])


def seconds(function: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    packages = ("dswml", "numpy", "scipy", "zarr", "dask", "distributed", "numba", "scikit-learn")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "packages": {name: version(name) for name in packages},
    }


def real_sets(setting: Setting, names: Sequence[str] = tuple(SETS)) -> dict[str, Dataset]:
    """Import the real data sets, rows of unit norm; a tiny run takes the smallest alone."""
    folder = Path(os.environ.get("DSWML_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        raise SystemExit(f"the real data sets are not in {folder}: set DSWML_DATA to their folder")
    sets = {}
    for name in setting.pick(names, ["stackex_philosophy"]):
        store = setting.scratch / f"{name}.zarr"
        if not store.exists():
            import_dataset(folder / SETS[name], str(store), normalize="l2", dtype="float64")
        sets[name] = open_dataset(store)
    return sets


def split_set(setting: Setting, name: str) -> tuple[Dataset, Dataset]:
    """Import the parts for training and testing that a set is distributed in."""
    folder = Path(os.environ.get("DSWML_DATA", ROOT.parent / "shared" / "data"))
    parts = []
    for part in ("train", "test"):
        store = setting.scratch / f"{name}-{part}.zarr"
        if not store.exists():
            import_dataset(
                folder / "mulan" / f"{name}-{part}.arff", str(store), normalize="l2", dtype="float64"
            )
        parts.append(open_dataset(store))
    return parts[0], parts[1]


@contextmanager
def local_workers(count: int, memory_limit: int | str = "auto", threads: int = 1) -> Iterator[DaskExecutor]:
    """Run worker processes on this machine, of so many threads each."""
    cluster = LocalCluster(
        n_workers=count,
        threads_per_worker=threads,
        memory_limit=memory_limit,
        host=LOOPBACK,
        dashboard_address=f"{LOOPBACK}:0",
    )
    with cluster, Client(cluster, set_as_default=False) as client, DaskExecutor(client) as executor:
        client.wait_for_workers(count)
        yield executor
