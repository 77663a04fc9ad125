"""The corrective step: its sums add up, its small problem is solved to the optimum, its memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from training_cases import a_problem, exact_gap, gradient, objective, optimum, planted, project

from dswml import small_problem
from dswml.corrective import project_nuclear, solve
from dswml.errors import UsageError
from dswml.label_sums import plan_directions
from dswml.problem import Problem
from dswml.small_problem import Quadratic

pytestmark = pytest.mark.usefixtures("calm_blas")

Array = NDArray[Any]

N, D, L = 60, 10, 8
P0 = 0.2

#: No label, some labels or all labels summed on the workers, in any order.
PLACES = {
    "rows": np.full(L, -1),
    "both": np.array([2, -1, 0, -1, -1, 1, -1, -1]),
    "grams": np.arange(L)[::-1].copy(),
}
either_form = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())


@contextmanager
def growing(place: Array, pieces: tuple[int, ...], **settings: Any) -> Iterator[Problem]:
    """A problem whose basis has grown by so many directions at a time."""
    x, y = planted(N, D, L)
    directions = np.linalg.qr(np.random.default_rng(5).normal(size=(D, D)))[0]
    with a_problem(x, y, p0=P0, cuts=(17, 40), **settings) as problem:
        problem.keep_statistics(place)
        for width in pieces:
            problem.append(directions[:, problem.rank : problem.rank + width])
            problem.sweep(np.zeros((L, 0)))
        yield problem


def quadratic(problem: Problem, p0: float = P0) -> Quadratic:
    assert problem.statistics is not None
    return Quadratic(problem.statistics, problem.n_rows, p0)


def assert_describes(problem: Problem, p0: float = P0) -> None:
    """Value, gradient and Hessians are those of F(U M) at a random M."""
    x, y = planted(N, D, L)
    u = problem.basis
    small = quadratic(problem, p0)
    mt = np.random.default_rng(6).normal(size=(L, problem.rank))
    slope = small.gradient(mt)
    np.testing.assert_allclose(slope, gradient(x, y, u @ mt.T, p0).T @ u, atol=1e-12)
    value = small.objective(float(np.vdot(mt, slope)), float(np.vdot(small.statistics.positives, mt)))
    np.testing.assert_allclose(value, objective(x, y, u @ mt.T, p0), rtol=1e-12)
    moved = small.gradient(mt + 1) - slope  # the gradient is linear
    np.testing.assert_allclose(
        np.einsum("lab,b->la", small.hessians(), np.ones(problem.rank)), moved, atol=1e-12
    )


@either_form
@pytest.mark.parametrize("p0", [0.05, 0.2, 0.7])
def test_the_statistics_describe_the_objective_for_every_weighting(place: Array, p0: float) -> None:
    with growing(place, (4, 3)) as problem:
        assert_describes(problem, p0)


@either_form
def test_growing_piece_by_piece_is_growing_at_once(place: Array) -> None:
    with growing(place, (7,)) as at_once, growing(place, (1, 3, 2, 1)) as by_pieces:
        a, b = at_once.statistics, by_pieces.statistics
        assert a is not None
        assert b is not None
        signs = at_once.basis.T @ by_pieces.basis  # a direction may be taken in with either sign
        np.testing.assert_allclose(np.abs(signs), np.eye(7), atol=1e-12)
        np.testing.assert_allclose(b.g0, signs.T @ a.g0 @ signs, atol=1e-12)
        np.testing.assert_allclose(b.positives, a.positives @ signs, atol=1e-12)
        expected = signs.T @ quadratic(at_once).hessians() @ signs
        np.testing.assert_allclose(quadratic(by_pieces).hessians(), expected, atol=1e-12)


@either_form
def test_rotated_statistics_are_those_of_the_rotated_basis_and_grow_on(place: Array) -> None:
    with growing(place, (4, 3)) as problem:
        rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(7, 3)))[0]
        expected = problem.basis @ rotation
        problem.rotate(rotation)
        np.testing.assert_allclose(problem.basis, expected)
        assert_describes(problem)
        problem.append(np.random.default_rng(1).normal(size=(D, 5)))
        problem.sweep(np.zeros((L, 0)))
        assert problem.rank == 8
        assert_describes(problem)


@either_form
def test_labels_change_from_gram_matrices_to_rows_as_the_basis_grows(place: Array) -> None:
    with growing(place, (1, 1, 1, 1, 1, 1, 1, 1)) as problem:
        assert_describes(problem)


def test_both_forms_hold_for_sparse_single_precision_rows_too() -> None:
    x, y = planted(N, D, L)
    x = np.where(np.abs(x) > 0.5, x, 0).astype(np.float32)
    for place in PLACES.values():
        with a_problem(sp.csr_array(x), y, p0=P0, cuts=(17,), dtype="float32") as problem:
            problem.keep_statistics(place)
            problem.append(np.eye(D)[:, :6])
            problem.sweep(np.zeros((L, 0)))
            mt = np.random.default_rng(6).normal(size=(L, 6))
            slope = gradient(x.astype(np.float64), y, problem.basis @ mt.T, P0).T @ problem.basis
            np.testing.assert_allclose(quadratic(problem).gradient(mt), slope, atol=1e-5)


def test_threads_share_labels_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_problem, "PART_WORK", 10)
    with growing(PLACES["both"], (4, 3)) as problem, ThreadPoolExecutor(3) as pool:
        assert problem.statistics is not None
        mt = np.random.default_rng(6).normal(size=(L, 7))
        shared = Quadratic(problem.statistics, N, P0, pool).gradient(mt)
        assert shared.tobytes() == quadratic(problem).gradient(mt).tobytes()


# The solver of the small problem.


@pytest.mark.parametrize("p0", [0.05, 0.5, 0.7])
@pytest.mark.parametrize("radius", [0.3, 3.0, 300.0])
@pytest.mark.parametrize("tight", [False, True])
def test_the_solution_is_the_optimum_over_the_span_of_the_basis(
    tight: bool, radius: float, p0: float
) -> None:
    x, y = planted(N, D, L)
    with growing(PLACES["rows"], (4, 3)) as problem:
        found = solve(quadratic(problem, p0), np.zeros((L, 7)), radius, tol=1e-9, tight=tight)
        reduced = x @ problem.basis
        best = optimum(reduced, y, p0, radius, tol=1e-8)
        np.testing.assert_allclose(found.objective, objective(reduced, y, best, p0), rtol=1e-7)
        np.testing.assert_allclose(found.objective, objective(reduced, y, found.mt.T, p0), rtol=1e-12)
        gap = exact_gap(reduced, y, found.mt.T, p0, radius)
        if tight:
            assert found.gap <= gap + 1e-11
        else:
            np.testing.assert_allclose(found.gap, gap, atol=1e-11)
        assert found.gap <= 1e-9
        assert np.linalg.norm(found.mt, "nuc") <= radius * (1 + 1e-12)


@pytest.mark.parametrize("shape", [(60, 10, 25), (60, 12, 5)], ids=["tall", "wide"])
def test_a_tight_gap_stops_the_solver_early_and_is_above_the_error(shape: tuple[int, int, int]) -> None:
    x, y = planted(*shape)
    n_features, n_labels = shape[1:]
    with a_problem(x, y, p0=P0) as problem:
        problem.keep_statistics(np.full(n_labels, -1))
        problem.append(np.eye(n_features))
        problem.sweep(np.zeros((n_labels, 0)))
        best = objective(x, y, optimum(x, y, P0, 2.0), P0)
        start = np.zeros((n_labels, n_features))
        plain, tight = (solve(quadratic(problem), start, 2.0, 1e-6, tight=how) for how in (False, True))
    assert tight.gap < plain.gap if shape[2] < shape[1] else tight.iterations < plain.iterations
    for found in (plain, tight):
        assert found.objective - best <= found.gap <= 1e-6


def test_features_far_from_the_origin_are_no_obstacle() -> None:
    """Columns of N(100, 1): the Hessians' condition is beyond what gradient steps overcome."""
    x, y = planted(200, 6, 5)
    x = x + 100
    with a_problem(x, y, p0=P0) as problem:
        problem.keep_statistics(np.full(5, -1))
        problem.append(np.eye(6))
        problem.sweep(np.zeros((5, 0)))
        assert np.linalg.cond(quadratic(problem).hessians()).min() > 1e4
        found = solve(quadratic(problem), np.zeros((5, 6)), 2.0, tol=1e-8)
        assert found.gap <= 1e-8
        np.testing.assert_allclose(found.gap, exact_gap(x, y, problem.basis @ found.mt.T, P0, 2.0), atol=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e8])
