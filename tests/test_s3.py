"""Data sets on object stores: a real S3 server in a process of its own, and fsspec's memory."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import Client
from numpy.typing import NDArray
from s3_cases import free_port, s3_server

from dswml import Checkpoints, SparseWeightedClassifier
from dswml.dask_executor import DaskExecutor
from dswml.dataset import DatasetWriter, create_dataset, open_dataset
from dswml.errors import (
    DataError,
    IncompleteStoreError,
    StoppedEarlyError,
    StoreExistsError,
    StoreNotFoundError,
)
from dswml.sources import as_dataset
from dswml.storage import remove_store, store_exists
from dswml.validation import validate

N, D, L = 3000, 9, 6


def labels() -> NDArray[np.uint8]:
    return (np.random.default_rng(1).random((N, L)) < 0.3).astype(np.uint8)


def features() -> NDArray[np.float32]:
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    x[np.abs(x) < 0.7] = 0
    return x


def dense(rows: Any) -> NDArray[Any]:
    return rows.toarray() if sp.issparse(rows) else np.asarray(rows)


@pytest.fixture(scope="module")
def s3_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options of an S3 server on loopback."""
    with s3_server(tmp_path_factory.mktemp("moto")) as address:
        yield {"endpoint_url": address, "key": "key", "secret": "secret"}


@pytest.fixture(params=["s3", "memory"])
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A fresh URL and the options to reach it."""
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://{name}/data.zarr", {}
    options: dict[str, Any] = request.getfixturevalue("s3_options")
    fsspec.filesystem("s3", **options).mkdir(f"bucket-{name}")
    return f"s3://bucket-{name}/folder/data.zarr", options


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_data_set_lives_there_as_on_disk(
    place: tuple[str, dict[str, Any]], kind: str, tmp_path: Path
) -> None:
    url, options = place
    x: Any = features() if kind == "dense" else sp.csr_array(features())
    data = create_dataset(
        url, x, labels(), chunk_bytes=20_000, storage_options=options, label_names=list("abcdef")
    )
    assert data.url == url
    np.testing.assert_array_equal(dense(data.read_x(0, N)), features())
    np.testing.assert_array_equal(data.read_y(100, 2000).toarray(), labels()[100:2000])
    assert data.label_names == tuple("abcdef")
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301
    np.testing.assert_array_equal(dense(copy.read_x(7, 8)), features()[7:8])
    validate(data)
    local = create_dataset(tmp_path / "local.zarr", x, labels(), chunk_bytes=20_000)
    assert data.fingerprint == local.fingerprint
    fs, path = fsspec.url_to_fs(url, **options)
    assert not [name for name in fs.find(path) if "_progress" in name]


def test_nothing_is_overwritten_unless_asked(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    with pytest.raises(StoreNotFoundError, match=f"no store at {url}"):
        open_dataset(url, storage_options=options)
    assert not store_exists(url, options)
    create_dataset(url, np.eye(3), np.eye(3), storage_options=options)
    with pytest.raises(StoreExistsError, match=f"{url} exists"):
        create_dataset(url, np.eye(2), np.eye(2), storage_options=options)
    create_dataset(url, np.eye(2), np.eye(2), storage_options=options, overwrite=True)
    assert open_dataset(url, storage_options=options).n_rows == 2
    remove_store(url, options)
    assert not store_exists(url, options)


def test_an_interrupted_write_is_refused_and_resumed(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    x, y = features(), sp.csr_array(labels())
    shape = {"n_rows": N, "n_features": D, "n_labels": L, "nnz_y": y.nnz}
    writer = DatasetWriter.create(url, **shape, chunk_rows=700, storage_options=options)
    writer.write_rows(0, x[:1000], y[:1000], first_y=0)
    writer.mark_done("rows 0 to 1000")
    with pytest.raises(IncompleteStoreError, match="is incomplete"):
        open_dataset(url, storage_options=options)
    writer = DatasetWriter.resume(url, storage_options=options)
    assert writer.done() == {"rows 0 to 1000"}
    writer.write_rows(1000, x[1000:], y[1000:], first_y=int(y.indptr[1000]))
    data = writer.finish(k_hat=int(labels().sum(axis=1).max()), label_counts=labels().sum(axis=0))
    np.testing.assert_array_equal(dense(data.read_x(0, N)), x)
    validate(data)


def test_checkpoints_live_there_without_the_credentials(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    x, y = features()[:200], labels()[:200]
    asked: dict[str, Any] = {"weights": 0.3, "step": "open-loop", "max_iter": 1, "tol": 0, "random_state": 0}
    whole = SparseWeightedClassifier(**asked).fit(x, y)
    checkpoint = Checkpoints(url, every=1, resume=True, storage_options=options)
    with pytest.raises(StoppedEarlyError):
        SparseWeightedClassifier(**asked, time_limit=1e-9, checkpoint=checkpoint).fit(x, y)
    resumed = SparseWeightedClassifier(**asked, checkpoint=checkpoint).fit(x, y)
    assert resumed.model_.u.tobytes() == whole.model_.u.tobytes()
    fs, path = fsspec.url_to_fs(url, **options)
    fs.invalidate_cache()
    assert len({name.removeprefix(path).split("/")[1] for name in fs.find(path)}) == 3  # two and the root
    written = b"".join(fs.cat_file(name) for name in fs.find(path))
    assert not any(str(value).encode() in written for name, value in options.items() if name != "key")


@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_damage_is_named(place: tuple[str, dict[str, Any]], damage: str) -> None:
    url, options = place
    create_dataset(url, features(), labels(), chunk_bytes=20_000, storage_options=options)
    fs, path = fsspec.url_to_fs(url, **options)
    chunk = f"{path}/X/c/2/0"
    if damage == "delete":
        fs.rm_file(chunk)
    else:
        fs.pipe_file(chunk, fs.cat_file(chunk)[:100])
    with pytest.raises(DataError, match=f"chunk 2 of array X in {url} is (missing|damaged)"):
        open_dataset(url, storage_options=options).read_x(0, N)


def test_worker_processes_write_and_read_s3(s3_options: dict[str, Any], dask_client: Client) -> None:
    name = uuid.uuid4().hex
    fsspec.filesystem("s3", **s3_options).mkdir(name)
    executor = DaskExecutor(dask_client)
    data = create_dataset(
        f"s3://{name}/data.zarr",
        as_dataset(sp.csr_array(features()), labels(), block_bytes=60_000),
        storage_options=s3_options,
        executor=executor,
    )
    np.testing.assert_array_equal(dense(data.read_x(0, N)), features())
    assert validate(data, executor).n_rows == N


def test_a_server_that_is_not_there_is_an_error_with_its_url() -> None:
    options: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{free_port()}", "key": "k", "secret": "s"}
    options["config_kwargs"] = {"retries": {"max_attempts": 0}}
    with pytest.raises(DataError, match=r"s3://bucket/data\.zarr cannot be reached"):
        open_dataset("s3://bucket/data.zarr", storage_options=options)
