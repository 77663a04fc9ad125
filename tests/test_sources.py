"""Arrays of every kind are the same data set."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem

from dswml.dataset import create_dataset, open_dataset
from dswml.errors import DataError, StoreNotFoundError, UsageError
from dswml.executor import InProcessExecutor
from dswml.sources import as_dataset

N, D, L = 120, 6, 4
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
X[np.abs(X) < 0.4] = 0
Y = (np.random.default_rng(1).random((N, L)) < 0.4).astype(np.uint8)


def dense(rows: Any) -> Any:
    return rows.toarray() if sp.issparse(rows) else np.asarray(rows)


def zarr_array(values: Any, folder: Path) -> Any:
    return zarr.create_array(str(folder / "dense"), data=values, chunks=(25, values.shape[1]))


def zarr_csr(values: Any, folder: Path) -> Any:
    group = zarr.create_group(str(folder / "sparse"))
    write_elem(group, "matrix", sp.csr_matrix(values), dataset_kwargs={"shards": None})
    return group["matrix"]


def place_of_zarr_array(values: Any, folder: Path) -> Any:
    zarr_array(values, folder)
    return folder / "dense"


def memory_map(values: Any, folder: Path) -> Any:
    np.save(folder / "values.npy", values)
    return np.load(folder / "values.npy", mmap_mode="r")


forms: dict[str, Callable[[Any, Path], Any]] = {
    "list": lambda values, folder: values.tolist(),
    "numpy": lambda values, folder: values,
    "fortran": lambda values, folder: np.asfortranarray(values),
    "memory map": memory_map,
    "csr_array": lambda values, folder: sp.csr_array(values),
    "csr_matrix": lambda values, folder: sp.csr_matrix(values),
    "csc": lambda values, folder: sp.csc_array(values),
    "coo": lambda values, folder: sp.coo_array(values),
    "dask": lambda values, folder: da.from_array(values, chunks=(17, values.shape[1])),
    "dask cut by columns": lambda values, folder: da.from_array(values, chunks=(50, 2)),
    "dask of csr": lambda values, folder: da.from_array(values, chunks=(40, -1)).map_blocks(sp.csr_array),
    "zarr": zarr_array,
    "zarr csr": zarr_csr,
    "place of zarr": place_of_zarr_array,
}
in_every_form = pytest.mark.parametrize("form", forms)


@in_every_form
def test_features_of_every_form_are_the_same_data(form: str, tmp_path: Path) -> None:
    data = as_dataset(forms[form](X, tmp_path), Y)
    assert (data.n_rows, data.n_features, data.n_labels) == (N, D, L)
    assert data.x_dtype == (np.float64 if form == "list" else np.float32)
    assert data.is_sparse == (form in ("csr_array", "csr_matrix", "csc", "coo", "dask of csr", "zarr csr"))
    assert data.url is None
    assert [block.stop for block in data.blocks][-1] == N
    for start, stop in ((0, N), (3, 61), (119, 120)):
        rows = data.read_x(start, stop)
        assert rows.dtype == data.x_dtype
        np.testing.assert_array_equal(dense(rows), X[start:stop])
        if isinstance(rows, np.ndarray):
            assert rows.flags.c_contiguous
        else:
            assert rows.indices.dtype == rows.indptr.dtype == np.int32


@in_every_form
def test_labels_of_every_form_are_the_same_data(form: str, tmp_path: Path) -> None:
    data = as_dataset(X, forms[form](Y, tmp_path))
    rows = data.read_y(5, 77)
    np.testing.assert_array_equal(rows.toarray(), Y[5:77])
    assert rows.has_sorted_indices
    assert rows.data.dtype == np.uint8
    assert data.label_counts.tolist() == Y.sum(axis=0).tolist()
    assert data.k_hat == Y.sum(axis=1).max()
    assert data.nnz_y == Y.sum()


def test_the_fingerprint_is_that_of_the_values_whatever_holds_them(tmp_path: Path) -> None:
    dense_forms = ("numpy", "fortran", "memory map", "dask", "dask cut by columns", "zarr")
    prints = {as_dataset(forms[form](X, tmp_path), Y).fingerprint for form in dense_forms}
    prints.add(as_dataset(X, sp.csr_array(Y), block_bytes=1000).fingerprint)
    assert len(prints) == 1
    changed = Y.copy()
    changed[60, 2] ^= 1
    assert as_dataset(X, changed).fingerprint not in prints


@in_every_form
def test_every_form_can_be_stored(form: str, tmp_path: Path) -> None:
    data = create_dataset(tmp_path / "store.zarr", forms[form](X, tmp_path), Y)
    np.testing.assert_array_equal(dense(data.read_x(0, N)), X)
    np.testing.assert_array_equal(data.read_y(0, N).toarray(), Y)


@in_every_form
def test_every_form_travels(form: str, tmp_path: Path) -> None:
    data = as_dataset(forms[form](X, tmp_path), Y)
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301
    np.testing.assert_array_equal(dense(copy.read_x(10, 20)), X[10:20])
    assert copy.fingerprint == data.fingerprint


def test_blocks_follow_the_row_chunks_of_dask() -> None:
    x = da.from_array(np.ones((100, 3000)), chunks=((30, 50, 20), 3000))
    edges = [(block.start, block.stop) for block in as_dataset(x, np.ones((100, 1))).blocks]
    assert edges == [(0, 30), (30, 80), (80, 100)]


def test_small_row_chunks_of_dask_are_read_together() -> None:
    x = da.from_array(np.ones((1000, 4)), chunks=(1, 4))
    assert len(as_dataset(x, np.ones((1000, 1))).blocks) == 1


def test_blocks_follow_the_chunks_of_zarr(tmp_path: Path) -> None:
    data = as_dataset(zarr_array(X, tmp_path), Y, block_bytes=30 * D * 4)
    assert [block.n_rows for block in data.blocks] == [25, 25, 25, 25, 20]


def test_arrays_are_not_copied() -> None:
    x = np.ones((10, 3))
    assert np.shares_memory(as_dataset(x, np.ones((10, 1))).read_x(2, 5), x)


@pytest.mark.parametrize(
    ("dtype", "read"),
    [
        ("bool", "float32"),
        ("uint8", "float32"),
        ("int16", "float32"),
        ("int64", "float64"),
        ("float16", "float32"),
    ],
)
def test_features_that_are_not_floats_are_read_as_floats_that_hold_them(dtype: str, read: str) -> None:
    x = np.arange(6).reshape(3, 2).astype(dtype)
    for form in (x, sp.csr_array(x.astype("float32" if dtype == "float16" else dtype))):
        data = as_dataset(form, np.ones((3, 1)))
        assert data.x_dtype == read
        np.testing.assert_array_equal(dense(data.read_x(0, 3)), x)


def test_counts_are_checked_once_through_the_executor_that_is_given() -> None:
    class Counting(InProcessExecutor):
        reductions = 0

        def reduce(self, *args: Any, **kwargs: Any) -> Any:
            self.reductions += 1
            return super().reduce(*args, **kwargs)

    executor = Counting(1)
    data = as_dataset(X, Y).check(executor)
    assert data.check(executor) is data
    assert data.nnz_x == X.size
    assert data.k_hat == Y.sum(axis=1).max()
    assert executor.reductions == 1
    executor.close()


def test_bad_values_are_found_on_first_use() -> None:
    x = X.copy()
    x[31, 4] = np.nan
    with pytest.raises(DataError, match="row 31, column 4 of X in memory is nan"):
        as_dataset(x, Y).check()
    with pytest.raises(DataError, match="row 0, column 0 of Y in memory is 7"):
        as_dataset(X, np.full((N, L), 7)).k_hat  # noqa: B018
    with pytest.warns(UserWarning, match=f"{L} of {L} labels in Y have no positive row"):
        as_dataset(X, np.zeros((N, L))).check()


def test_features_alone_are_a_data_set_without_labels() -> None:
    data = as_dataset(X)
    assert data.n_labels == 0
    assert data.read_y(0, 5).shape == (5, 0)
    assert data.check().nnz_y == 0
    with pytest.raises(UsageError, match="these data have no labels"):
        data.p0  # noqa: B018


def test_a_data_set_or_its_place_is_taken_as_it_is(tmp_path: Path) -> None:
    data = create_dataset(tmp_path / "store.zarr", X, Y)
    assert as_dataset(data) is data
    assert as_dataset(tmp_path / "store.zarr").fingerprint == data.fingerprint
    assert (
        as_dataset(str(tmp_path / "store.zarr"), block_bytes=10_000).url == open_dataset(data.url or "").url
    )
    with pytest.raises(UsageError, match="a data set has its own labels"):
        as_dataset(data, Y)


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (X, Y[:-1], DataError, "X has 120 rows and Y has 119 rows"),
        (X[:0], Y[:0], DataError, r"X is empty: its shape is \(0, 6\)"),
        (X[:, :0], Y, DataError, r"X is empty: its shape is \(120, 0\)"),
        (X, Y[:, :0], DataError, r"Y is empty: its shape is \(120, 0\)"),
        (X[0], Y, UsageError, "X has 1 dimensions: it must be a matrix"),
        (X, Y[:, 0], UsageError, "Y has 1 dimensions: it must be a matrix"),
        (X.astype(complex), Y, UsageError, "X has type complex128: features must be real numbers"),
        (np.array([["a"]]), Y[:1], UsageError, "features must be real numbers"),
    ],
)
def test_shapes_and_types_that_cannot_be_are_refused(x: Any, y: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        as_dataset(x, y)


def test_dask_chunks_of_unknown_size_are_refused_with_the_way_out() -> None:
    x = da.from_array(X, chunks=(40, -1))
    x = x[x[:, 0] > -100]
    with pytest.raises(UsageError, match=r"chunks of unknown size: call X\.compute_chunk_sizes\(\)"):
        as_dataset(x, Y)


def test_a_zarr_group_of_another_kind_is_refused(tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "g"))
    with pytest.raises(UsageError, match="has encoding-type None: a sparse matrix must be a csr_matrix"):
        as_dataset(group, Y)
    with pytest.raises(StoreNotFoundError, match="no store at"):
        as_dataset(tmp_path / "nothing", Y)
    write_elem(group, "c", sp.csc_matrix(X), dataset_kwargs={"shards": None})
    with pytest.raises(UsageError, match="has encoding-type 'csc_matrix'"):
        as_dataset(group["c"], Y)
