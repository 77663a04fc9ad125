"""The sparse loops do what the dense products say, in every type, and the same way each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dswml import features, kernels

Array = NDArray[Any]

in_both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)


def tolerance(dtype: Any) -> float:
    return 1e-5 if dtype == np.float32 else 1e-13


def sparse(seed: int, shape: tuple[int, int], dtype: Any = np.float64, density: float = 0.3) -> Any:
    """A CSR matrix with empty rows and columns."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=shape) * (rng.random(shape) < density)
    dense[::4] = 0
    return sp.csr_array(dense.astype(dtype))


def rows_of(a: Any, first: int = 0) -> tuple[Any, Any, Any, Any]:
    """Where the rows of a matrix from the first on start and end, and all entries."""
    return a.indptr[first:-1], a.indptr[first + 1 :], a.indices, a.data


def normal(seed: int, *shape: int, dtype: Any = np.float64) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@in_both_types
def test_scores_are_taken_at_the_active_entries_alone(dtype: Any) -> None:
    y, z, mt = sparse(0, (13, 7)), normal(1, 13, 5, dtype=dtype), normal(2, 7, 3)
    scores = np.zeros(y.nnz)
    kernels.active_scores(y.indptr, y.indices, z, mt, scores)
    rows, labels = y.nonzero()
    np.testing.assert_allclose(scores, (z[:, :3] @ mt.T)[rows, labels], atol=tolerance(dtype))


@in_both_types
def test_products_with_a_sparse_block(dtype: Any) -> None:
    a = sparse(0, (13, 7), dtype)
    right, left = normal(1, 7, 4, dtype=dtype), normal(2, 13, 4)
    times = np.full((13, 4), np.nan, dtype=dtype)
    kernels.csr_times_dense(*rows_of(a), right, times)
    np.testing.assert_allclose(times, a.toarray() @ right, atol=tolerance(dtype))
    transposed = np.ones((7, 4))  # the sums are added to what is there
    kernels.csr_transpose_times_dense(*rows_of(a), left, transposed)
    np.testing.assert_allclose(transposed, 1 + a.toarray().T @ left, atol=tolerance(dtype))


@in_both_types
def test_some_rows_of_a_sparse_block_are_multiplied_where_they_are(dtype: Any) -> None:
    a, labels, rows = sparse(0, (13, 7), dtype), sparse(1, (4, 5)), np.array([11, 1, 12, 4])
    some = features.Features(a, np.dtype(dtype)).subset(rows)
    dense, left, right = a.toarray()[rows].astype(float), normal(2, 4, 3), normal(3, 7, 3, dtype=dtype)
    assert (some.n_rows, some.n_features) == (4, 7)
    for found, expected in (
        (some.times(right), dense @ right),
        (some.transpose_times(left), dense.T @ left),
        (some.transpose_times(left[:2], start=1), dense[1:3].T @ left[:2]),
        (some.square(), dense.T @ dense),
        (some.transpose_times_labels(labels, labels.data)[0], labels.toarray().T @ dense),
        (some.subset(np.array([2, 0])).times(right), dense[[2, 0]] @ right),
    ):
        np.testing.assert_allclose(found, expected, atol=tolerance(dtype))


@in_both_types
def test_some_rows_are_those_rows(dtype: Any) -> None:
    a = sparse(0, (13, 7), dtype)
    for rows in (np.array([1, 4, 11, 12]), np.arange(13), np.zeros(0, dtype=np.int64)):
        some = features.some_rows(a, rows)
        assert (some.dtype, some.indices.dtype) == (a.dtype, a.indices.dtype)
        np.testing.assert_array_equal(some.toarray(), a.toarray()[rows])


@in_both_types
def test_features_times_labels(dtype: Any) -> None:
    x, e = sparse(0, (13, 7), dtype), sparse(1, (13, 5))
    expected = (x.toarray().T @ e.toarray()).T
    both = np.zeros((2, 5, 7))
    values = np.stack([e.data, -2 * e.data])
    kernels.csr_transpose_times_labels(*rows_of(x), e.indptr, e.indices, values, both)
    np.testing.assert_allclose(both[0], expected, atol=tolerance(dtype))
    np.testing.assert_allclose(both[1], -2 * expected, atol=2 * tolerance(dtype))
    out = np.zeros((5, 7))
    kernels.dense_transpose_times_labels(x.toarray(), e.indptr, e.indices, e.data, out)
    np.testing.assert_allclose(out, expected, atol=tolerance(dtype))


@in_both_types
def test_features_times_themselves(dtype: Any) -> None:
    side = 2 * kernels.TILE + 3
    x = sparse(0, (40, side), dtype)
    out = np.zeros((side, side))
    kernels.csr_square(*rows_of(x, 5), out)
    dense = x.toarray()[5:].astype(np.float64)
    np.testing.assert_allclose(out, dense.T @ dense, atol=tolerance(dtype))
    np.testing.assert_array_equal(out, out.T)


