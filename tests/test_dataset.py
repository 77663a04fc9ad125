"""A data set in a store is what was written, wherever and by however many it was written or is read."""

from __future__ import annotations

import itertools
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import anndata.io
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from distributed import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import dswml.dataset
from dswml.dask_executor import DaskExecutor
from dswml.dataset import Dataset, DatasetWriter, create_dataset, open_dataset
from dswml.errors import DataError, IncompleteStoreError, StoreExistsError, StoreNotFoundError, UsageError
from dswml.executor import InProcessExecutor
from dswml.sources import as_dataset
from dswml.storage import open_group
from dswml.stored import StoredDataset
from dswml.validation import validate

N, D, L = 230, 7, 5


def labels(n_rows: int = N) -> NDArray[np.uint8]:
    y = (np.random.default_rng(1).random((n_rows, L)) < 0.3).astype(np.uint8)
    y[3] = 0
    y[0] = 1
    return y


def features(kind: str, n_rows: int = N) -> NDArray[np.float32]:
    x = np.random.default_rng(0).normal(size=(n_rows, D)).astype(np.float32)
    return x if kind == "dense" else x * (x > 0.5)


def stored_form(kind: str, x: NDArray[Any]) -> Any:
    return x if kind == "dense" else sp.csr_array(x)


def dense(rows: Any) -> NDArray[Any]:
    return rows.toarray() if sp.issparse(rows) else np.asarray(rows)


