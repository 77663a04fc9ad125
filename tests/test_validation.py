"""Bad data are refused with the row, the column and the value; odd data are counted."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dswml.dataset import create_dataset, open_dataset
from dswml.errors import DataError
from dswml.sources import as_dataset
from dswml.validation import binary_rows, check_block, validate


def csr(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
    """A CSR array of just these arrays, which SciPy would partly refuse to make."""
    matrix: Any = sp.csr_array(shape)
    matrix.data, matrix.indices, matrix.indptr = np.array(data), np.array(indices), np.array(indptr)
    return matrix


ONE_LABEL = csr(np.ones(3, np.uint8), [0, 0, 0], [0, 1, 2, 3], (3, 1))
SOUND = ([1.0, 2.0, 3.0], [0, 1, 2], [0, 1, 2, 3])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_feature_that_is_not_finite_is_named(value: float, dtype: Any) -> None:
    x = np.ones((3, 4), dtype)
    x[2, 1] = value
    message = rf"row 102, column 1 of X in s\.zarr is {value}: every feature must be a finite number"
    for matrix in (x, sp.csr_array(x)):
        with pytest.raises(DataError, match=message):
            check_block(matrix, ONE_LABEL, first_row=100, place="s.zarr")


def test_columns_in_any_memory_order_are_checked_alike() -> None:
    x = np.asfortranarray(np.ones((3, 4)))
    x[1, 3] = np.nan
    with pytest.raises(DataError, match="row 1, column 3"):
        check_block(x, ONE_LABEL)


@pytest.mark.parametrize(
    ("data", "indices", "indptr", "message"),
    [
        (*SOUND[:2], [0, 2, 1, 3], r"row starts \(indptr\) of X in s decrease at row 11"),
        (*SOUND[:2], [0, 9, 2, 3], r"row starts \(indptr\) of X in s decrease at row 10"),
        (*SOUND[:2], [1, 1, 2, 3], r"row starts \(indptr\) of X in s run from 1 to 3 over 3 indices"),
        (*SOUND[:2], [0, 1, 2, 2], r"row starts \(indptr\) of X in s run from 0 to 2 over 3 indices"),
        ([1.0, 2.0], [0, 1, 2], [0, 1, 2, 3], "3 indices and 2 values"),
        (SOUND[0], [0, 5, 2], SOUND[2], r"row 11 of X in s has column index 5, outside \[0, 5\)"),
        (SOUND[0], [0, 1, -1], SOUND[2], r"row 12 of X in s has column index -1, outside \[0, 5\)"),
        (SOUND[0], [4, 4, 2], [0, 2, 3, 3], "row 10 of X in s has column index 4 more than once"),
        (SOUND[0], [4, 0, 4], [0, 0, 3, 3], "row 11 of X in s has column index 4 more than once"),
    ],
)
def test_an_unsound_csr_structure_is_named(data: Any, indices: Any, indptr: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_block(csr(data, indices, indptr, (3, 5)), ONE_LABEL, first_row=10, place="s")


def test_columns_of_x_may_come_in_any_order() -> None:
    check_block(csr([1.0, 2.0, 3.0], [4, 0, 2], [0, 3, 3, 3], (3, 5)), ONE_LABEL)


def test_numbers_of_rows_must_agree() -> None:
    with pytest.raises(DataError, match="X has 2 rows and Y has 3 rows in s"):
        check_block(np.ones((2, 2)), ONE_LABEL, place="s")


@pytest.mark.parametrize("value", [2, -1, 0.5, np.nan])
def test_a_label_that_is_neither_0_nor_1_is_named(value: float) -> None:
    y = np.zeros((4, 3))
    y[:, 0] = 1
    y[2, 1] = value
    message = rf"row 7, column 1 of Y in s is {y[2, 1]}: every label must be 0 or 1"
    for labels in (y, sp.csr_array(y), sp.coo_array(y)):
        with pytest.raises(DataError, match=message):
            binary_rows(labels, first_row=5, place="s")


@pytest.mark.parametrize("dtype", [bool, np.int64, np.uint8, np.float32])
def test_labels_of_any_type_become_sorted_ones(dtype: Any) -> None:
    y = np.array([[0, 1, 1], [0, 0, 0], [1, 0, 1]], dtype)
    unsorted = csr(np.ones(4, dtype), [2, 1, 0, 2], [0, 2, 2, 4], (3, 3))
    stored_zeros = csr(np.array([0, 1, 1, 1, 1], dtype), [0, 1, 2, 0, 2], [0, 3, 3, 5], (3, 3))
    for labels in (y, sp.csr_array(y), sp.csc_array(y), unsorted, stored_zeros):
        rows = binary_rows(labels)
        np.testing.assert_array_equal(rows.toarray(), y.astype(np.uint8))
        assert rows.data.tolist() == [1, 1, 1, 1]
        assert rows.indices.tolist() == [1, 2, 0, 2]
        assert rows.dtype == np.uint8


matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 12), st.integers(1, 6)),
    elements=st.sampled_from([0.0, 0.0, 1.0, -2.5, 3e8]),
)


@given(x=matrices, data=st.data())
def test_counts_are_those_of_numpy(x: NDArray[np.float32], data: st.DataObject) -> None:
    y = data.draw(hnp.arrays(np.uint8, (len(x), 4), elements=st.integers(0, 1)))
    for matrix in (x, sp.csr_array(x)):
        facts = check_block(matrix, binary_rows(y))
        assert facts.label_counts.tolist() == y.sum(axis=0).tolist()
        assert facts.k_hat == y.sum(axis=1).max()
        assert facts.nnz_y == (y.sum(),)
        assert facts.rows_without_label == (y.sum(axis=1) == 0).sum()
        assert facts.rows_without_feature == (x == 0).all(axis=1).sum()


@given(x=matrices, data=st.data())
def test_the_content_hash_depends_on_content_alone(x: NDArray[np.float32], data: st.DataObject) -> None:
    y = binary_rows(np.ones((len(x), 2)))
    whole = check_block(x, y).content_x
    cut = data.draw(st.integers(0, len(x)))
    parts = [check_block(x[:cut], y[:cut]), check_block(x[cut:], y[cut:], first_row=cut)]
    assert sum(part.content_x for part in parts) % 2**64 == whole
    assert check_block(sp.csr_array(x), y).content_x == whole
    row, column = data.draw(st.integers(0, len(x) - 1)), data.draw(st.integers(0, x.shape[1] - 1))
    changed = x.copy()
    changed[row, column] += 1
    assert (check_block(changed, y).content_x == whole) == (changed[row, column] == x[row, column])


class TestOfAStore:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Path:
        x = np.eye(6, 4, dtype=np.float32)
        y = np.array([[1, 0, 1], [0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]])
        with pytest.warns(
            UserWarning, match=r"1 of 3 labels in Y have no positive row \(the first is label 1\)"
        ):
            create_dataset(tmp_path / "s.zarr", sp.csr_array(x), y)
        return tmp_path / "s.zarr"

    def change(self, store: Path, name: str, place: Any, value: Any) -> None:
        array = zarr.open_group(str(store), mode="r+")[name]
        assert isinstance(array, zarr.Array)
        array[place] = value

    def test_counts_what_is_odd_and_allowed(self, store: Path) -> None:
        with pytest.warns(UserWarning, match=f"1 of 3 labels in {store} have no positive row"):
            report = validate(open_dataset(store))
        assert report.rows_without_label == 2
        assert report.rows_without_feature == 2
        assert report.labels_without_positive == 1
        assert (report.n_rows, report.n_features, report.n_labels) == (6, 4, 3)
        assert (report.nnz_x, report.nnz_y, report.k_hat) == (4, 5, 2)

    @pytest.mark.parametrize(
        ("name", "place", "value", "message"),
        [
            ("X/data", 1, np.nan, "row 1, column 1 of X in {store} is nan"),
            ("X/indices", 3, 9, r"row 3 of X in {store} has column index 9, outside \[0, 4\)"),
            ("Y/indices", 1, 0, "row 0 of Y in {store} has column index 0 more than once"),
            ("Y/indptr", 2, 1, r"row starts \(indptr\) of Y in {store} decrease at row 1"),
            ("Y/data", 0, 3, "Y/data in {store} holds 3"),
            ("Y/indices", 4, 1, "records 0 rows with label 1, but its data have 1"),
            ("label_counts", 0, 99, "records 99 rows with label 0, but its data have 3"),
        ],
    )
    def test_finds_what_was_changed(
        self, store: Path, name: str, place: int, value: Any, message: str
    ) -> None:
        self.change(store, name, place, value)
        with pytest.raises(DataError, match=message.format(store=store)):
            validate(open_dataset(store))

    def test_finds_a_wrong_record(self, store: Path) -> None:
        zarr.open_group(str(store), mode="r+").attrs["k_hat"] = 3
        with pytest.raises(DataError, match="records k_hat = 3, but its data have 2"):
            validate(open_dataset(store))


def test_arrays_in_memory_are_validated_the_same_way() -> None:
    report = validate(as_dataset(np.eye(3), np.eye(3)))
    assert (report.k_hat, report.rows_without_feature, report.labels_without_positive) == (1, 0, 0)


def test_bad_data_never_become_a_store(tmp_path: Path) -> None:
    x = np.ones((5, 2))
    x[4, 0] = np.inf
    with pytest.raises(DataError, match="row 4, column 0 of X in memory is inf"):
        create_dataset(tmp_path / "bad.zarr", x, np.ones((5, 1)))
    assert not (tmp_path / "bad.zarr").exists()


@pytest.mark.parametrize("array", ["X/data", "X/indptr", "Y/indices"])
@pytest.mark.parametrize("length", [0, False])
def test_chunks_of_no_length_are_damaged_metadata(length: int, array: str, tmp_path: Path) -> None:
    url = tmp_path / "d.zarr"
    create_dataset(url, sp.csr_array(np.eye(3)), np.eye(3, dtype=np.uint8))
    file = url / array / "zarr.json"
    about = json.loads(file.read_text())
    about["chunk_grid"]["configuration"]["chunk_shape"] = [length]
    file.write_text(json.dumps(about))
    with pytest.raises(DataError, match=rf"array {array} in \S+ has damaged metadata \(chunks of \(0,\)"):
        open_dataset(url).read_x(0, 3)


def test_data_in_order_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(as_dataset(np.eye(4), np.eye(4)))
