"""The paper's formulas, checked on grids and by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dswml import theory
from dswml.theory import BOOSTING, SQUARE, Surrogate

ETA = np.linspace(0.005, 0.995, 199)
WEIGHTS = (0.02, 0.1, 0.35, 0.5, 0.8)
SURROGATES = pytest.mark.parametrize("surrogate", [SQUARE, BOOSTING], ids=["square", "boosting"])


@SURROGATES
@pytest.mark.parametrize("p0", WEIGHTS)
def test_the_minimiser_is_the_best_score_of_a_fine_grid(surrogate: Surrogate, p0: float) -> None:
    grid = np.linspace(-6, 6, 4001)
    for eta in ETA[::9]:
        risks = surrogate.risk(np.full_like(grid, eta), grid, p0)
        best = surrogate.risk(np.array(eta), surrogate.minimizer(np.array(eta), p0), p0)
        assert best <= risks.min() + 1e-12
        assert best == pytest.approx(risks.min(), abs=1e-5)


@SURROGATES
@pytest.mark.parametrize("p0", WEIGHTS)
def test_the_surrogates_are_calibrated_and_meet_the_condition_of_lemma_3(
    surrogate: Surrogate, p0: float
) -> None:
    assert (np.sign(surrogate.minimizer(ETA, p0)) == np.sign(ETA - p0))[np.abs(ETA - p0) > 1e-9].all()
    excess = surrogate.excess_of_zero(ETA, p0)
    assert (np.abs(p0 - ETA) ** surrogate.s <= surrogate.c**surrogate.s * excess + 1e-12).all()


def test_the_appendix_prints_the_square_minimiser_with_the_wrong_sign() -> None:
    eta, p0 = np.array(0.9), 0.1
    printed = (p0 - eta) / (eta * (1 - 2 * p0) + p0)
    assert SQUARE.risk(eta, SQUARE.minimizer(eta, p0), p0) < SQUARE.risk(eta, printed, p0)


def test_lemma_3_bounds_the_excess_risk_of_random_scores() -> None:
    rng = np.random.default_rng(0)
    for surrogate in (SQUARE, BOOSTING):
        for p0 in WEIGHTS:
            eta = rng.uniform(0.01, 0.99, (50, 7))
            score = surrogate.minimizer(eta, p0) + rng.normal(scale=0.7, size=eta.shape)
            wrong = (score >= 0) != theory.bayes_rule(eta, p0)
            hamming = (np.abs(eta - p0) * wrong).sum(axis=1).mean()
            least = surrogate.risk(eta, surrogate.minimizer(eta, p0), p0)
            excess = (surrogate.risk(eta, score, p0) - least).sum(axis=1).mean()
            assert hamming <= theory.excess_risk_bound(surrogate, float(excess), eta.shape[1]) + 1e-12


def test_the_bayes_rule_has_the_least_weighted_hamming_risk_in_simulation() -> None:
    rng = np.random.default_rng(1)
    eta, p0 = rng.uniform(size=400), 0.2
    draws = rng.random((3000, eta.size)) < eta
    rule = theory.bayes_rule(eta, p0)

    def risk(labels: Any) -> float:
        return float(np.where(labels, p0 * ~draws, (1 - p0) * draws).sum(axis=1).mean())

    for other in (eta >= 0.5, eta >= 0.1, eta >= 0.3, np.ones_like(rule), np.zeros_like(rule)):
        assert risk(rule) < risk(other)


def test_theorem_3_is_theorem_1_with_the_complexities_of_the_appendix() -> None:
    k, n_labels, n_rows, radius, delta = 5, 274, 9270, 20.0, 0.1
    p0 = 2 * k / n_labels
    r0, r1 = radius * math.sqrt(n_labels / n_rows), radius * math.sqrt(k / n_rows)
    deviation = 8 * k / math.sqrt(n_rows) * math.sqrt(math.log(1 / delta))
    expected = 4 * p0 * r0 + 4 * r1 + deviation  # p1 <= 1, as the theorem takes it
    assert theory.risk_bound(k, n_labels, n_rows, radius, delta=delta) == pytest.approx(expected)
    assert theory.radius_scale(9) == 3
