"""Chunks of all arrays stand for about the same rows, and never become too many files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dswml.errors import UsageError
from dswml.layout import CSR_CHUNK_BYTES, DENSE_CHUNK_BYTES, MAX_FILES, plan_layout


@given(
    n_rows=st.integers(1, 10**9),
    n_features=st.integers(1, 10**7),
    density=st.none() | st.floats(0, 0.001),
    labels_per_row=st.floats(0, 100),
)
def test_no_array_has_more_files_than_allowed(
    n_rows: int, n_features: int, density: float | None, labels_per_row: float
) -> None:
    nnz_x = None if density is None else int(n_rows * n_features * density)
    layout = plan_layout(n_rows, n_features, nnz_x, int(n_rows * labels_per_row), 4)
    for array in (layout.rows, layout.indptr, layout.x, layout.y):
        assert array.length <= (MAX_FILES + 1) * array.unit
        assert array.unit % array.chunk == 0
        assert 1 <= array.chunk <= max(1, array.length)


def test_a_dense_chunk_has_the_size_that_was_measured_to_read_fast() -> None:
    layout = plan_layout(1_000_000, 1000, None, 10_000_000, 4)
    assert 0.99 * DENSE_CHUNK_BYTES < layout.rows.chunk * 4000 <= DENSE_CHUNK_BYTES
    assert layout.rows.shard is None
    assert layout.x == layout.rows


def test_chunks_of_sparse_arrays_stand_for_the_same_rows() -> None:
    n_rows, nnz_x, nnz_y = 1_000_000, 100_000_000, 5_000_000
    layout = plan_layout(n_rows, 50_000, nnz_x, nnz_y, 4)
    assert layout.x.chunk * 8 <= CSR_CHUNK_BYTES
    assert layout.x.chunk / (nnz_x / n_rows) == pytest.approx(layout.rows.chunk, rel=0.01)
    assert layout.y.chunk / (nnz_y / n_rows) == pytest.approx(layout.rows.chunk, rel=0.01)


def test_chunks_of_very_large_data_grow_and_are_then_gathered_into_shards() -> None:
    large = plan_layout(100_000_000, 1000, None, 0, 4).rows
    assert large.shard is None
    assert 2 * DENSE_CHUNK_BYTES < large.chunk * 4000 <= 4 * DENSE_CHUNK_BYTES
    larger = plan_layout(1_000_000_000, 1000, None, 0, 4).rows
    assert larger.shard == 6 * larger.chunk
    assert larger.chunk * 4000 <= 4 * DENSE_CHUNK_BYTES


def test_rows_or_bytes_of_a_chunk_can_be_asked_for() -> None:
    assert plan_layout(1000, 10, None, 50, 4, chunk_rows=7).rows.chunk == 7
    assert plan_layout(1000, 10, None, 50, 4, chunk_bytes=400).rows.chunk == 10
    assert plan_layout(1000, 10, None, 50, 4, chunk_rows=10**9).rows.chunk == 1000


def test_empty_shapes_and_impossible_chunks_are_refused() -> None:
    with pytest.raises(UsageError, match="0 x 5"):
        plan_layout(0, 5, None, 0, 4)
    with pytest.raises(UsageError, match="chunk_rows must be at least 1, not 0"):
        plan_layout(5, 5, None, 0, 4, chunk_rows=0)
