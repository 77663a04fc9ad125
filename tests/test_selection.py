"""The k best and the labels over a threshold are the same whatever the tiles, ties by label index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import TIED, Array, bounded, problems

from dswml import selection
from dswml.errors import DataError, UsageError
from dswml.selection import empty_top_k, labels_of_top_k, merge_top_k, select_at_threshold, top_k

DTYPES = st.sampled_from([np.float32, np.float64])


@pytest.fixture(scope="module", params=["one by one", "sorted"], autouse=True)
def merging(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to merge a tile."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sorted":
            patch.setattr(selection, "SORTED", 1)
        yield


@given(problems(), st.integers(1, 8), DTYPES, st.data())
@bounded
def test_the_k_best_do_not_depend_on_the_tiles_or_their_order(
    problem: tuple[Array, Array, Array], k: int, dtype: Any, data: st.DataObject
) -> None:
    scores = problem[2].astype(dtype)
    n_rows, n_labels = scores.shape
    order = np.stack([np.lexsort((np.arange(n_labels), -row)) for row in scores])[:, :k]
    labels, best = empty_top_k(n_rows, k, dtype)
    bounds = sorted({0, n_labels, *data.draw(st.lists(st.integers(0, n_labels), max_size=4))})
    tiles = list(pairwise(bounds))
    for first, stop in data.draw(st.permutations(tiles)):
        merge_top_k(labels, best, scores[:, first:stop], first)
    taken = order.shape[1]
    np.testing.assert_array_equal(labels[:, :taken], order)
    np.testing.assert_array_equal(best[:, :taken], np.take_along_axis(scores, order, axis=1))
    assert (labels[:, taken:] == -1).all()
    assert (best[:, taken:] == -np.inf).all()
    np.testing.assert_array_equal(top_k(scores, k)[0], labels)


def test_infinite_scores_have_their_place() -> None:
    labels, scores = top_k(np.array([[-np.inf, np.inf, 0.0, -np.inf]]), 4)
    assert labels.tolist() == [[1, 2, 0, 3]]
    assert scores.tolist() == [[np.inf, 0.0, -np.inf, -np.inf]]


@given(problems(), st.integers(1, 8))
@bounded
def test_the_labels_of_a_ranking_are_the_ranked_ones(problem: tuple[Array, Array, Array], k: int) -> None:
    scores = problem[2]
    labels, _ = top_k(scores, k)
    rows = labels_of_top_k(labels, scores.shape[1])
    assert rows.has_sorted_indices
    assert rows.dtype == np.uint8
    for row, ranked in zip(rows.toarray(), labels, strict=True):
        assert set(np.flatnonzero(row)) == set(ranked[ranked >= 0])


@given(problems(), DTYPES, st.data())
@bounded
def test_labels_over_one_or_many_thresholds_are_the_dense_ones(
    problem: tuple[Array, Array, Array], dtype: Any, data: st.DataObject
) -> None:
    scores = np.asarray(problem[2].astype(dtype), order=data.draw(st.sampled_from("CF")))
    n_labels = scores.shape[1]
    values = st.sampled_from([*TIED, 0.1, np.inf, -np.inf])
    per_label = np.array(data.draw(st.lists(values, min_size=n_labels, max_size=n_labels)))
    for threshold in (data.draw(values), per_label):
        expected = scores.astype(np.float64) >= threshold
        found = select_at_threshold(scores, threshold)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found.toarray(), expected)
        kept = select_at_threshold(scores, threshold, keep_scores=True)
        assert kept.dtype == dtype
        assert kept.nnz == expected.sum()
        np.testing.assert_array_equal(kept.data, scores[expected])
    cut = n_labels // 2
    tiles = [select_at_threshold(scores[:, :cut], per_label[:cut])] if cut else []
    tiles.append(select_at_threshold(scores[:, cut:], per_label[cut:]))
    np.testing.assert_array_equal(sp.hstack(tiles, format="csr").toarray(), expected)


def test_a_float32_score_meets_the_threshold_as_the_number_it_is() -> None:
    score = np.array([[0.1]], dtype=np.float32)
    assert float(score[0, 0]) > 0.1
    assert select_at_threshold(score, 0.1).nnz == 1
    assert select_at_threshold(score, float(np.nextafter(score[0, 0], np.float32(1)))).nnz == 0


@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_nan_is_refused_with_its_row_and_label(place: tuple[int, int]) -> None:
    tile = np.zeros((2, 3))
    tile[place] = np.nan
    labels, scores = empty_top_k(2, 1)
    with pytest.raises(DataError, match=f"row {place[0]} of the block, label {place[1] + 10}, is NaN"):
        merge_top_k(labels, scores, tile, 10)
    with pytest.raises(DataError, match=f"row {place[0]} of the block, label {place[1]}, is NaN"):
        select_at_threshold(tile, 0.5)
    with pytest.raises(UsageError, match="threshold is NaN"):
        select_at_threshold(tile, np.nan)


def test_what_does_not_fit_together_is_refused_with_the_values() -> None:
    labels, scores = empty_top_k(2, 3)
    with pytest.raises(UsageError, match="k is 0"):
        empty_top_k(2, 0)
    with pytest.raises(UsageError, match=r"tile \(4, 5\)"):
        merge_top_k(labels, scores, np.zeros((4, 5)))
    with pytest.raises(UsageError, match="tile is float32 and the best scores are float64"):
        merge_top_k(labels, scores, np.zeros((2, 5), dtype=np.float32))
    with pytest.raises(UsageError, match=r"shape \(2,\), but the tile has 3 labels"):
        select_at_threshold(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(UsageError, match=r"shape \(3,\): give a matrix"):
        top_k(np.zeros(3), 1)
    with pytest.raises(DataError, match="label 5, but there are 4 labels"):
        labels_of_top_k(np.array([[5]]), 4)
