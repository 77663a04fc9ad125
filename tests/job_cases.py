"""Clusters of real processes for the tests of jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
DASK = Path(sys.executable).parent / "dask"


@dataclass
class FarCluster:
    """A scheduler and workers with nannies, each a process of its own, and what they have said."""

    folder: Path
    scheme: str
    options: list[str]
    stack: ExitStack

    @property
    def file(self) -> Path:
        return self.folder / "scheduler.json"

    @property
    def address(self) -> str:
        return str(json.loads(self.file.read_text())["address"])

    def start(self, kind: str, *arguments: str, **environment: str) -> None:
        local = ["--host", f"{self.scheme}://{LOOPBACK}", "--dashboard-address", f"{LOOPBACK}:0"]
        log = self.folder / f"{kind}-{time.monotonic_ns()}.log"
        said = self.stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            [DASK, kind, *arguments, *local, "--scheduler-file", self.file, *self.options],
            stdout=said,
            stderr=said,
            env={**os.environ, **environment},
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)

    def said(self) -> str:
        """Return everything that the processes have written."""
        return "".join(file.read_text() for file in self.folder.glob("*.log"))


@contextmanager
def far_cluster(
    folder: Path, workers: int, scheme: str = "tcp", options: Sequence[str] = ()
) -> Iterator[FarCluster]:
    """Start a scheduler and workers on loopback, and end them."""
    with ExitStack() as stack:
        cluster = FarCluster(folder, scheme, list(options), stack)
        cluster.start("scheduler", "--port", "0")
        deadline = time.monotonic() + 60
        while not (cluster.file.exists() and cluster.file.read_text().endswith("}")):
            assert time.monotonic() < deadline, cluster.said()
            time.sleep(0.1)
        cluster.start("worker", "--nworkers", str(workers), "--nthreads", "1")
        yield cluster