@pytest.fixture(params=["dense", "sparse"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores with many chunks in every array."""
    folder = tmp_path_factory.mktemp("stores")
    for kind in ("dense", "sparse"):
        create_dataset(
            folder / kind,
            stored_form(kind, features(kind)),
            labels(),
            chunk_bytes=600,
            label_names=list("abcde"),
            feature_names=[f"f{i}" for i in range(D)],
        )
    return folder


@pytest.fixture
def store(stores: Path, tmp_path: Path, kind: str) -> Path:
    """A store of its own for each test, to read or to damage."""
    return Path(shutil.copytree(stores / kind, tmp_path / "data.zarr"))


def test_reads_are_the_rows_that_were_written(store: Path, kind: str) -> None:
    data = open_dataset(store)
    x, y = features(kind), labels()
    for start, stop in ((0, N), (0, 1), (17, 93), (N - 1, N), (50, 50)):
        rows = data.read_x(start, stop)
        np.testing.assert_array_equal(dense(rows), x[start:stop])
        np.testing.assert_array_equal(data.read_y(start, stop).toarray(), y[start:stop])
        assert rows.dtype == np.float32
        assert data.is_sparse == sp.issparse(rows)


def test_what_is_known_of_the_data_is_what_numpy_counts(store: Path, kind: str) -> None:
    data = open_dataset(store)
    x, y = features(kind), labels()
    assert (data.n_rows, data.n_features, data.n_labels) == (N, D, L)
    assert data.nnz_x == (N * D if kind == "dense" else np.count_nonzero(x))
    assert data.nnz_y == y.sum()
    assert data.k_hat == y.sum(axis=1).max()
    assert data.p0 == 2 * data.k_hat / L
    assert data.label_counts.tolist() == y.sum(axis=0).tolist()
    assert data.label_names == tuple("abcde")
    assert data.feature_names == tuple(f"f{i}" for i in range(D))
    assert data.url == str(store)
    assert data.normalize is None
    assert data.attrs["created_with"].keys() == {"dswml", "numpy", "zarr"}


def test_sparse_rows_have_small_indices_and_labels_are_sorted_ones(store: Path) -> None:
    data = open_dataset(store)
    y = data.read_y(0, N)
    assert y.indices.dtype == y.indptr.dtype == np.int32
    assert y.data.dtype == np.uint8
    assert set(y.data.tolist()) == {1}
    assert y.has_sorted_indices
    x = data.read_x(0, N)
    if isinstance(x, np.ndarray):
        assert x.flags.c_contiguous
    else:
        assert x.indices.dtype == x.indptr.dtype == np.int32


def test_blocks_follow_the_chunks_and_the_budget(store: Path) -> None:
    data = open_dataset(store, block_bytes=2000)
    assert isinstance(data, StoredDataset)
    assert len(data.blocks) > 3
    rows = data.layout["Y/indptr"]["chunks"][0]
    assert all(block.start % rows == 0 for block in data.blocks)
    assert [block.stop for block in data.blocks][-1] == N
    assert len(open_dataset(store).blocks) == 1


def test_only_the_address_travels(store: Path, kind: str) -> None:
    data = open_dataset(store, block_bytes=1234)
    text = pickle.dumps(data)
    assert len(text) < 400
    copy = pickle.loads(text)  # noqa: S301
    assert copy.blocks == data.blocks
    np.testing.assert_array_equal(dense(copy.read_x(3, 9)), features(kind)[3:9])


def test_arrays_are_opened_once_in_a_process(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = pickle.dumps(open_dataset(store))
    monkeypatch.setattr("dswml.stored.open_group", None)
    for _ in range(3):
        assert pickle.loads(text).read_y(0, 2).nnz == labels()[:2].sum()  # noqa: S301


def test_a_store_that_was_replaced_is_read_anew_by_who_opens_it_and_refused_to_old_handles(
    store: Path,
) -> None:
    before = open_dataset(store)
    old = pickle.dumps(before)
    shutil.rmtree(store)
    x = features("dense", 50)
    create_dataset(store, x, labels(50))
    np.testing.assert_array_equal(dense(open_dataset(store).read_x(0, 50)), x)
    program = f"import pickle; pickle.loads({old!r})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"the store {store} was replaced by another while it was in use" in run.stderr


def test_many_threads_read_at_once(store: Path, kind: str) -> None:
    data = open_dataset(store, block_bytes=2000)
    found: dict[int, Any] = {}

    def read(offset: int) -> None:
        for block in data.blocks[offset::4]:
            found[block.start] = dense(data.read_x(block.start, block.stop))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joined = np.concatenate([found[start] for start in sorted(found)])
    np.testing.assert_array_equal(joined, features(kind))


def test_repr_says_what_and_where(store: Path, kind: str) -> None:
    text = repr(open_dataset(store))
    assert str(store) in text
    assert f"{N} rows, {D} features ({kind} float32), {L} labels" in text


def test_anndata_opens_both_matrices(store: Path, kind: str) -> None:
    group = zarr.open_group(str(store), mode="r")
    np.testing.assert_array_equal(dense(anndata.io.read_elem(group["X"])), features(kind))
    np.testing.assert_array_equal(dense(anndata.io.read_elem(group["Y"])), labels())
    sparse = anndata.io.sparse_dataset(group["Y"])
    np.testing.assert_array_equal(sparse[10:20].toarray(), labels()[10:20])
    if kind == "sparse":
        x = anndata.io.sparse_dataset(group["X"])
        np.testing.assert_array_equal(x[10:20].toarray(), features(kind)[10:20])


def test_l2_scales_rows_and_is_recorded(tmp_path: Path, kind: str) -> None:
    x = features(kind).astype(np.float64)
    x[5] = 0
    data = create_dataset(tmp_path / "n.zarr", stored_form(kind, x), labels(), normalize="l2")
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(dense(data.read_x(0, N)), x / np.where(norms == 0, 1, norms), rtol=1e-14)
    assert data.normalize == "l2"
    assert open_dataset(tmp_path / "n.zarr").attrs["normalize"] == "l2"


class TestFingerprint:
    def test_a_copy_has_the_same(self, store: Path, tmp_path: Path) -> None:
        shutil.copytree(store, tmp_path / "copy.zarr")
        assert open_dataset(tmp_path / "copy.zarr").fingerprint == open_dataset(store).fingerprint

    def test_the_same_data_written_again_have_the_same(self, store: Path, kind: str, tmp_path: Path) -> None:
        x = stored_form(kind, features(kind))
        again = create_dataset(tmp_path / "again.zarr", x, labels(), chunk_bytes=600)
        assert again.fingerprint == open_dataset(store).fingerprint

    @pytest.mark.parametrize("row", [0, 101, N - 1])
    def test_one_other_value_has_another(self, store: Path, kind: str, tmp_path: Path, row: int) -> None:
        x = features(kind)
        x[row, 2] += 1
        other = create_dataset(tmp_path / "x.zarr", stored_form(kind, x), labels(), chunk_bytes=600)
        assert other.fingerprint != open_dataset(store).fingerprint

    def test_an_edit_in_place_has_another(self, store: Path, kind: str) -> None:
        before = open_dataset(store).fingerprint
        array = zarr.open_group(str(store), mode="r+")["X" if kind == "dense" else "X/data"]
        assert isinstance(array, zarr.Array)
        array[array.shape[0] // 2] = 7.0
        assert open_dataset(store).fingerprint != before


class TestRefusal:
    def test_of_a_place_with_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(StoreNotFoundError, match="no store at"):
            open_dataset(tmp_path / "nothing.zarr")

    def test_of_a_group_of_another_kind(self, tmp_path: Path) -> None:
        open_group(tmp_path / "other.zarr", "w").attrs["format"] = "dswml-model"
        with pytest.raises(
            DataError, match=r"not a dswml data set \(its format attribute is 'dswml-model'\)"
        ):
            open_dataset(tmp_path / "other.zarr")

    def test_of_a_newer_format(self, store: Path) -> None:
        zarr.open_group(str(store), mode="r+").attrs["format_version"] = 2
        with pytest.raises(
            DataError, match=r"format version 2; this program reads version 1: install a newer"
        ):
            open_dataset(store)

    def test_of_an_unfinished_store(self, store: Path) -> None:
        zarr.open_group(str(store), mode="r+").attrs["complete"] = False
        with pytest.raises(
            IncompleteStoreError, match=r"is incomplete.*same command again to resume.*--overwrite"
        ):
            open_dataset(store)

    @pytest.mark.parametrize("name", ["n_rows", "nnz_y", "k_hat"])
    def test_of_attributes_that_are_no_counts(self, store: Path, name: str) -> None:
        zarr.open_group(str(store), mode="r+").attrs[name] = "many"
        with pytest.raises(DataError, match=f"attribute {name} of {store} is 'many'"):
            open_dataset(store)

    def test_of_arrays_that_do_not_fit(self, store: Path) -> None:
        zarr.open_group(str(store), mode="r+").attrs["n_rows"] = N + 1
        with pytest.raises(DataError, match=r"has shape .* where .* must be"):
            open_dataset(store)

    def test_of_a_store_without_one_of_its_arrays(self, store: Path) -> None:
        shutil.rmtree(store / "Y" / "indices")
        with pytest.raises(DataError, match=f"array Y/indices is missing from {store}"):
            open_dataset(store)

    def test_of_other_scalings(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="normalize must be None or 'l2', not 'max'"):
            create_dataset(tmp_path / "a", np.eye(2), np.eye(2), normalize="max")  # type: ignore[arg-type]

    def test_of_a_wrong_number_of_names(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="3 label names are given for 2 labels"):
            create_dataset(tmp_path / "a", np.eye(2), np.eye(2), label_names=list("abc"))


class TestDamage:
    """Files are really truncated, changed and deleted."""

    def arrays(self, kind: str) -> list[str]:
        x = ["X"] if kind == "dense" else ["X/data", "X/indices", "X/indptr"]
        return [*x, "Y/data", "Y/indices", "Y/indptr"]

    def read_all(self, store: Path) -> None:
        data = open_dataset(store)
        data.read_x(0, N)
        data.read_y(0, N)

    @pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
    def test_of_any_array_is_an_error_naming_store_array_and_chunk(
        self, store: Path, kind: str, damage: str
    ) -> None:
        for name in self.arrays(kind):
            files = sorted(p for p in (store / name / "c").rglob("*") if p.is_file())
            file = files[len(files) // 2]
            content = file.read_bytes()
            if damage == "flip":
                file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            elif damage == "truncate":
                file.write_bytes(content[: len(content) // 2])
            else:
                file.unlink()
            chunk = file.relative_to(store / name / "c").parts[0]
            with pytest.raises(DataError) as caught:
                self.read_all(store)
            assert f"chunk {chunk} of array {name} in {store}" in str(caught.value)
            file.write_bytes(content)
            self.read_all(store)

    def test_that_leaves_checksums_right_is_found_too(self, store: Path) -> None:
        """Somebody wrote nonsense through Zarr itself."""
        indptr = zarr.open_group(str(store), mode="r+")["Y/indptr"]
        assert isinstance(indptr, zarr.Array)
        indptr[10] = 10**9
        with pytest.raises(
            DataError, match=r"Y/indptr in .* sends rows \[0, 10\) to entries \[0, 1000000000\)"
        ):
            open_dataset(store).read_y(0, 10)
        values = zarr.open_group(str(store), mode="r+")["Y/data"]
        assert isinstance(values, zarr.Array)
        values[0] = 2
        with pytest.raises(DataError, match=r"Y/data in .* holds 2 in rows \[0, 5\)"):
            open_dataset(store).read_y(0, 5)


class TestWriting:
    def test_never_overwrites_unless_asked(self, store: Path, kind: str) -> None:
        with pytest.raises(StoreExistsError, match=f"{store} exists"):
            create_dataset(store, np.eye(2), np.eye(2))
        assert open_dataset(store).n_rows == N
        create_dataset(store, np.eye(2), np.eye(2), overwrite=True)
        assert open_dataset(store).n_rows == 2

    def test_never_deletes_what_is_not_a_store(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("precious")
        with pytest.raises(StoreExistsError, match="not a Zarr store"):
            create_dataset(tmp_path, np.eye(2), np.eye(2), overwrite=True)
        assert (tmp_path / "notes.txt").read_text() == "precious"

    @settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        cuts=st.sets(st.integers(1, 23), max_size=5),
        chunk_rows=st.integers(1, 30),
        max_files=st.sampled_from([1, 3, 1000]),
        order=st.randoms(use_true_random=False),
    )
    def test_pieces_of_any_size_in_any_order_make_the_same_data(
        self, tmp_path: Path, kind: str, cuts: set[int], chunk_rows: int, max_files: int, order: Any
    ) -> None:
        x, y = stored_form(kind, features(kind, 24)), sp.csr_array(labels(24))
        writer = DatasetWriter.create(
            tmp_path / "pieces.zarr",
            n_rows=24,
            n_features=D,
            n_labels=L,
            nnz_x=x.nnz if kind == "sparse" else None,
            nnz_y=y.nnz,
            chunk_rows=chunk_rows,
            max_files=max_files,
            overwrite=True,
        )
        edges = [0, *sorted(cuts), 24]
        pieces = list(itertools.pairwise(edges))
        order.shuffle(pieces)
        for start, stop in pieces:
            first_x = int(x.indptr[start]) if kind == "sparse" else 0
            piece = pickle.loads(pickle.dumps(writer))  # noqa: S301
            piece.write_rows(
                start, x[start:stop], y[start:stop], first_x=first_x, first_y=int(y.indptr[start])
            )
        data = writer.finish(k_hat=5, label_counts=labels(24).sum(axis=0))
        np.testing.assert_array_equal(dense(data.read_x(0, 24)), features(kind, 24))
        np.testing.assert_array_equal(data.read_y(0, 24).toarray(), labels(24))
        assert not (tmp_path / "pieces.zarr" / "_progress").exists()

    def test_of_whole_units_needs_no_joining(self, tmp_path: Path) -> None:
        x, y = sp.csr_array(features("sparse")), sp.csr_array(labels())
        writer = DatasetWriter.create(
            tmp_path / "a", n_rows=N, n_features=D, n_labels=L, nnz_x=x.nnz, nnz_y=y.nnz, chunk_rows=10
        )
        matrices: tuple[tuple[Literal["X", "Y"], Any, int], ...] = (
            ("X", x, writer.layout.x.unit),
            ("Y", y, writer.layout.y.unit),
        )
        for name, matrix, unit in matrices:
            for start in range(0, matrix.nnz, unit):
                values = None if name == "Y" else matrix.data[start : start + unit]
                writer.write_csr(name, start, matrix.indices[start : start + unit], values)
            for start in range(0, N + 1, writer.layout.indptr.unit):
                writer.write_indptr(name, start, matrix.indptr[start : start + writer.layout.indptr.unit])
        data = writer.finish(k_hat=5, label_counts=labels().sum(axis=0))
        np.testing.assert_array_equal(dense(data.read_x(0, N)), features("sparse"))
        validate(data)

    def test_refuses_parts_of_units_where_two_workers_could_meet(self, tmp_path: Path) -> None:
        writer = DatasetWriter.create(
            tmp_path / "a", n_rows=100, n_features=D, n_labels=L, nnz_y=30, chunk_rows=10
        )
        with pytest.raises(UsageError, match=r"\[5, 15\) of array X .* units of 10"):
            writer.write_dense(5, np.ones((10, D), np.float32))
        with pytest.raises(UsageError, match=r"\[0, 2\) of array Y/indices .* units of 3"):
            writer.write_csr("Y", 0, np.arange(2))
        with pytest.raises(UsageError, match=r"\[95, 105\) of array X is outside its 100 places"):
            writer.write_dense(95, np.ones((10, D), np.float32))
        with pytest.raises(UsageError, match="has no array X/indices: its X is dense"):
            writer.write_csr("X", 0, np.arange(3), np.ones(3))
        writer.write_dense(90, np.ones((10, D), np.float32))

    def test_many_files_are_gathered_into_shards_that_read_the_same(self, tmp_path: Path) -> None:
        x, y = features("dense"), sp.csr_array(labels())
        writer = DatasetWriter.create(
            tmp_path / "a",
            n_rows=N,
            n_features=D,
            n_labels=L,
            nnz_y=y.nnz,
            chunk_rows=5,
            max_files=4,
        )
        assert writer.layout.indptr.unit == 60
        with pytest.raises(UsageError, match="units of 60"):
            writer.write_dense(0, x[:5])
        writer.write_rows(0, x[:100], y[:100], first_y=0)
        writer.write_rows(100, x[100:], y[100:], first_y=int(y.indptr[100]))
        data = writer.finish(k_hat=5, label_counts=labels().sum(axis=0))
        np.testing.assert_array_equal(dense(data.read_x(7, 211)), x[7:211])
        assert isinstance(data, StoredDataset)
        assert data.layout["X"]["shards"] == (60, D)
        assert data.layout["X"]["chunks"] == (5, D)
        assert len([p for p in (tmp_path / "a" / "X" / "c").rglob("*") if p.is_file()]) == 4
        assert data.fingerprint

    def test_what_was_never_written_is_missed_at_the_end(self, tmp_path: Path) -> None:
        x, y = features("dense"), sp.csr_array(labels())
        writer = DatasetWriter.create(
            tmp_path / "a", n_rows=N, n_features=D, n_labels=L, nnz_y=y.nnz, chunk_rows=10
        )
        writer.write_rows(0, x[:100], y[:100], first_y=0)
        counts = labels().sum(axis=0)
        with pytest.raises(IncompleteStoreError, match="cannot be completed"):
            writer.finish(k_hat=5, label_counts=counts)
        with pytest.raises(IncompleteStoreError, match="is incomplete"):
            open_dataset(tmp_path / "a")
        writer.write_rows(100, x[100:], y[100:], first_y=int(y.indptr[100]))
        with pytest.raises(DataError, match="that sum to 0 do not fit"):
            writer.finish(k_hat=5, label_counts=np.zeros(L))
        assert writer.finish(k_hat=5, label_counts=counts).n_rows == N

    def test_only_floats_are_features(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="float32 or float64, not int64"):
            DatasetWriter.create(
                tmp_path / "a", n_rows=1, n_features=1, n_labels=1, nnz_y=0, x_dtype=np.int64
            )

    def test_an_empty_sparse_matrix_is_a_matrix(self, tmp_path: Path) -> None:
        x = sp.csr_array((4, 3), dtype=np.float64)
        with pytest.warns(UserWarning, match="2 of 2 labels in Y have no positive row"):
            data = create_dataset(tmp_path / "a", x, np.zeros((4, 2)))
        assert (data.nnz_x, data.nnz_y, data.k_hat) == (0, 0, 0)
        assert data.read_x(1, 3).shape == (2, 3)
        assert data.read_y(1, 3).shape == (2, 2)


BROKEN_ROWS = 60_000


def long_data(kind: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(BROKEN_ROWS, 20)).astype(np.float32)
    if kind == "sparse":
        x *= x > 0
    return stored_form(kind, x), sp.csr_array((rng.random((BROKEN_ROWS, 4)) < 0.2).astype(np.uint8))


def write_slowly(place: str, kind: str) -> None:
    """Write in many small pieces, to be killed meanwhile."""
    with InProcessExecutor(1) as executor:
        data = as_dataset(*long_data(kind), block_bytes=100_000)
        create_dataset(place, data, chunk_bytes=2**16, executor=executor)


@pytest.fixture(scope="session")
def killed_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stores whose writing process was killed after a few pieces."""
    folder = tmp_path_factory.mktemp("killed")
    for kind in ("dense", "sparse"):
        place = folder / kind
        program = f"import test_dataset; test_dataset.write_slowly({str(place)!r}, {kind!r})"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent)
        marks = place / "_progress" / "done"
        while process.poll() is None and (not marks.is_dir() or len(list(marks.iterdir())) < 5):
            time.sleep(0.002)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the writing ended before it could be killed"
    return folder


def test_damage_to_what_a_writer_put_aside_is_told(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"n_rows": 4, "n_features": 3, "n_labels": 3, "nnz_y": 4}
    writer = DatasetWriter.create(tmp_path / "d.zarr", **shape, x_dtype="float64")
    x, y = np.ones((4, 3)), sp.csr_array(np.eye(4, 3, dtype=np.uint8) + np.eye(4, 3, -3, dtype=np.uint8))
    writer.write_rows(0, x[:2], y[:2], first_y=0)
    writer.write_rows(2, x[2:], y[2:], first_y=2)
    aside = tmp_path / "d.zarr" / "_progress" / "fragments" / "X" / "2"
    content = aside.read_bytes()
    aside.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(
        DataError, match=r"X/2 in .*d\.zarr is damaged: begin the store again with --overwrite"
    ):
        writer.finish(k_hat=1, label_counts=[2, 1, 1])
    aside.write_bytes(content)
    np.testing.assert_array_equal(writer.finish(k_hat=1, label_counts=[2, 1, 1]).read_x(0, 4), x)


class TestInterruption:
    """The writing process is really killed."""

    @pytest.fixture
    def broken(self, killed_stores: Path, tmp_path: Path, kind: str) -> Path:
        return Path(shutil.copytree(killed_stores / kind, tmp_path / "broken.zarr"))

    def test_is_refused_with_the_way_out(self, broken: Path) -> None:
        with pytest.raises(IncompleteStoreError, match=f"the store {broken} is incomplete"):
            open_dataset(broken)

    def test_is_resumed_by_the_same_call_without_doing_work_twice(
        self, broken: Path, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        done = DatasetWriter.resume(broken).done()
        assert done
        written: list[str] = []
        write = dswml.dataset._write_piece

        def write_and_count(piece: Any, payload: Any) -> None:
            written.append(f"rows {piece.block.start} to {piece.block.stop}")
            write(piece, payload)

        monkeypatch.setattr(dswml.dataset, "_write_piece", write_and_count)
        data = create_dataset(broken, as_dataset(*long_data(kind), block_bytes=100_000))
        assert len(written) > 1
        assert not done & set(written)
        whole = create_dataset(tmp_path / "whole.zarr", *long_data(kind), chunk_bytes=2**16)
        assert data.fingerprint == whole.fingerprint

    def test_is_resumed_by_a_call_that_cuts_the_rows_otherwise(self, broken: Path, kind: str) -> None:
        data = create_dataset(broken, *long_data(kind))
        np.testing.assert_array_equal(dense(data.read_x(0, BROKEN_ROWS)), dense(long_data(kind)[0]))
        validate(data)

    def test_is_not_resumed_with_other_data(self, broken: Path, kind: str) -> None:
        x, y = long_data(kind)
        x = x * 2
        with pytest.raises(IncompleteStoreError, match="an interrupted write of other data"):
            create_dataset(broken, x, y)
        assert create_dataset(broken, x, y, overwrite=True).n_rows == BROKEN_ROWS

    def test_cannot_be_resumed_once_complete(self, store: Path) -> None:
        with pytest.raises(StoreExistsError, match="is complete: there is nothing to resume"):
            DatasetWriter.resume(store)


def test_worker_processes_write_the_same_store(tmp_path: Path, kind: str, dask_client: Client) -> None:
    executor = DaskExecutor(dask_client)
    rng = np.random.default_rng(2)
    x = features(kind, 40_000)
    y = (rng.random((40_000, L)) < 0.3).astype(np.uint8)
    here = create_dataset(tmp_path / "here.zarr", stored_form(kind, x), y, chunk_bytes=2**15)
    there = create_dataset(
        tmp_path / "there.zarr", stored_form(kind, x), y, chunk_bytes=2**15, executor=executor
    )
    assert there.fingerprint == here.fingerprint
    assert validate(there, executor) == validate(here)


def test_a_data_set_can_be_stored_again_with_other_chunks(store: Path, kind: str, tmp_path: Path) -> None:
    data: Dataset = create_dataset(tmp_path / "copy.zarr", open_dataset(store), chunk_bytes=1000)
    np.testing.assert_array_equal(dense(data.read_x(0, N)), features(kind))
    assert data.label_names == tuple("abcde")
