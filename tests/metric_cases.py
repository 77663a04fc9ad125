"""Small random and degenerate evaluation problems, and the ways to cut them into row blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import scipy.sparse as sp
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dswml.executor import tree_combine
from dswml.sweep import combine

Array = NDArray[Any]
Partial = dict[str, Array]

#: Kernels are compiled inside the first example, so examples have no deadline.
bounded = settings(max_examples=60, deadline=None)

#: Few values, so that ties abound; all of them are exact in float32.
TIED = [-1.5, -0.25, 0.0, 0.25, 0.5, 0.75, 2.0]


@st.composite
def problems(draw: st.DrawFn, min_labels: int = 1) -> tuple[Array, Array, Array]:
    """True labels, predicted labels and scores with ties, of up to 7 rows and 6 labels."""
    shape = draw(st.tuples(st.integers(1, 7), st.integers(min_labels, 6)))
    binary = hnp.arrays(np.int64, shape, elements=st.integers(0, 1))
    if draw(st.booleans()):
        scores = draw(hnp.arrays(np.float64, shape, elements=st.sampled_from(TIED)))
    else:
        scores = draw(hnp.arrays(np.float64, shape, elements=st.floats(-2, 2, width=32)))
    return draw(binary), draw(binary), scores


@st.composite
def rankings(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    """True labels, rankings with places left empty at their end, inverse propensities."""
    y_true, _, _ = draw(problems())
    n_rows, n_labels = y_true.shape
    depth = draw(st.integers(1, 7))
    top = np.full((n_rows, depth), -1)
    for row in top:
        order = draw(st.permutations(range(n_labels)))[:depth]
        length = draw(st.integers(0, len(order)))
        row[:length] = order[:length]
    weights = draw(hnp.arrays(np.float64, n_labels, elements=st.sampled_from([1.0, 1.25, 3.0, 7.5])))
    return y_true, top, weights


def csr(values: Array) -> Any:
    return sp.csr_array(values.astype(np.uint8))


def cuts(n_rows: int) -> st.SearchStrategy[list[int]]:
    """Places to cut rows at; equal ones make empty blocks."""
    return st.lists(st.integers(0, n_rows), max_size=12).map(sorted)


def over_blocks(block: Callable[[slice], Partial], n_rows: int, places: list[int]) -> Partial:
    bounds = [0, *places, n_rows]
    parts = [block(slice(a, b)) for a, b in pairwise(bounds)]
    return tree_combine(parts, combine)


def assert_same_sums(cut: Partial, whole: Partial) -> None:
    """Integers are equal; sums of fractions are equal but for rounding."""
    assert cut.keys() == whole.keys()
    for name, value in whole.items():
        if value.dtype.kind == "i":
            assert value.dtype == np.int64
            assert np.asarray(cut[name]).dtype == np.int64
            np.testing.assert_array_equal(cut[name], value, err_msg=name)
        else:
            np.testing.assert_allclose(cut[name], value, rtol=1e-13, atol=1e-15, err_msg=name)