def test_the_units_of_the_features_do_not_matter(scale: float) -> None:
    x, y = planted(N, D, L)
    with a_problem(x * scale, y, p0=P0) as problem:
        problem.keep_statistics(PLACES["rows"])
        problem.append(np.eye(D))
        problem.sweep(np.zeros((L, 0)))
        found = solve(quadratic(problem), np.zeros((L, D)), 3.0 / scale, tol=1e-8)
        np.testing.assert_allclose(found.objective, objective(x, y, optimum(x, y, P0, 3.0), P0), rtol=1e-7)


# The projection.


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 7),
    st.integers(1, 7),
    st.floats(-8, 8),
    st.floats(-3, 3),
    st.integers(0, 3),
)
def test_the_projection_is_the_nearest_matrix_of_the_ball(
    seed: int, rows: int, columns: int, log_scale: float, log_radius: float, n_equal: int
) -> None:
    rng = np.random.default_rng(seed)
    u, s, vt = np.linalg.svd(rng.normal(size=(rows, columns)), full_matrices=False)
    s[: n_equal + 1] = s[0]  # several largest singular values may be the same
    matrix = 10**log_scale * (u * s) @ vt
    radius = 10 ** (log_scale + log_radius)
    projected = project_nuclear(matrix, radius)
    norm = float(np.linalg.norm(matrix, "nuc"))
    np.testing.assert_allclose(projected, project(matrix, radius), atol=1e-7 * norm)
    assert np.linalg.norm(projected, "nuc") <= radius * (1 + 1e-7)


