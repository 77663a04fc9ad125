"""One read of the data gives the sums of the dense formulas, however rows are cut and whatever is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from training_cases import a_problem, even_cuts, gradient, objective, planted

from dswml import features, sweep
from dswml.cache import BlockCache, process_cache
from dswml.errors import DataError
from dswml.features import prepare
from dswml.problem import Problem
from dswml.sweep import Partial

pytestmark = pytest.mark.usefixtures("calm_blas")

Array = NDArray[Any]

N, D, L = 41, 9, 7
P0 = 0.2


def data(seed: int = 0) -> tuple[Array, Array]:
    x, y = planted(N, D, L, seed)
    x = np.where(np.abs(x) > 0.6, x, 0.0)
    x[5] = 0
    return x, y


def prepared(x: Array, normalize: str | None, intercept: float) -> Array:
    """What the rows must be like before they are multiplied."""
    if normalize:
        norms = np.sqrt((x**2).sum(axis=1, keepdims=True))
        x = np.divide(x, norms, out=np.zeros_like(x), where=norms > 0)
    return np.hstack([x, np.full((len(x), 1), intercept)]) if intercept else x


def grow_and_ask(problem: Problem, alphas: tuple[float, ...] = ()) -> tuple[Array, Array, Partial]:
    """Grow the basis twice, then ask for everything at once; return M^T, a direction and the sums."""
    rng = np.random.default_rng(1)
    problem.append(rng.normal(size=(problem.n_features, 3)))
    problem.sweep(np.zeros((L, 0)))
    problem.append(rng.normal(size=(problem.n_features, 2)))
    mt, direction = 0.3 * rng.normal(size=(L, 3)), rng.normal(size=(L, 5))
    sums = problem.sweep(
        mt,
        assemble=True,
        right=rng.normal(size=(L, 4)),
        left=rng.normal(size=(problem.n_features, 4)),
        direction=direction,
        alphas=alphas,
    )
    return mt, direction, sums


@pytest.mark.parametrize("loss", ["square", "exponential"])
@pytest.mark.parametrize(("normalize", "intercept"), [(None, 0.0), ("l2", 0.3), (None, 1.0)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", ["dense", "csr"])
def test_the_sums_are_those_of_the_dense_formulas(
    form: str, dtype: str, normalize: str | None, intercept: float, loss: str
) -> None:
    x, y = data()
    given = x.astype(dtype)
    full = prepared(given.astype(np.float64), normalize, intercept)
    alphas = (0.0, 0.4, 1.0)
    with a_problem(
        sp.csr_array(given) if form == "csr" else given,
        y,
        p0=P0,
        loss=loss,
        cuts=(11, 12, 30),
        dtype=dtype,
        normalize=normalize,
        intercept=intercept,
    ) as problem:
        mt, direction, sums = grow_and_ask(problem, alphas)
        u = problem.basis
        rng = np.random.default_rng(1)
        rng.normal(size=(problem.n_features, 3)), rng.normal(size=(problem.n_features, 2))
        rng.normal(size=(L, 3)), rng.normal(size=(L, 5))
        right, left = rng.normal(size=(L, 4)), rng.normal(size=(problem.n_features, 4))
        w, towards = u[:, :3] @ mt.T, u @ direction.T
        g = gradient(full, y, w, P0, loss)

        tolerance = 1e-4 if dtype == "float32" else 1e-11

        def close(actual: Any, expected: Any) -> None:
            np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)

        close(u.T @ u, np.eye(5))
        close(problem.value_and_slope(mt, sums), [objective(full, y, w, P0, loss), np.vdot(w, g)])
        close(problem.gradient(mt, sums["gradient"]), g.T)
        close(problem.gradient_times(mt, right, sums["right"]), g @ right)
        close(problem.gradient_transpose_times(mt, left, sums["left"]), g.T @ left)
        close(problem.moment, full.T @ full @ u)
        close(problem.gram(5), u.T @ full.T @ full @ u)
        if loss == "square":
            close(sums["curvature"], ((full @ towards) ** 2)[y == 1].sum())
        else:
            close(sums["curve"] / N, [objective(full, y, w + a * towards, P0, loss) for a in alphas])


def all_sums(x: Any, y: Array, cuts: Sequence[int], loss: str, **settings: Any) -> Partial:
    with a_problem(x, y, p0=P0, loss=loss, cuts=cuts, **settings) as problem:
        return grow_and_ask(problem, (0.0, 0.5))[2]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, N - 1), max_size=20, unique=True).map(sorted),
    st.sampled_from(["square", "exponential"]),
    st.booleans(),
)
def test_any_cut_into_row_blocks_gives_the_same_sums(cuts: list[int], loss: str, is_sparse: bool) -> None:
    x, y = data()
    matrix = sp.csr_array(x) if is_sparse else x
    whole, parts = all_sums(matrix, y, (), loss), all_sums(matrix, y, cuts, loss)
    assert whole.keys() == parts.keys()
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-12, atol=1e-12 * np.abs(values).max())


@pytest.mark.parametrize("loss", ["square", "exponential"])
@pytest.mark.parametrize("form", ["dense", "csr"])
def test_the_same_blocks_give_the_same_bits_on_any_number_of_threads(form: str, loss: str) -> None:
    x, y = data()
    matrix = sp.csr_array(x) if form == "csr" else x.astype(np.float32)
    dtype = "float64" if form == "csr" else "float32"
    one, many = (
        all_sums(matrix, y, even_cuts(N, 19), loss, threads=threads, dtype=dtype) for threads in (1, 5)
    )
    assert {name: value.tobytes() for name, value in one.items()} == {
        name: value.tobytes() for name, value in many.items()
    }


def growing(cache: str, form: str, forget: bool = False) -> list[bytes]:
    """The bits of everything through growths and a rotation of the basis."""
    x, y = data()
    rng = np.random.default_rng(3)
    bits = []
    with a_problem(sp.csr_array(x) if form == "csr" else x, y, cuts=(7, 20), cache=cache) as problem:
        problem.keep_statistics(np.where(np.arange(L) < 3, np.arange(L), -1))
        mt = np.zeros((L, 0))
        for width in (3, 1, 2):
            problem.append(rng.normal(size=(D, width)))
            sums = problem.sweep(mt, assemble=True)
            bits += [value.tobytes() for name, value in sums.items() if name != "rows_read"]
            mt = np.pad(mt, ((0, 0), (0, width))) + rng.normal(size=(L, problem.rank))
            if width == 1:
                rotation = np.linalg.qr(rng.normal(size=(4, 3)))[0]
                problem.rotate(rotation)
                mt = mt @ rotation
            if forget:
                process_cache().forget(problem.source.run)
        bits.append(problem.moment.tobytes())
        assert problem.statistics is not None
        bits += [problem.statistics.g0.tobytes(), problem.statistics.grams.tobytes()]
        process_cache().forget(problem.source.run)
    return bits


@pytest.mark.parametrize("form", ["dense", "csr"])
def test_scores_that_were_lost_are_rebuilt_to_the_bit(form: str) -> None:
    kept = growing("auto", form)
    assert growing("none", form) == kept
    assert growing("auto", form, forget=True) == kept


def test_passes_are_reads_that_really_happened() -> None:
    x, y = data()
    with a_problem(x, y, cuts=(20,), cache="none") as problem:
        mt = grow_and_ask(problem)[0]
        problem.sweep(mt)
        rows: Any = problem.source.data
        assert rows.reads.count((0, 20)) == rows.reads.count((20, N)) == problem.passes == 3
    with a_problem(x, y, cuts=(20,), cache="auto") as problem:
        mt = grow_and_ask(problem)[0]
        problem.sweep(mt)  # Y and the kept scores suffice: X is not touched
        assert problem.passes == 2
        process_cache().forget(problem.source.run)
        problem.sweep(mt)
        assert problem.passes == 3
        process_cache().forget(problem.source.run)


def test_a_sweep_reads_a_block_of_features_once_whatever_is_asked() -> None:
    x, y = data()
    with a_problem(x, y, cuts=(20,), cache="none") as problem:
        problem.append(np.eye(D)[:, :2])
        problem.sweep(np.zeros((L, 0)), assemble=True, right=np.ones((L, 1)), left=np.ones((D, 1)))
        rows: Any = problem.source.data
        assert sorted(rows.reads) == [(0, 20), (20, N)]


@pytest.mark.parametrize("gain", [0, 10**6])
def test_further_points_are_evaluated_in_the_same_read(gain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MATMUL_GAIN", gain)  # M is turned, or Z
    x, y = data()
    rng = np.random.default_rng(0)
    with a_problem(x, y, p0=P0, cuts=(20,)) as problem:
        problem.append(rng.normal(size=(D, 4)))
        rotation, mt = np.linalg.qr(rng.normal(size=(4, 2)))[0], rng.normal(size=(L, 2))
        sums = problem.sweep(np.zeros((L, 0)), points=((rotation, mt, 0.4),))
        w = problem.basis @ rotation @ mt.T
        power = 0.4 * np.sum((x @ w) ** 2)
        np.testing.assert_allclose((sums["loss 0"] + power) / N, objective(x, y, w, 0.4))
        np.testing.assert_allclose(2 / N * (sums["slope 0"] + power), np.vdot(w, gradient(x, y, w, 0.4)))
        data_part = sums["gradient 0"].T + 0.4 * x.T @ x @ w
        np.testing.assert_allclose(2 / N * data_part, gradient(x, y, w, 0.4), atol=1e-12)


def test_the_exponential_loss_works_in_pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    whole = all_sums(x, y, (20,), "exponential")
    monkeypatch.setattr(sweep, "PIECE_ENTRIES", 3 * L)
    pieces = all_sums(x, y, (20,), "exponential")
    for name, values in whole.items():
        np.testing.assert_allclose(pieces[name], values, rtol=1e-12, atol=1e-12)


def test_single_precision_products_are_summed_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = (1 + rng.random((30_000, 2))).astype(np.float32)
    block = features.Features(x, np.dtype(np.float32))
    left = np.ones((30_000, 1))
    exact = x.astype(np.float64).sum(axis=0)[:, None]
    assert block.transpose_times(left).dtype == np.float64
    np.testing.assert_allclose(block.transpose_times(left), exact, rtol=2e-6)
    monkeypatch.setattr(features, "PIECE_ROWS", 7)
    np.testing.assert_allclose(block.transpose_times(left), exact, rtol=1e-7)


def test_rows_are_scaled_before_the_constant_column_is_appended() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]])
    for matrix in (x, sp.csr_array(x), x.astype(np.float32), sp.csr_array(x.astype(np.float32))):
        rows = prepare(matrix, "l2", 0.5)
        dense = rows.toarray() if sp.issparse(rows) else rows
        np.testing.assert_allclose(dense, [[0.6, 0.8, 0.5], [0, 0, 0.5]], rtol=1e-6)
        assert rows.dtype == matrix.dtype
    np.testing.assert_array_equal(prepare(x, None, 0.0), x)
    whole_numbers = prepare(x.astype(np.int64), None, 0.5)
    np.testing.assert_array_equal(whole_numbers, [[3, 4, 0.5], [0, 0, 0.5]])


def test_memory_insists_on_keeping_all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    small = BlockCache(limit=N * D * 8)
    monkeypatch.setattr(features, "process_cache", lambda: small)
    for cache in ("auto", "none"):
        all_sums(x, y, (20,), "square", cache=cache)
        assert small.used <= small.limit
    with pytest.raises(DataError, match=r"cache='memory' .* at rows 20 to 41: use cache='auto' or workers"):
        all_sums(x, y, (20,), "square", cache="memory", threads=1)


@pytest.mark.parametrize("scale", [1e80, 1e200])
def test_sums_that_overflow_are_refused(scale: float) -> None:
    x, y = data()
    with (
        a_problem(x * scale, y, cuts=(20,)) as problem,
        pytest.raises(DataError, match=r"overflow .* scale the features, .* normalize='l2'"),
    ):
        grow_and_ask(problem)
