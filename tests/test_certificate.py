"""The certified gap is never below the true one and hardly above it, however the block was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from training_cases import REAL_SETS, exact_gap, objective, optimum, planted, run

from dswml import certificate
from dswml.certificate import Bound, schur_bound, singular_value_bound
from dswml.dataset import Dataset
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options
from dswml.training import Parameters, train

pytestmark = pytest.mark.usefixtures("calm_blas")

Array = NDArray[Any]


def with_spectrum(values: Any, n_left: int, n_right: int, seed: int = 0) -> tuple[Array, Array]:
    """A matrix with the given singular values, and its right singular vectors."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(n_left, len(values))))[0]
    right = np.linalg.qr(rng.normal(size=(n_right, len(values))))[0]
    return (left * np.asarray(values)) @ right.T, right


class Operator:
    """A matrix that can only be multiplied, and counts how often it was."""

    def __init__(self, matrix: Array) -> None:
        self.matrix, self.calls = matrix, 0

    def times(self, right: Array) -> Array:
        self.calls += 1
        product: Array = self.matrix @ right
        return product

    def transpose_times(self, left: Array) -> Array:
        self.calls += 1
        product: Array = self.matrix.T @ left
        return product

    def bound(self, block: Array, seed: int = 0, max_reads: float = np.inf) -> Bound | None:
        rng = np.random.default_rng(seed)
        return singular_value_bound(self.times, self.transpose_times, block, rng, max_reads)


def bounded(matrix: Array, block: Array, seed: int = 0) -> Bound:
    bound = Operator(matrix).bound(block, seed)
    assert bound is not None
    return bound


# The Schur complement.


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 9), st.floats(1, 3))
def test_the_schur_bound_is_above_for_any_block_whatsoever(seed: int, k: int, n: int, slack: float) -> None:
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(6, n)) * 10.0 ** rng.uniform(-3, 3, size=n)
    q = np.linalg.qr(rng.normal(size=(n, min(k, n))))[0]
    h = q.T @ g.T @ g @ q
    residual = g.T @ g @ q - q @ h
    tau = slack * np.linalg.norm(g - g @ q @ q.T, 2)
    mu = schur_bound(h, residual.T @ residual, float(tau**2))
    top = np.linalg.norm(g, 2) ** 2
    assert mu >= top * (1 - 1e-10)
    assert mu <= (np.sqrt(np.linalg.norm(h, 2)) + tau) ** 2 * (
        1 + 1e-10
    )  # ||G|| <= ||G Q|| + ||G (I - Q Q^T)||
    assert mu >= tau**2 * (1 - 1e-12)


def test_the_schur_bound_is_exact_for_an_invariant_block_and_a_root_for_any_other() -> None:
    g, right = with_spectrum([5.0, 4.0, 1.0, 0.5], 7, 6)
    h = right[:, :2].T @ g.T @ g @ right[:, :2]
    residual = g.T @ g @ right[:, :2] - right[:, :2] @ h
    assert schur_bound(h, residual.T @ residual, 1.0) == pytest.approx(25.0, rel=1e-12)
    h, coupling, tau_squared = np.diag([4.0, 1.0]), np.array([[0.3, 0.1], [0.1, 0.2]]), 2.0
    mu = schur_bound(h, coupling, tau_squared)
    assert np.linalg.eigvalsh(h + coupling / (mu - tau_squared))[-1] == pytest.approx(mu, rel=1e-12)
    assert schur_bound(h, coupling, 3.0) > mu
    assert schur_bound(h, coupling, np.inf) == np.inf


# The bound on an operator.

SPECTRA = {
    "falling": 0.8 ** np.arange(60),
    "flat": np.ones(60),
    "slowly falling": 1 - np.arange(60) / 100,
    "manifold top": np.concatenate([np.ones(25), 0.95 ** np.arange(1, 36)]),
    "one": np.array([3.0]),
    "two scales": np.array([1.0, 1.0, 1e-8, 1e-9]),
    "nothing": np.array([0.0]),
}


@pytest.mark.parametrize("block", ["leading", "lacking the top", "random", "one vector", "twice the same"])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_bound_is_above_whatever_the_spectrum_and_the_block(spectrum: str, block: str) -> None:
    values = SPECTRA[spectrum]
    matrix, right = with_spectrum(values, 70, 90)
    rng = np.random.default_rng(7)
    chosen = {
        "leading": np.hstack([right[:, :20], rng.normal(size=(90, 5))]),
        "lacking the top": np.linalg.qr(np.hstack([right, rng.normal(size=(90, 10))]))[0][:, len(values) :],
        "random": rng.normal(size=(90, 10)),
        "one vector": rng.normal(size=(90, 1)),
        "twice the same": np.hstack([right[:, :3], right[:, :3]]),
    }[block]
    bound = bounded(matrix, chosen)
    assert bound.sigma >= values[0] * (1 - 1e-12)
    assert bound.sigma <= max(1.6 * values[0], 1e-12)
    assert 1 - 1e-7 <= bound.confidence <= 1


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 5), (4, 3), (3, 30), (200, 24)])
def test_the_bound_is_exact_where_nothing_is_left_outside_the_block(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(1).normal(size=shape)
    bound = bounded(matrix, np.eye(shape[1]))
    assert bound.sigma == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-12)
    assert bound.confidence == 1
    narrow = bounded(matrix, np.eye(shape[1])[:, :1])
    assert narrow.sigma >= np.linalg.norm(matrix, 2) * (1 - 1e-12)


