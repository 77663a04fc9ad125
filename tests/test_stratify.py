"""Stratified folds: every label in every fold alike, whatever the blocks, no held-out row trained on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from dswml import SparseWeightedClassifierCV
from dswml.blocks import RowBlock
from dswml.errors import UsageError
from dswml.executor import InProcessExecutor
from dswml.features import BlockSource
from dswml.folds import Fold, fold_of_rows
from dswml.sources import as_dataset
from dswml.stratify import assign_folds, stratified_folds
from dswml.tuning import tune


def labels_of_power_law(rows: int = 1000, labels: int = 60) -> Any:
    """Labels from a third of the rows down to a handful, some rows without any."""
    rng = np.random.default_rng(5)
    return (rng.random((rows, labels)) < 0.35 / np.arange(1, labels + 1)).astype(np.uint8)


def spread(y: Any, folds: Any, k: int) -> Any:
    """Largest less smallest number of rows of each label in a fold."""
    counts = np.array([y[folds == fold].sum(axis=0) for fold in range(k)])
    return counts.max(axis=0).astype(int) - counts.min(axis=0)


def test_labels_are_spread_better_than_by_hash() -> None:
    y, k = labels_of_power_law(), 5
    folds = assign_folds(sp.csr_array(y), k, seed=1)
    hashed = fold_of_rows(0, len(y), k, seed=1)
    ours, theirs = spread(y, folds, k), spread(y, hashed, k)
    assert ours.sum() < theirs.sum() / 3
    assert np.ptp(np.bincount(folds, minlength=k)) <= np.ptp(np.bincount(hashed, minlength=k))
    rare = y.sum(axis=0) >= k
    assert all((y[folds == fold][:, rare].sum(axis=0) > 0).mean() > 0.95 for fold in range(k))


def test_a_label_alone_is_spread_to_within_one_row() -> None:
    y = np.eye(7, dtype=np.uint8)[np.random.default_rng(0).integers(0, 7, 200)]
    folds = assign_folds(sp.csr_array(y), 4, seed=3)
    assert spread(y, folds, 4).max() <= 1


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_every_row_has_a_fold_and_the_rarest_label_is_spread_evenly(seed: int, k: int) -> None:
    y = (np.random.default_rng(seed).random((40, 6)) < 0.3).astype(np.uint8)
    folds = assign_folds(sp.csr_array(y), k, seed)
    assert folds.dtype == np.uint8
    assert folds.max() < k
    counts = y.sum(axis=0)
    if counts.any():
        rarest = int(np.argmin(np.where(counts > 0, counts, 99)))
        assert spread(y, folds, k)[rarest] <= 1


def test_folds_do_not_depend_on_blocks_and_depend_on_the_seed() -> None:
    y = labels_of_power_law()
    found = []
    for block_bytes in (2**10, 2**14, 2**26):
        data = as_dataset(np.ones((len(y), 3)), y, block_bytes=block_bytes)
        with InProcessExecutor(2) as executor:
            found.append(stratified_folds(BlockSource(data, f"run {block_bytes}"), executor, 5, seed=7))
    assert all((a == b).all() for a, b in pairwise(found))
    assert (found[0] == assign_folds(sp.csr_array(y), 5, seed=7)).all()
    assert (found[0] != assign_folds(sp.csr_array(y), 5, seed=8)).any()


def test_held_out_rows_are_exact_complements() -> None:
    assigned = assign_folds(sp.csr_array(labels_of_power_law()), 3, seed=0)
    block = RowBlock(2, 100, 257)
    folds = [Fold(3, 0, number, assigned) for number in range(3)]
    for fold in folds:
        both = np.concatenate([fold.training_rows(block), fold.held_out_rows(block)])
        assert sorted(both) == list(range(block.n_rows))
    held_out = np.concatenate([fold.held_out_rows(block) for fold in folds])
    assert sorted(held_out) == list(range(block.n_rows))


def test_the_search_scores_the_rows_that_its_folds_hold_out() -> None:
    rng = np.random.default_rng(2)
    X = rng.normal(size=(200, 8))
    Y = (X @ rng.normal(size=(8, 12)) > 2.5).astype(np.uint8)
    with InProcessExecutor(2) as executor:
        data = as_dataset(X, Y, block_bytes=2048)
        tuned = tune(data, executor, radii=[5.0], weights=[0.2], folds=3, seed=4, stratify=True, tol=1e-6)
    assigned = assign_folds(sp.csr_array(Y), 3, seed=4)
    cardinality = [Y[assigned == fold].sum() / (assigned == fold).sum() for fold in range(3)]
    np.testing.assert_allclose(tuned.points[0].scores["label_cardinality"], cardinality)
    clf = SparseWeightedClassifierCV([5.0], weights=[0.2], folds=3, stratify=True, random_state=0).fit(X, Y)
    assert clf.radius_ == 5.0


def test_too_many_folds_are_refused() -> None:
    with InProcessExecutor(1) as executor, pytest.raises(UsageError, match="at most 255; got 300"):
        stratified_folds(BlockSource(as_dataset(np.eye(2), np.eye(2, dtype=int)), "run"), executor, 300, 0)
