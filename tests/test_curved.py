"""Steps that know the curvature of the small problem: against a dense minimisation, and next to gradients."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from training_cases import a_problem, objective, optimum, planted

from dswml import curved
from dswml.corrective import Corrected, solve
from dswml.curved import CurvedSteps
from dswml.label_sums import Statistics
from dswml.small_problem import Quadratic

pytestmark = pytest.mark.usefixtures("calm_blas")

Array = NDArray[Any]


@contextmanager
def on_all_features(x: Array, y: Array, p0: float) -> Iterator[Quadratic]:
    """The small problem whose basis are the features, that is, the problem itself."""
    n_features, n_labels = x.shape[1], y.shape[1]
    with a_problem(x, y, p0=p0) as problem:
        problem.keep_statistics(np.full(n_labels, -1))
        problem.append(np.linalg.qr(np.random.default_rng(5).normal(size=(n_features, n_features)))[0])
        problem.sweep(np.zeros((n_labels, 0)))
        assert problem.statistics is not None
        small = Quadratic(problem.statistics, problem.n_rows, p0)
        yield small


def from_zero(small: Quadratic, radius: float, tol: float) -> Corrected:
    start = np.zeros((small.statistics.n_labels, small.statistics.rank))
    return CurvedSteps(small).solve(start, radius, tol)


@pytest.mark.parametrize("shape", [(60, 10, 25), (60, 12, 5)], ids=["many labels", "few labels"])
@pytest.mark.parametrize("p0", [0.05, 0.5, 0.7])
@pytest.mark.parametrize("radius", [0.3, 3.0, 300.0])
def test_the_solution_is_that_of_an_independent_method(
    radius: float, p0: float, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = planted(*shape)
    best = objective(x, y, optimum(x, y, p0, radius, tol=1e-8), p0)
    with on_all_features(x, y, p0) as small:
        for tol in (1e-9, 1e-2):
            if tol == 1e-2:
                monkeypatch.delattr(curved, "solve")  # so near the steps get by themselves
            found = from_zero(small, radius, tol)
            assert -1e-8 <= found.objective - best <= found.gap + 1e-8
            assert found.gap <= tol
            assert np.linalg.norm(found.mt, "nuc") <= radius * (1 + 1e-12)
            # As F(U M) of the same matrix by itself.
            slope = float(np.vdot(found.mt, small.gradient(found.mt)))
            value = small.objective(slope, float(np.vdot(found.mt, small.statistics.positives)))
            assert found.objective == pytest.approx(value, rel=1e-12)


def test_what_is_left_is_the_gradient_and_a_normal_of_the_ball() -> None:
    x, y = planted(60, 10, 25)
    with on_all_features(x, y, 0.1) as small:
        found = from_zero(small, 3.0, 1e-3)
        assert found.residual is not None
        normal = found.residual - small.gradient(found.mt)
    # <n, M> is the most that <n, V> is on the ball.
    assert float(np.vdot(normal, found.mt)) == pytest.approx(3.0 * np.linalg.norm(normal, 2), rel=1e-9)


def test_features_of_different_scales_take_a_fraction_of_the_steps() -> None:
    x, y = planted(400, 30, 20)
    x = x * np.logspace(0, -2, 30)
    with on_all_features(x, y, 0.1) as small:
        start = np.zeros((20, 30))
        plain, found = solve(small, start, 20.0, 1e-4, tight=True), from_zero(small, 20.0, 1e-4)
    assert found.gap <= 1e-4
    assert found.objective == pytest.approx(plain.objective, abs=1e-4)
    assert 3 * found.iterations < plain.iterations


def test_gradients_take_over_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = planted(60, 10, 25)
    with on_all_features(x, y, 0.1) as small:
        alone = from_zero(small, 3.0, 1e-8)
        monkeypatch.setattr(curved, "MOST_STEPS", 1)
        helped = from_zero(small, 3.0, 1e-8)
    assert helped.gap <= 1e-8
    assert helped.objective == pytest.approx(alone.objective, abs=1e-8)


def test_rows_without_features_have_no_curvature() -> None:
    y = planted(60, 4, 5)[1]
    with on_all_features(np.zeros((60, 4)), y, 0.1) as small:
        found = from_zero(small, 3.0, 1e-6)
    assert found.objective == pytest.approx(objective(np.zeros((60, 4)), y, np.zeros((4, 5)), 0.1))


def test_no_more_matrices_are_made_than_the_plan_counts() -> None:
    rng = np.random.default_rng(0)
    n_rows, n_labels, rank = 400, 3000, 40
    rows = rng.integers(0, n_rows, 3 * n_labels)
    pattern = np.arange(0, rows.size + 1, 3), rows
    statistics = Statistics(np.full(n_labels, 3), np.full(n_labels, -1), *pattern)
    z = rng.normal(size=(n_rows, rank))
    statistics.append(z.T @ z, np.zeros((0, rank)), z)
    steps = CurvedSteps(Quadratic(statistics, n_rows, 0.05))
    start = np.zeros((n_labels, rank))
    steps.solve(start, 3.0, 1e-1)  # compiles
    tracemalloc.start()
    try:
        found = steps.solve(start, 3.0, 1e-9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.iterations > 2
    points_beside = 2
    assert peak <= (curved.ITERATES - points_beside) * start.nbytes
