"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from hypothesis import settings

from dswml.dataset import Dataset, open_dataset
from dswml.executor import one_blas_thread
from dswml.importers import import_dataset

_CHECKOUT = Path(__file__).resolve().parent.parent


# How long an example takes says more of the machine than of the code.
settings.register_profile("dswml", deadline=None)
settings.load_profile("dswml")


def pytest_configure(config: pytest.Config) -> None:
    # The processes that share the tests ignore Ctrl-C, and so would the commands that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a busy machine distributed's first attempt to connect fails, and its socket is left to the collector.
    config.addinivalue_line(
        "filterwarnings",
        "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning",
    )


@pytest.fixture(scope="module")
def calm_blas() -> Iterator[None]:
    """BLAS on one thread, also where a test computes what is expected: on a busy machine its threads spin."""
    with one_blas_thread():
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("DSWML_DATA", _CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data sets not found in {folder}: set DSWML_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def real_set(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Dataset]:
    """A function from the name of a real set to its data, rows of unit norm, imported at the first call."""
    folder = tmp_path_factory.mktemp("real")

    @cache
    def imported(name: str) -> Dataset:
        source = f"xmlrepo/{name}.txt" if name.startswith("stackex") else f"mulan/{name}.arff"
        import_dataset(real_data / source, folder / f"{name}.zarr", normalize="l2", dtype="float64")
        return open_dataset(folder / f"{name}.zarr")

    return imported


@pytest.fixture(scope="module")
def dask_client() -> Iterator[Client]:
    """A client of two worker processes on loopback."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
