"""The generator: A.5 of the paper to the letter, and the same data whoever writes them and however."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dswml.blocks import RowBlock
from dswml.dataset import Dataset, open_dataset
from dswml.errors import DataError, StoreExistsError, UsageError
from dswml.executor import InProcessExecutor
from dswml.streams import GROUP_ROWS
from dswml.synth import synthesize
from dswml.synth_extreme import ExtremeRows
from dswml.synth_paper import PaperRows

Array = NDArray[Any]

PAPER: dict[str, Any] = {"rows": 2500, "features": 5, "labels": 30, "sparsity": 7, "seed": 3}
EXTREME: dict[str, Any] = {
    "rows": 2500,
    "features": 4000,
    "labels": 900,
    "sparsity": 3,
    "features_per_row": 15,
    "kind": "extreme",
    "seed": 3,
}
KINDS = pytest.mark.parametrize("parameters", [PAPER, EXTREME], ids=["paper", "extreme"])


def contents(data: Dataset) -> tuple[Array, Array]:
    x = data.read_x(0, data.n_rows)
    return (x if isinstance(x, np.ndarray) else x.toarray()), data.read_y(0, data.n_rows).toarray()


def assert_same(first: Dataset, second: Dataset) -> None:
    for one, other in zip(contents(first), contents(second), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first.label_counts, second.label_counts)
    assert (first.nnz_x, first.nnz_y, first.k_hat) == (second.nnz_x, second.nnz_y, second.k_hat)


def recovered_coefficients(rows: PaperRows) -> Array:
    """B of A.5, from the module itself: the one thing that the output does not show."""
    from dswml.synth_paper import _signs

    return 2.0 * _signs(rows.seed, rows.n_labels, rows.n_features)


@pytest.mark.parametrize("sparsity", [1, 2, 7, 30])
def test_labels_follow_the_rule_of_the_paper(sparsity: int) -> None:
    rows = PaperRows(n_features=4, n_labels=30, sparsity=sparsity, seed=11)
    coefficients = recovered_coefficients(rows)
    x, y = rows.group(0)
    for x_row, y_row in zip(x.astype(np.float64), y.toarray(), strict=True):
        order = np.argsort(-(coefficients @ x_row), kind="stable")
        assert y_row[order[: sparsity // 2]].all()
        assert not y_row[order[sparsity:]].any()


def test_labels_between_certain_and_impossible_are_drawn_with_the_sigmoid_of_their_score() -> None:
    rows = PaperRows(n_features=1, n_labels=4, sparsity=4, seed=5)
    z_all, y_all = [], []
    for group in range(40):
        x, y = rows.group(group)
        z = np.sort(x.astype(np.float64) @ recovered_coefficients(rows).T, axis=1)[:, :2]
        order = np.argsort(-(x.astype(np.float64) @ recovered_coefficients(rows).T), axis=1, kind="stable")
        uncertain = np.take_along_axis(y.toarray(), order[:, 2:], axis=1)
        z_all.append(z[:, ::-1].ravel())
        y_all.append(uncertain.ravel())
    z, drawn = np.concatenate(z_all), np.concatenate(y_all)
    for low in np.arange(-2.0, 2.0, 0.5):
        inside = (z >= low) & (z < low + 0.5)
        if inside.sum() < 500:
            continue
        expected = np.mean(1 / (1 + np.exp(-z[inside])))
        assert abs(drawn[inside].mean() - expected) < 4 * np.sqrt(0.25 / inside.sum())


def test_features_are_uniform_and_coefficients_are_fair() -> None:
    rows = PaperRows(n_features=50, n_labels=200, sparsity=4, seed=2)
    x, _ = rows.group(3)
    assert x.min() >= -1
    assert x.max() <= 1
    counts, _ = np.histogram(x, bins=20, range=(-1, 1))
    expected = x.size / 20
    assert np.sum((counts - expected) ** 2 / expected) < 50  # chi-squared of 19 degrees: below 50 but 1e-4
    coefficients = recovered_coefficients(rows)
    assert set(np.unique(coefficients)) == {-2.0, 2.0}
    assert abs(coefficients.mean()) < 4 * 2 / np.sqrt(coefficients.size)


def test_many_labels_are_worked_through_in_tiles_without_changing_the_choice() -> None:
    rows = PaperRows(n_features=3, n_labels=9000, sparsity=6, seed=1)
    x, y = rows.group(0)
    z = x[:50].astype(np.float64) @ recovered_coefficients(rows).T
    for i in range(50):
        best = np.argsort(-z[i], kind="stable")
        active = set(y[[i]].indices.tolist())
        assert set(best[:3].tolist()) <= active <= set(best[:6].tolist())


@KINDS
def test_chunks_do_not_change_the_data(tmp_path: Path, parameters: dict[str, Any]) -> None:
    plain = synthesize(tmp_path / "plain.zarr", **parameters)
    for chunk_rows in (1, 700, 1024, 5000):
        other = synthesize(
            tmp_path / f"{chunk_rows}.zarr", **{**parameters, "chunk_rows": max(chunk_rows, 100)}
        )
        assert_same(plain, other)


@KINDS
def test_size_of_the_tasks_does_not_change_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    plain = synthesize(tmp_path / "plain.zarr", **parameters)
    monkeypatch.setattr("dswml.synth._PIECE_BYTES", 1)
    pieces: list[tuple[str, int, int]] = []
    small = synthesize(
        tmp_path / "small.zarr", **parameters, on_progress=lambda *report: pieces.append(report)
    )
    assert ("writing", 3, 3) in pieces
    assert_same(plain, small)


@KINDS
def test_number_of_threads_does_not_change_the_data(tmp_path: Path, parameters: dict[str, Any]) -> None:
    stores = []
    for threads in (1, 3):
        with InProcessExecutor(threads) as executor:
            stores.append(synthesize(tmp_path / f"{threads}.zarr", **parameters, executor=executor))
    assert_same(*stores)


@KINDS
def test_more_rows_only_add_rows(tmp_path: Path, parameters: dict[str, Any]) -> None:
    long = contents(synthesize(tmp_path / "long.zarr", **parameters))
    short = contents(synthesize(tmp_path / "short.zarr", **{**parameters, "rows": 1100}))
    for one, other in zip(long, short, strict=True):
        np.testing.assert_array_equal(one[:1100], other)


@KINDS
def test_another_seed_gives_other_data(tmp_path: Path, parameters: dict[str, Any]) -> None:
    first = contents(synthesize(tmp_path / "a.zarr", **parameters))
    second = contents(synthesize(tmp_path / "b.zarr", **{**parameters, "seed": 4}))
    assert not np.array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])


def test_groups_of_rows_are_not_repeated() -> None:
    rows = PaperRows(n_features=5, n_labels=10, sparsity=2, seed=0)
    assert not np.array_equal(rows.group(0)[0], rows.group(1)[0])


@KINDS
def test_counts_of_the_store_are_those_of_its_contents(tmp_path: Path, parameters: dict[str, Any]) -> None:
    data = synthesize(tmp_path / "a.zarr", **parameters)
    x, y = contents(data)
    assert x.shape == (parameters["rows"], parameters["features"])
    assert data.nnz_y == y.sum()
    assert data.k_hat == y.sum(axis=1).max()
    np.testing.assert_array_equal(data.label_counts, y.sum(axis=0))
    assert data.attrs["source"]["seed"] == 3


def test_double_precision_holds_the_same_numbers(tmp_path: Path) -> None:
    single = synthesize(tmp_path / "single.zarr", **PAPER)
    double = synthesize(tmp_path / "double.zarr", **PAPER, dtype="float64")
    assert double.x_dtype == np.float64
    np.testing.assert_array_equal(contents(single)[0], contents(double)[0])
    np.testing.assert_array_equal(contents(single)[1], contents(double)[1])


def test_extreme_rows_have_distinct_sorted_features_with_positive_values() -> None:
    x, y = ExtremeRows(400, 300, features_per_row=40, labels_per_row=4, seed=0).group(1)
    for matrix in (x, y):
        for row in range(GROUP_ROWS):
            indices = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]
            assert (np.diff(indices) > 0).all()
    assert x.data.min() > 0
    assert abs(np.diff(x.indptr).mean() - 40) < 2
    assert abs(np.diff(y.indptr).mean() - 4) < 0.3


def test_rows_nearly_as_long_as_there_are_features_and_labels_are_filled() -> None:
    x, y = ExtremeRows(30, 6, features_per_row=20, labels_per_row=4, seed=0).group(0)
    assert x.has_canonical_format
    assert np.diff(x.indptr).max() == 30
    assert np.diff(y.indptr).max() == 6


def test_unit_rows_have_unit_norm_and_say_so(tmp_path: Path) -> None:
    data = synthesize(tmp_path / "unit.zarr", **EXTREME, normalize="l2")
    assert data.normalize == "l2"
    np.testing.assert_allclose(np.linalg.norm(contents(data)[0], axis=1), 1, rtol=1e-6)
    plain = synthesize(tmp_path / "plain.zarr", **EXTREME)
    np.testing.assert_array_equal(contents(data)[1], contents(plain)[1])


def power_law_exponent(counts: Array) -> float:
    """Slope of log frequency against log rank over the well-observed ranks."""
    falling = np.sort(counts)[::-1]
    ranks = np.arange(10, np.count_nonzero(falling > 30))
    return float(np.polyfit(np.log(ranks + 1), np.log(falling[ranks]), 1)[0])


def test_features_and_labels_have_power_law_frequencies() -> None:
    rows = ExtremeRows(50_000, 40_000, features_per_row=20, labels_per_row=5, seed=0)
    groups = [rows.group(group) for group in range(20)]
    features = np.bincount(np.concatenate([x.indices for x, _ in groups]), minlength=50_000)
    labels = np.bincount(np.concatenate([y.indices for _, y in groups]), minlength=40_000)
    assert -1.3 < power_law_exponent(features) < -0.7
    assert -1.3 < power_law_exponent(labels) < -0.5


def test_labels_can_be_learnt_from_the_features() -> None:
    """Ridge regression of half of the rows ranks a true label first far more often than frequency does."""
    rows = ExtremeRows(500, 1200, features_per_row=20, labels_per_row=3, seed=0)
    groups = [rows.group(group) for group in range(8)]
    x = np.concatenate([x.toarray() for x, _ in groups]).astype(np.float64)
    y = np.concatenate([y.toarray() for _, y in groups]).astype(np.float64)
    half = len(x) // 2
    weights = np.linalg.solve(x[:half].T @ x[:half] + 30 * np.eye(500), x[:half].T @ y[:half])
    best = np.argmax(x[half:] @ weights, axis=1)
    learnt = y[half:][np.arange(half), best].mean()
    frequent = y[half:, np.argmax(y[:half].sum(axis=0))].mean()
    assert learnt > 2 * frequent


def test_an_existing_store_is_kept_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "a.zarr"
    synthesize(place, **PAPER)
    with pytest.raises(StoreExistsError, match="overwrite"):
        synthesize(place, **{**PAPER, "rows": 50})
    assert open_dataset(place).n_rows == 2500
    synthesize(place, **{**PAPER, "rows": 50}, overwrite=True)
    assert open_dataset(place).n_rows == 50


class Interrupted(Exception):
    pass


@KINDS
def test_an_interrupted_store_is_refused_and_taken_up_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    monkeypatch.setattr("dswml.synth._PIECE_BYTES", 1)
    place = tmp_path / "a.zarr"

    def stop_after_the_first_piece(phase: str, done: int, total: int) -> None:
        if phase == "writing" and done == 1:
            raise Interrupted

    with InProcessExecutor(1) as executor, pytest.raises(Interrupted):
        synthesize(place, **parameters, executor=executor, on_progress=stop_after_the_first_piece)
    with pytest.raises(DataError, match="incomplete"):
        open_dataset(place)
    with pytest.raises(StoreExistsError):
        synthesize(place, **{**parameters, "seed": 9})

    reports: list[tuple[str, int, int]] = []
    resumed = synthesize(place, **parameters, on_progress=lambda *report: reports.append(report))
    assert ("writing", 2, 2) in reports
    assert_same(resumed, synthesize(tmp_path / "whole.zarr", **parameters))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": 0}, "0 rows"),
        ({"sparsity": 31}, "sparsity is 31"),
        ({"sparsity": 0}, "sparsity is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"kind": "easy"}, "kind is 'easy'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"normalize": "l2"}, "the paper does not scale X"),
        ({"kind": "extreme", "features_per_row": 4}, "up to 6, but there are 5"),
        ({"features": 2**20, "labels": 2**20}, "too many coefficients"),
    ],
)
def test_impossible_parameters_are_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        synthesize(tmp_path / "a.zarr", **{**PAPER, **change})
    assert not os.listdir(tmp_path)


def test_a_piece_may_end_inside_a_group() -> None:
    from dswml.synth import _draw

    rows = PaperRows(n_features=3, n_labels=8, sparsity=2, seed=0)
    x, y = _draw(rows, RowBlock(0, GROUP_ROWS, GROUP_ROWS + 10))
    assert x.shape == (10, 3)
    assert y.shape == (10, 8)
    np.testing.assert_array_equal(x, rows.group(1)[0][:10])
