"""Least squares over the ball: gaps that hold after every step, and solutions against an independent one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from training_cases import objective, optimum, planted

from dswml import least_squares
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options, Solution
from dswml.least_squares import LeastSquares
from dswml.sources import as_dataset
from dswml.splitting import Spectrum, Splitting
from dswml.training import Parameters, train

Array = NDArray[np.float64]


def dense_problem(x: Array, y: Array) -> LeastSquares:
    return LeastSquares(x.T @ x, y.T @ x, len(x), int(y.sum()))


@example(155, (10, 12, 4), 1e3, 1)  # F = 0 but for rounding
@given(
    st.integers(0, 10_000),
    st.sampled_from([(60, 8, 5), (60, 5, 9), (10, 12, 4)]),
    st.sampled_from([0.1, 1.0, 5.0, 1e3]),
    st.integers(1, 40),
)
def test_the_gap_is_no_less_than_the_error_after_every_step(
    seed: int, shape: tuple[int, int, int], radius: float, steps: int
) -> None:
    n, d, labels = shape
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    x[:, -1] = x[:, 0]  # X^T X has no inverse
    y = (rng.random((n, labels)) < 0.2).astype(float)
    y[0, 0] = 1.0
    problem = dense_problem(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_squares, "MAX_STEPS", steps)
        found, gap = problem.solve(radius, tol=0.0)
    u, mt = problem.factors()
    w = u @ mt.T
    assert np.linalg.svd(w, compute_uv=False).sum() <= radius * (1 + 1e-9)
    rounding = 1e-9 * objective(x, y, np.zeros_like(w), 0.5)  # F is a difference of terms of this size
    assert found == pytest.approx(objective(x, y, w, 0.5), rel=1e-9, abs=rounding)
    assert found >= 0
    best = dense_problem(x, y)
    least, _ = best.solve(radius, tol=1e-13)
    error = found - least
    assert error <= gap + 0.1 * rounding


@pytest.mark.parametrize("radius", [0.5, 4.0, 30.0])
def test_the_solution_is_that_of_an_independent_method(radius: float) -> None:
    x, y = planted(200, 12, 7)
    best = optimum(x, y, 0.5, radius)
    problem = dense_problem(x, y)
    found, gap = problem.solve(radius, tol=1e-8)
    assert gap <= 1e-8 * found
    assert found == pytest.approx(objective(x, y, best, 0.5), rel=1e-6)


def test_a_radius_may_begin_where_another_ended() -> None:
    x, y = planted(200, 12, 7)
    along = dense_problem(x, y)
    for radius in (0.5, 2.0, 8.0, 1.0):
        there, _ = along.solve(radius, tol=1e-9)
        alone, _ = dense_problem(x, y).solve(radius, tol=1e-9)
        assert there == pytest.approx(alone, rel=1e-8)


@pytest.mark.parametrize("known", [False, True])
def test_a_path_of_radii_near_and_far_is_that_of_single_ones(known: bool) -> None:
    x, y = planted(200, 12, 7)
    square = x.T @ x
    along = LeastSquares(
        square, y.T @ x, len(x), int(y.sum()), spectrum=Spectrum.of(square) if known else None
    )
    for radius in (0.05, 0.2, 3.0, 4.0, 5.0, 30.0, 1e4):
        there, gap = along.solve(radius, tol=1e-9)
        alone, _ = dense_problem(x, y).solve(radius, tol=1e-9)
        assert there == pytest.approx(alone, rel=1e-8)
        u, mt = along.factors()
        assert there == pytest.approx(objective(x, y, u @ mt.T, 0.5), rel=1e-9)
        assert gap <= 1e-9 * there
    assert along.free == pytest.approx(np.linalg.lstsq(x, y, rcond=None)[0].T, abs=1e-6)


def test_a_path_goes_on_among_few_vectors_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = planted(400, 30, 40)
    monkeypatch.setattr(least_squares, "BESIDES", 4)
    rows: list[int] = []
    step = Splitting.step

    def counted(self: Splitting, radius: float) -> None:
        rows.append(len(self.turned))
        step(self, radius)

    monkeypatch.setattr(Splitting, "step", counted)
    radii = (0.05, 0.2, 0.5, 1.0)
    along = dense_problem(x, y)
    for radius in radii:
        found, gap = along.solve(radius, tol=1e-5)
        error = found - objective(x, y, optimum(x, y, 0.5, radius, tol=1e-9), 0.5)
        assert -1e-9 <= error <= gap + 1e-9
        assert gap <= 1e-5 * found
        u, mt = along.factors()
        assert found == pytest.approx(objective(x, y, u @ mt.T, 0.5), rel=1e-9)
    assert min(rows) < 30  # D < L: there is a basis of 30 for Y^T X
    whole = rows.count(30)
    monkeypatch.setattr(least_squares, "BESIDES", 1000)
    rows.clear()
    along = dense_problem(x, y)
    for radius in radii:
        along.solve(radius, tol=1e-5)
    assert whole < rows.count(30) == len(rows)


@pytest.mark.parametrize("share", [0.1, 0.9, 2.0])
@pytest.mark.parametrize("kind", ["scales", "nearly equal columns"])
def test_eigenvalues_of_all_sizes_are_solved_too(kind: str, share: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 10))
    x = (
        x * np.logspace(-3, 3, 10)
        if kind == "scales"
        else np.hstack([x, x + 1e-4 * rng.normal(size=x.shape)])
    )
    y = (rng.random((300, 6)) < 0.2).astype(np.int64)
    radius = share * float(np.linalg.svd(np.linalg.lstsq(x, y, rcond=None)[0], compute_uv=False).sum())
    with InProcessExecutor(1) as executor:
        parameters = Parameters(radius, weights="uniform", options=Options(tol=1e-3))
        _, solution = train(as_dataset(x, y), parameters, executor)
    assert (solution.status, solution.passes) == ("OPTIMAL", 1)
    w = solution.u @ solution.m
    assert np.linalg.svd(w, compute_uv=False).sum() <= radius * (1 + 1e-9)
    assert solution.objective == pytest.approx(objective(x, y, w, 0.5), rel=1e-6)


def test_features_without_entries_and_data_without_labels() -> None:
    x = np.zeros((5, 3))
    y = np.zeros((5, 2))
    problem = dense_problem(x, y)
    assert problem.solve(1.0, tol=1e-6) == (0.0, 0.0)
    u, mt = problem.factors()
    assert (u.shape, mt.shape) == ((3, 0), (2, 0))


def test_training_takes_one_read_unless_directions_are_counted() -> None:
    x, y = planted(400, 30, 20)
    with InProcessExecutor(2) as executor:

        def fit(**options: int) -> tuple[int, float, float]:
            parameters = Parameters(8.0, weights="uniform", options=Options(tol=1e-6, **options))  # type: ignore[arg-type]
            _, solution = train(as_dataset(x, y), parameters, executor)
            assert solution.status == "OPTIMAL"
            return solution.passes, solution.iterations, solution.objective

        one, few, found = fit()
        also_one, more, same = fit(block_size=3)
    assert (one, also_one) == (1, 1)
    assert few <= 3 < more
    assert found == pytest.approx(same, rel=3e-6)


@pytest.mark.parametrize("p0", [0.2, 0.5])
def test_without_curvature_the_gap_is_that_of_the_gradient_alone(p0: float) -> None:
    x, y = planted(300, 12, 9)
    with InProcessExecutor(1) as executor:

        def fit(curvature: bool) -> Solution:
            options = Options(tol=1e-3, curvature=curvature)
            return train(as_dataset(x, y), Parameters(4.0, weights=p0, options=options), executor)[1]

        loose, tight = fit(False), fit(True)
    assert loose.certificate is not None
    assert tight.certificate is not None
    assert loose.certificate.method == "assembled"
    assert loose.gap == loose.gap_estimate
    assert tight.gap <= tight.gap_estimate
    if p0 == 0.5:
        assert loose.passes > tight.passes == 1
    else:
        assert tight.certificate.method == "curvature"
    assert loose.objective == pytest.approx(tight.objective, rel=2e-3)
