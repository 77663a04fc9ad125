"""Row blocks cover the rows once, in whole chunks, within a budget, the same on every machine."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dswml.blocks import DEFAULT_BLOCK_BYTES, MIB, plan_row_blocks
from dswml.errors import UsageError

plans = st.fixed_dictionaries(
    {
        "n_rows": st.integers(1, 5000),
        "chunk_rows": st.integers(1, 6000),
        "bytes_per_row": st.floats(0, 1e6),
        "block_bytes": st.integers(1, 2**27),
    }
)


@given(plans)
def test_blocks_cover_every_row_once_and_in_order(plan: dict[str, float]) -> None:
    blocks = plan_row_blocks(**plan)  # type: ignore[arg-type]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert blocks[0].start == 0
    assert blocks[-1].stop == plan["n_rows"]
    assert all(left.stop == right.start for left, right in itertools.pairwise(blocks))
    assert all(block.n_rows > 0 for block in blocks)


@given(plans)
def test_blocks_are_whole_chunks_and_stay_within_the_budget_unless_one_chunk_does_not(
    plan: dict[str, float],
) -> None:
    for block in plan_row_blocks(**plan):  # type: ignore[arg-type]
        assert block.start % plan["chunk_rows"] == 0
        size = block.n_rows * plan["bytes_per_row"]
        assert size <= plan["block_bytes"] or block.n_rows <= plan["chunk_rows"]


@given(plans)
def test_blocks_are_equal_but_the_last(plan: dict[str, float]) -> None:
    sizes = [block.n_rows for block in plan_row_blocks(**plan)]  # type: ignore[arg-type]
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]


def test_small_data_are_cut_into_up_to_sixteen_blocks_of_at_least_a_mebibyte() -> None:
    assert len(plan_row_blocks(1000, 1, 100, DEFAULT_BLOCK_BYTES)) == 1
    assert len(plan_row_blocks(8 * 1024, 1, 1024, DEFAULT_BLOCK_BYTES)) == 8
    assert len(plan_row_blocks(100 * 1024, 1, 1024, DEFAULT_BLOCK_BYTES)) == 16


def test_large_data_are_cut_by_the_budget() -> None:
    blocks = plan_row_blocks(1_000_000, 4096, 4000, DEFAULT_BLOCK_BYTES)
    assert blocks[0].n_rows == 4 * 4096
    assert blocks[0].n_rows * 4000 <= 64 * MIB


def test_a_chunk_larger_than_the_budget_is_one_block() -> None:
    assert [b.n_rows for b in plan_row_blocks(250, 100, 1000, block_bytes=10)] == [100, 100, 50]


def test_no_rows_are_no_blocks() -> None:
    assert plan_row_blocks(0, 10, 8.0) == ()


@pytest.mark.parametrize("wrong", [{"n_rows": -1}, {"chunk_rows": 0}, {"block_bytes": 0}])
def test_impossible_plans_are_refused_with_their_numbers(wrong: dict[str, int]) -> None:
    plan = {"n_rows": 10, "chunk_rows": 2, "bytes_per_row": 1, "block_bytes": 10, **wrong}
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        plan_row_blocks(**plan)
