"""Gaps that use the curvature are above the error, below those of Eq. 37, and near the former."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import exact_gap, gradient, objective, optimum, planted, project, run

from dswml.duality import GapBound

Array = npt.NDArray[Any]


def tight_gap(x: Array, y: Array, w: Array, p0: float, radius: float) -> float:
    """The gap at W, from all singular triples of its gradient."""
    g = gradient(x, y, w, p0)
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    factors = np.eye(len(w)), w.T
    bound = GapBound(x.T @ x, len(x))
    return bound.gap(bound.near(factors, (u, s, vt.T)), float(np.vdot(w, g)), radius, p0)[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    p0=st.sampled_from([0.03, 0.3, 0.5, 0.8]),
    radius=st.sampled_from([0.5, 5.0, 60.0]),
    kind=st.sampled_from(["zero", "random", "near", "inside"]),
    flat=st.booleans(),
)
def test_it_lies_between_the_error_and_the_gap_of_the_gradient(
    seed: int, p0: float, radius: float, kind: str, flat: bool
) -> None:
    x, y = (array.copy() for array in planted(60, 9, 12, seed))
    if flat:  # features that are absent, or the same twice
        x[:, 0], x[:, 1] = 0.0, x[:, 2]
    best = optimum(x, y, p0, radius, tol=1e-8, steps=100_000)
    noise = np.random.default_rng(seed).standard_normal(best.shape)
    w = {
        "zero": np.zeros_like(best),
        "random": project(10 * radius * noise, radius),
        "near": project(best + 1e-3 * noise, radius),
        "inside": 0.5 * best,
    }[kind]
    value = objective(x, y, w, p0)
    error = value - objective(x, y, best, p0)
    gap, plain = tight_gap(x, y, w, p0, radius), exact_gap(x, y, w, p0, radius)
    assert error - 1e-9 * value <= gap <= plain + 1e-12 * value


def test_no_matrix_of_the_ball_is_better_by_more() -> None:
    x, y = planted(80, 10, 15)
    rng = np.random.default_rng(0)
    w = project(rng.standard_normal((10, 15)), 4.0)
    least = objective(x, y, w, 0.2) - tight_gap(x, y, w, 0.2, 4.0)
    for scale in (0.1, 1.0, 10.0):
        for _ in range(50):
            other = project(w + scale * rng.standard_normal(w.shape), 4.0)
            assert objective(x, y, other, 0.2) >= least


def test_near_the_solution_it_is_of_the_size_of_the_error() -> None:
    x, y = planted(300, 20, 30)
    best = optimum(x, y, 0.1, 6.0, tol=1e-9)
    w = project(best + 1e-5 * np.random.default_rng(0).standard_normal(best.shape), 6.0)
    error = objective(x, y, w, 0.1) - objective(x, y, best, 0.1)
    assert tight_gap(x, y, w, 0.1, 6.0) <= 10 * error
    assert exact_gap(x, y, w, 0.1, 6.0) >= 10 * tight_gap(x, y, w, 0.1, 6.0)


@pytest.mark.parametrize("p0", [0.05, 0.5, 0.8])
@pytest.mark.parametrize("radius", [0.5, 4.0, 500.0])
def test_the_gap_of_a_projected_step_is_above_the_error_and_of_its_size(p0: float, radius: float) -> None:
    x, y = planted(300, 20, 30)
    bound = GapBound(x.T @ x, len(x))
    best = objective(x, y, optimum(x, y, p0, radius, tol=1e-9), p0)
    w, curvature = np.zeros((20, 30)), float(np.linalg.eigvalsh(x.T @ x)[-1]) / 150
    ratios = []
    for _ in range(300):
        ahead = w - gradient(x, y, w, p0) / curvature
        w = project(ahead, radius)
        left = gradient(x, y, w, p0) + curvature * (ahead - w)
        gap = bound.gap_of_normal(float(np.square(left.T @ bound.inverse).sum()), radius, p0)
        error = objective(x, y, w, p0) - best
        assert error - 1e-9 <= gap
        ratios.append(gap / max(error, 1e-7))
    assert ratios[-1] < 30


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.5, 0.8]), st.sampled_from([0.0, 1e-4, 1e-2, 1.0]))
def test_whatever_the_gradient_is_measured_without_the_gap_is_above_the_error(
    seed: int, p0: float, size: float
) -> None:
    x, y = planted(80, 9, 12, seed)
    rng, radius = np.random.default_rng(seed), 3.0
    u = np.linalg.qr(rng.standard_normal((9, 4)))[0]
    best = optimum(x, y, p0, radius, tol=1e-8)
    w = project(u @ u.T @ best, radius)
    mt, residual, g = w.T @ u, size * rng.standard_normal((12, 4)), gradient(x, y, w, p0)
    bound = GapBound(x.T @ x, len(x))
    known, measured = bound.without(residual, u, x.T @ x @ u)
    np.testing.assert_allclose(known @ u, residual, atol=1e-7 * max(size, 1e-9))
    left, values, right = np.linalg.svd(g - known.T, full_matrices=False)
    near = bound.near((u, mt), (left, values, right.T), measured)
    gap, _ = bound.gap(near, float(np.vdot(w, g) - np.vdot(mt, residual)), radius, p0)
    assert objective(x, y, w, p0) - objective(x, y, best, p0) <= gap + 1e-9
    # The formula itself, for singular values that are cut at a level.
    inverse = np.linalg.inv(x.T @ x + bound.ridge * np.eye(9))

    def direct(level: float) -> float:
        part = known.T + left @ np.diag(np.maximum(values - level, 0.0)) @ right
        power = float(np.vdot(part, inverse @ part))
        return (
            float(np.vdot(w, g - part))
            + radius * float(np.linalg.norm(g - part, 2))
            + bound.gap_of_normal(power, radius, p0)
        )

    levels = [direct(level) for level in np.linspace(near.rest, values[0], 400)]
    assert gap <= min(levels) * (1 + 1e-9) + 1e-12
    if (near.overlaps + len(x) / (2 * min(p0, 1 - p0)) * near.crossed <= 0).all():
        assert gap >= 0.99 * min(levels)


@pytest.mark.parametrize("p0", [0.0, 1.0])
def test_weights_of_zero_leave_the_gap_of_the_gradient(p0: float) -> None:
    x, y = planted(40, 6, 8)
    w = project(np.random.default_rng(1).standard_normal((6, 8)), 3.0)
    assert tight_gap(x, y, w, p0, 3.0) == pytest.approx(exact_gap(x, y, w, p0, 3.0), rel=1e-12)


def test_features_that_are_all_zero_leave_nothing_to_gain() -> None:
    bound = GapBound(np.zeros((3, 3)), 10)
    near = bound.near((np.eye(3), np.eye(3)), (np.eye(3), np.zeros(3), np.eye(3)))
    gap, expected = bound.gap(near, 0.0, 1.0, 0.5)
    assert gap == 0
    assert not expected.any()


def test_the_rounding_of_single_precision_does_not_stop_it() -> None:
    x, y = planted(200, 12, 15)
    mixing = np.random.default_rng(0).standard_normal((12, 8))
    x = np.hstack([x, x @ mixing])  # X^T X is singular, and rounded it is indefinite
    rounded = (x.T @ x).astype(np.float32).astype(np.float64)
    assert np.linalg.eigvalsh(rounded)[0] < 0
    best = optimum(x, y, 0.2, 5.0, tol=1e-8)
    w = project(best + 1e-3 * np.random.default_rng(2).standard_normal(best.shape), 5.0)
    g = gradient(x, y, w, 0.2)
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    bound = GapBound(rounded, len(x), "float32")
    near = bound.near((np.eye(len(w)), w.T), (u, s, vt.T))
    gap, _ = bound.gap(near, float(np.vdot(w, g)), 5.0, 0.2)
    assert objective(x, y, w, 0.2) - objective(x, y, best, 0.2) <= gap <= exact_gap(x, y, w, 0.2, 5.0)


@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize(("p0", "radius"), [(0.1, 8.0), (0.5, 8.0), (0.5, 0.5)])
@pytest.mark.parametrize("shape", [(150, 40, 50), (150, 50, 20), (150, 12, 30), (300, 3, 1), (300, 1, 4)])
def test_a_fit_is_as_good_as_its_certificate_says(
    shape: tuple[int, int, int], p0: float, radius: float, tol: float
) -> None:
    x, y = planted(*shape, density=0.04)
    found = run(x, y, problem={"radius": radius, "p0": p0}, tol=tol)
    assert found.status == "OPTIMAL"
    assert found.certificate is not None
    # Where the ball does not bind the gradient vanishes, and its own gap is as good.
    plain = p0 == 0.5 and found.gap == found.gap_estimate
    assert (found.certificate.method, found.certificate.gap) == (
        "assembled" if plain else "curvature",
        found.gap,
    )
    w = found.u @ found.m
    value, best = objective(x, y, w, p0), objective(x, y, optimum(x, y, p0, radius), p0)
    assert value - best <= found.gap * (1 + 1e-6) + 1e-9 * value
    assert found.gap <= tol * value * (1 + 1e-9)
    if p0 == 0.5:
        plain_gap = exact_gap(x, y, w, p0, radius)
        assert found.gap_estimate == pytest.approx(plain_gap, rel=1e-6, abs=1e-9 * value)
    else:
        assert found.gap_estimate == found.gap
