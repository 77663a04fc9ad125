"""The paper's bounds and surrogates as numbers: Theorem 3, Lemma 3, Example 1 and Proposition 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BOOSTING", "SQUARE", "Surrogate", "bayes_rule", "excess_risk_bound", "radius_scale", "risk_bound"]

Array = npt.NDArray[Any]


def risk_bound(
    k: int, n_labels: int, n_rows: int, radius: float, *, lipschitz: float = 1.0, delta: float = 0.05
) -> float:
    """Excess risk that Theorem 3 allows the empirical minimiser, with probability 1 - delta.

    Substituting p0 = 2K/L and R_0 <= radius sqrt(L/N) into Theorem 1 gives 2K / sqrt(NL) where the
    theorem prints K / sqrt(NL); the larger, derived constant is used.

    Examples
    --------
    >>> round(risk_bound(5, 274, 9270, radius=math.sqrt(5)), 3)
    0.983
    """
    complexity = math.sqrt(k / n_rows) + 2 * k / math.sqrt(n_rows * n_labels)
    deviation = 8 * k / math.sqrt(n_rows) * math.sqrt(math.log(1 / delta))
    return 4 * radius * lipschitz * complexity + deviation


def radius_scale(k: int) -> float:
    """Radius of the order at which Theorem 3's complexity term is as large as its deviation: sqrt(K)."""
    return math.sqrt(k)


def bayes_rule(eta: Array, p0: float) -> Array:
    """Labels that minimise the weighted Hamming risk: those with P(Y = 1 | x) >= p0 (Proposition 3)."""
    return np.asarray(np.asarray(eta) >= p0)


@dataclass(frozen=True)
class Surrogate:
    """A convex phi with the minimiser of its weighted risk and the constants of Lemma 3.

    Attributes
    ----------
    phi : callable
    minimizer : callable
        (eta, p0) -> the score that minimises p1 eta phi(f) + p0 (1 - eta) phi(-f).
    c, s : float
        |p0 - eta|^s <= c^s (risk of the score 0 - least risk).
    """

    phi: Callable[[Array], Array]
    minimizer: Callable[[Array, float], Array]
    c: float = math.sqrt(2)
    s: float = 2.0

    def risk(self, eta: Array, score: Array, p0: float) -> Array:
        """Weighted risk of one label at P(Y = 1 | x) = eta."""
        return (1 - p0) * eta * self.phi(score) + p0 * (1 - eta) * self.phi(-score)

    def excess_of_zero(self, eta: Array, p0: float) -> Array:
        """How much the score 0 loses to the minimiser."""
        return self.risk(eta, np.zeros_like(eta), p0) - self.risk(eta, self.minimizer(eta, p0), p0)


def excess_risk_bound(surrogate: Surrogate, excess: float, n_labels: int) -> float:
    """Weighted Hamming excess risk that Lemma 3 allows, given the surrogate's excess risk.

    Examples
    --------
    >>> round(excess_risk_bound(SQUARE, excess=0.01, n_labels=100), 3)
    1.414
    """
    labels = float(n_labels) ** (1 - 1 / surrogate.s)
    return float(surrogate.c * labels * excess ** (1 / surrogate.s))


def _square_minimizer(eta: Array, p0: float) -> Array:
    return (eta - p0) / (eta * (1 - 2 * p0) + p0)


def _boosting_minimizer(eta: Array, p0: float) -> Array:
    return 0.5 * np.log((1 - p0) * eta / (p0 * (1 - eta)))


#: phi(v) = (1 - v)^2.
SQUARE = Surrogate(lambda v: (1 - v) ** 2, _square_minimizer)
#: phi(v) = exp(-v).
BOOSTING = Surrogate(lambda v: np.exp(-v), _boosting_minimizer)