@in_both_types
def test_gram_matrices_of_chosen_labels(dtype: Any) -> None:
    y, z = sparse(0, (13, 4)), normal(1, 13, 8, dtype=dtype)
    place = np.array([1, -1, 0, -1])
    rank, width = 6, 2  # the buffer has more columns than are in use
    out = np.zeros((2, rank, width))
    kernels.add_label_grams(y.indptr, y.indices, place, z, rank, width, out)
    for label in (0, 2):
        active = z[y.toarray()[:, label] != 0, :rank].astype(np.float64)
        np.testing.assert_allclose(out[place[label]], active.T @ active[:, 4:], atol=tolerance(dtype))


def test_labels_are_multiplied_with_their_gram_matrix_or_their_rows() -> None:
    z, mt = normal(0, 9, 4), normal(1, 5, 4)
    active = [[0, 3, 4], [], [1], [2, 3, 5, 8], [7]]
    indptr, rows = np.cumsum([0, *map(len, active)]), np.concatenate(active).astype(np.int64)
    grams = np.array([z[np.array(a, dtype=int)].T @ z[np.array(a, dtype=int)] for a in active])
    expected = np.einsum("lab,lb->la", grams, mt)
    place = np.array([0, -1, -1, 1, -1])
    out = np.full((5, 4), np.nan)
    for first, stop in ((0, 2), (2, 5)):
        kernels.add_gram_products(grams[[0, 3]], place, first, stop, mt, out)
        kernels.add_row_products(indptr, rows, place, first, stop, z, mt, out)
    np.testing.assert_allclose(out, expected, atol=1e-13)


@in_both_types
def test_norms_of_rows(dtype: Any) -> None:
    a = sparse(0, (13, 7), dtype)
    out = np.full(13, np.nan)
    kernels.row_norms(a.indptr, a.data, out)
    np.testing.assert_allclose(out, np.linalg.norm(a.toarray().astype(np.float64), axis=1), rtol=1e-14)


def test_norms_of_large_single_precision_values_do_not_overflow() -> None:
    out = np.empty(1)
    kernels.row_norms(np.array([0, 2]), np.array([3e30, 4e30], dtype=np.float32), out)
    np.testing.assert_allclose(out, [5e30], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 6), st.integers(0, 70))
def test_products_agree_for_all_shapes_and_repeat_to_the_bit(seed: int, n: int, d: int, width: int) -> None:
    a, right = sparse(seed, (n, d), density=0.7), normal(seed, d, width)
    first, second = np.empty((n, width)), np.empty((n, width))
    kernels.csr_times_dense(*rows_of(a), right, first)
    kernels.csr_times_dense(*rows_of(a), right.copy(), second)
    np.testing.assert_allclose(first, a.toarray() @ right, atol=1e-12)
    assert first.tobytes() == second.tobytes()


def test_a_gradient_step_what_it_met_and_a_share_of_it() -> None:
    x, g, x_new, g_new = (normal(seed, 9, 5) for seed in range(4))
    ahead, left = np.full(x.shape, np.nan), np.full(x.shape, np.nan)
    kernels.gradient_step(x, g, 3.0, ahead)
    np.testing.assert_allclose(ahead, x - g / 3.0, atol=1e-13)
    found = kernels.step_sums(x, g, x_new, g_new, 3.0, left)
    moved, turned = x_new - x, g_new - g
    wanted = [np.vdot(*pair) for pair in ((g, moved), (moved, moved), (moved, turned), (turned, turned))]
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    np.testing.assert_allclose(left, turned - 3.0 * moved, atol=1e-13)
    kernels.blend(x, 0.3, x_new)
    np.testing.assert_allclose(x_new, x + 0.3 * moved, atol=1e-13)


def test_a_step_of_the_splitting_and_its_sums() -> None:
    turned, z, taken = (normal(seed, 9, 5) for seed in range(3))
    values = normal(3, 5) ** 2
    free, ahead, sums = np.full(z.shape, np.nan), np.full(z.shape, np.nan), np.ones((3, 5))
    kernels.splitting_step(turned, z, taken, values, 0.7, 1.5, free, ahead)
    np.testing.assert_allclose(free, (turned + 0.7 * (z - taken)) / (values + 0.7), atol=1e-13)
    np.testing.assert_allclose(ahead, 1.5 * free - 0.5 * z + taken, atol=1e-13)
    kernels.splitting_sums(turned, z, taken, values, 0.7, sums)
    slope = z * values - turned
    wanted = [(z * slope).sum(axis=0), (z * turned).sum(axis=0), ((slope + 0.7 * taken) ** 2).sum(axis=0)]
    np.testing.assert_allclose(sums - 1, wanted, atol=1e-12)