def test_what_is_inside_the_ball_stays_as_it_is() -> None:
    inside = np.diag([0.5, 0.25])
    assert project_nuclear(inside, 1.0) is inside
    np.testing.assert_array_equal(project_nuclear(np.zeros((3, 2)), 1.0), np.zeros((3, 2)))
    assert project_nuclear(np.zeros((3, 0)), 1.0).shape == (3, 0)


def test_a_ball_that_is_tiny_beside_the_matrix_keeps_its_direction() -> None:
    projected = project_nuclear(np.array([[3e100, 0.0], [0.0, 4e80]]), 1e-50)
    np.testing.assert_allclose(projected, [[1e-50, 0.0], [0.0, 0.0]])


# The plan.


def held_bytes(problem: Problem) -> int:
    """What a problem keeps in this process: the factors, one M and the statistics."""
    stats = problem.statistics
    assert stats is not None
    parts = [problem.basis, problem.moment, stats.g0, stats.positives, stats.z, stats.grams]
    return sum(part.nbytes for part in parts) + 8 * problem.rank * problem.n_labels


@pytest.mark.parametrize("limit", [30_000, 60_000, 120_000, 500_000])
@pytest.mark.parametrize("density", [0.05, 0.5])
def test_the_statistics_stay_within_the_limit_at_every_size_of_the_basis(limit: int, density: float) -> None:
    x, y = planted(300, 40, 20, density=density)
    cap, place = plan_directions(300, 40, y.sum(axis=0), limit)
    with a_problem(x, y) as problem:
        problem.keep_statistics(place)
        for _ in range(cap):
            problem.append(np.random.default_rng(problem.rank).normal(size=(40, 1)))
            problem.sweep(np.zeros((20, 0)))
            assert held_bytes(problem) <= limit
        assert problem.rank == cap


def test_the_plan_sums_frequent_labels_on_the_workers_when_their_rows_do_not_fit() -> None:
    counts = np.array([100_000, 3, 100_000, 2])
    cap, place = plan_directions(1_000_000, 50, counts, 2**30)
    assert (cap, place.tolist()) == (50, [-1, -1, -1, -1])
    cap, place = plan_directions(1_000_000, 50, counts, 2**20)
    assert place.tolist() == [0, -1, 1, -1]
    assert 1 < cap <= 50


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 10**6),
    st.integers(1, 10**5),
    st.lists(st.integers(0, 10**5), min_size=1, max_size=30),
    st.integers(12, 33),
)
def test_more_memory_never_means_fewer_directions(
    n_rows: int, n_features: int, counts: list[int], bits: int
) -> None:
    caps = []
    for limit in (2**bits, 2 ** (bits + 1)):
        try:
            caps.append(plan_directions(n_rows, n_features, np.array(counts), limit)[0])
        except UsageError:  # not even one
            caps.append(0)
    assert 0 <= caps[0] <= caps[1] <= n_features


def test_no_memory_for_a_single_direction_is_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"50 features and 4 labels .* of 0 MiB: raise memory_limit"):
        plan_directions(1000, 50, np.full(4, 10), 100)