def test_a_block_that_is_close_to_the_leading_space_gives_a_tight_bound() -> None:
    """As near an optimum: a manifold top value, known to 1e-3, and a rest well below."""
    values = np.concatenate([np.ones(30), 0.6 * 0.98 ** np.arange(60)])
    matrix, right = with_spectrum(values, 120, 150)
    block = right[:, :50] + 1e-3 * np.random.default_rng(0).normal(size=(150, 50)) / np.sqrt(150)
    assert 1 - 1e-12 <= bounded(matrix, block).sigma <= 1 + 1e-5


def test_a_naive_warm_start_is_fooled_and_the_bound_is_not() -> None:
    """The top value is as manifold as W's rank; a block of other singular vectors never sees it."""
    values = np.concatenate([np.full(12, 1.1), np.full(30, 1.0), 0.5 ** np.arange(1, 40)])
    matrix, right = with_spectrum(values, 100, 120)
    block = right[:, 12:42]
    for _ in range(5):  # power rounds from the block stay in its space, up to rounding
        block = np.linalg.qr(matrix.T @ (matrix @ block))[0]
    naive = np.linalg.norm(matrix @ block, 2)
    assert naive < 1.0001
    bound = bounded(matrix, block)
    assert 1.1 * (1 - 1e-12) <= bound.sigma <= 1.1 * 1.001


def test_the_bound_holds_for_many_seeds() -> None:
    matrix, right = with_spectrum(1 / np.sqrt(1 + np.arange(80)), 100, 200)
    for seed in range(15):
        bound = bounded(matrix, right[:, 3:8], seed)  # the three largest are to be found by chance
        assert bound.sigma >= 1 - 1e-12


@pytest.mark.parametrize("max_reads", [0, 1, 2, 13, 14, 20, 28, 56, 1000])
def test_reads_are_never_more_than_allowed(max_reads: int) -> None:
    matrix = with_spectrum(np.ones(100), 150, 300)[0]
    operator = Operator(matrix)
    bound = operator.bound(np.eye(300)[:, :5], max_reads=max_reads)
    assert operator.calls <= max_reads
    if bound is None:
        assert max_reads < certificate.READS
        assert operator.calls == 0
    else:
        assert bound.sigma >= 1 - 1e-12


# The gap of a fit.


def assert_certified(gap: float, true_gap: float, value: float) -> None:
    assert gap >= true_gap - 1e-12 * value
    assert gap <= 2 * true_gap + 1e-6 * value


@pytest.mark.parametrize("tol", [0.3, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("assemble", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_certified_gap_of_a_fit_is_the_true_one(seed: int, assemble: bool, tol: float) -> None:
    x, y = planted(150, 40, 50, seed, density=0.04)
    p0, radius = 0.1, 8.0
    found = run(x, y, problem={"radius": radius, "p0": p0}, tol=tol, assemble=assemble, seed=seed)
    w = found.u @ found.m
    value, true_gap = objective(x, y, w, p0), exact_gap(x, y, w, p0, radius)
    assert found.status == "OPTIMAL"
    assert found.certificate is not None
    assert found.certificate.method == ("curvature" if assemble else "lanczos")
    assert found.certificate.gap == found.gap
    if assemble:  # see test_duality
        assert found.gap <= true_gap + 1e-12 * value
    else:
        assert_certified(found.gap, true_gap, value)
    assert found.gap_estimate <= true_gap + 1e-12 * value
    assert found.gap <= tol * value * (1 + 1e-9)
    np.testing.assert_allclose(found.objective, value, rtol=1e-10)


@pytest.mark.parametrize("assemble", [True, False])
def test_single_precision_certifies_up_to_its_rounding(assemble: bool) -> None:
    x, y = planted(300, 40, 50, density=0.04)
    single = x.astype(np.float32)
    settings = {"radius": 8.0, "p0": 0.1, "dtype": "float32"}
    found = run(single, y, problem=settings, tol=1e-4, assemble=assemble)
    w = found.u @ found.m
    double = single.astype(np.float64)
    value, true_gap = objective(double, y, w, 0.1), exact_gap(double, y, w, 0.1, 8.0)
    assert found.gap <= 2 * true_gap + 1e-6 * value
    if assemble:
        error = value - objective(double, y, optimum(double, y, 0.1, 8.0), 0.1)
        assert error - 1e-6 * value <= found.gap
    else:
        assert true_gap - 1e-6 * value <= found.gap
    np.testing.assert_allclose(found.objective, value, rtol=1e-7)


def check_real(data: Dataset, tol: float, weights: str = "sparsity") -> None:
    with InProcessExecutor() as executor:
        parameters = Parameters(radius=100.0, weights=weights, options=Options(tol=tol, assemble=False))
        model, found = train(data, parameters, executor)
    x, y = data.read_x(0, data.n_rows), data.read_y(0, data.n_rows).toarray().astype(np.float64)
    w = model.u @ model.m
    value = objective(x, y, w, model.p0)
    assert found.certificate is not None
    assert found.certificate.method == "lanczos"
    # Where the blocks fill the space of the labels, the bound is exact.
    assert 1 - 1e-7 <= found.certificate.confidence <= 1
    assert_certified(found.certificate.gap, exact_gap(x, y, w, model.p0, 100.0), value)
    assert found.gap <= tol * value * (1 + 1e-9)


def test_the_matrix_free_certificate_on_a_real_set(real_set: Callable[[str], Dataset]) -> None:
    check_real(real_set("stackex_philosophy"), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["sparsity", "uniform"])
@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("name", REAL_SETS)
def test_the_matrix_free_certificate_on_all_real_sets(
    name: str, tol: float, weights: str, real_set: Callable[[str], Dataset]
) -> None:
    check_real(real_set(name), tol, weights)
