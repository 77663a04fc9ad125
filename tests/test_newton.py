"""Steps that know the curvature: against a dense minimisation, and in a search of radii."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from training_cases import gradient, objective, optimum, planted

from dswml import path, tuning
from dswml.executor import InProcessExecutor
from dswml.newton import Curvature, NewtonSteps, Place, ahead, frame_of
from dswml.path import Path
from dswml.sources import as_dataset
from dswml.splitting import Spectrum
from dswml.tuning import tune

Array = NDArray[np.float64]
P0 = 0.1


def steps_of(x: Array) -> NewtonSteps:
    spectrum = Spectrum.of(x.T @ x)
    return NewtonSteps(spectrum.values, spectrum.vectors, len(x))


def place(steps: NewtonSteps, w: Array, g: Array) -> Place:
    return Place(steps.turned(w.T), steps.turned(g.T))


def test_with_uniform_weights_the_step_leads_to_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dswml.newton.STEPS", 200)  # c X^T X is the whole Hessian there
    x, y = planted(200, 12, 7)
    steps, w = steps_of(x), optimum(x, y, 0.5, 1.0)
    change = steps.change(place(steps, w, gradient(x, y, w, 0.5)), 4.0, curvature=0.5)
    found = w + steps.vectors @ change.T
    best = objective(x, y, optimum(x, y, 0.5, 4.0), 0.5)
    assert np.linalg.svd(found, compute_uv=False).sum() <= 4.0 * (1 + 1e-4)
    assert objective(x, y, found, 0.5) == pytest.approx(best, rel=1e-5)


def test_its_directions_hold_more_of_the_next_solution_than_those_of_the_gradient() -> None:
    x, y = planted(400, 40, 30)
    x = x * np.logspace(0, -1.5, 40)  # features of different scales, as words have
    steps, (before, after) = steps_of(x), (optimum(x, y, P0, radius) for radius in (4.0, 6.0))
    g = gradient(x, y, before, P0)
    basis = np.linalg.svd(before)[0][:, : np.linalg.matrix_rank(before, tol=1e-3)]
    foreseen = steps.directions([steps.change(place(steps, before, g), 6.0, 2 * P0)], basis)
    assert np.abs(basis.T @ foreseen).max() <= 1e-6 * np.abs(foreseen).max()
    top = np.linalg.svd(g)[0]
    top = top - basis @ (basis.T @ top)

    def missed(directions: Array) -> float:
        span = np.linalg.qr(np.hstack([basis, directions]))[0]
        return float(np.linalg.norm(x @ (after - span @ (span.T @ after))))

    assert missed(foreseen) < 0.5 * missed(top[:, : foreseen.shape[1]]) < missed(foreseen[:, :0])


def test_the_gradient_goes_on_in_a_line_with_w() -> None:
    x, y = planted(100, 8, 6)
    steps, rng = steps_of(x), np.random.default_rng(0)
    first, second = rng.normal(size=(2, 8, 6))
    one, other = (place(steps, w, gradient(x, y, w, P0)) for w in (first, second))
    there = ahead(one, other, 0.7)
    w = second + 0.7 * (second - first)
    np.testing.assert_allclose(there.w, steps.turned(w.T), atol=1e-5)
    np.testing.assert_allclose(there.gradient, steps.turned(gradient(x, y, w, P0).T), atol=1e-4)


def test_a_frame_is_orthonormal_and_spans_what_it_was_made_of() -> None:
    vectors = np.linalg.qr(np.random.default_rng(1).normal(size=(20, 5)))[0]
    frame = frame_of(np.hstack([vectors, vectors[:, :2]]))
    np.testing.assert_allclose(frame.T @ frame, np.eye(5), atol=1e-12)
    np.testing.assert_allclose(frame @ (frame.T @ vectors), vectors, atol=1e-12)


def test_directions_of_features_that_never_occur_are_none() -> None:
    x = np.zeros((10, 4))
    curvature, spectrum = Curvature.of(x.T @ x, 10, "float64")
    assert not spectrum.values.any()
    nothing = np.zeros((3, 4), dtype=np.float32)
    change = curvature.steps.change(Place(nothing, nothing), 1.0, 0.5)
    assert curvature.steps.directions([change], np.zeros((4, 0))).shape == (4, 0)


RADII = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)


def looks_of(monkeypatch: pytest.MonkeyPatch, kind: str) -> tuple[int, Any]:
    """Search with or without the curvature, and count the gradients that were asked for."""
    counted = []
    request = Path.request

    def counting(self: Path, iteration: int) -> Any:
        asked = request(self, iteration)
        counted.append(len(asked.points))
        return asked

    monkeypatch.setattr(Path, "request", counting)
    if kind == "gradient":
        monkeypatch.setattr("dswml.search_plan.NewtonPath", path.Path)
    x, y = planted(800, 150, 60)
    with InProcessExecutor(2) as executor:
        found = tune(as_dataset(x, y), executor, radii=RADII, weights=(P0,), folds=0)
    return sum(counted), found


def test_a_search_looks_at_every_radius_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        many, others = looks_of(patch, "gradient")
    few, found = looks_of(monkeypatch, "curvature")
    assert few <= 1.5 * len(RADII) < many
    x, y = planted(800, 150, 60)
    for point, other in zip(found.points, others.points, strict=True):
        best = objective(x, y, optimum(x, y, P0, point.radius), P0)
        for one in (point, other):
            assert one.relative_gap[0] <= 1e-3
            # The gap bounds the error, whichever look or solution closed it.
            assert one.objective[0] - best <= one.relative_gap[0] * one.objective[0] + 1e-9


def test_radii_whose_solution_is_zero_to_the_tolerance_are_done_with_at_once() -> None:
    x, y = planted(200, 12, 7)
    with InProcessExecutor(1) as executor:
        found = tune(as_dataset(x, y), executor, radii=(1e-9, 1e-8, 2.0), weights=(P0,), folds=0)
    assert [point.relative_gap[0] <= 1e-3 for point in found.points] == [True, True, True]
    best = objective(x, y, optimum(x, y, P0, 2.0), P0)
    assert found.points[2].objective[0] == pytest.approx(best, rel=1e-3)
    assert found.iterations < tuning.MAX_ITERATIONS
