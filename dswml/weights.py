"""The weights of active and inactive labels, and what a score says about a probability."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError

__all__ = ["default_threshold", "label_probability", "resolve_p0"]

Array = npt.NDArray[Any]


def resolve_p0(weights: Any, k_hat: int, n_labels: int, *, warn: bool = True) -> float:
    """Return p0, the weight of inactive labels; active ones weigh p1 = 1 - p0.

    Parameters
    ----------
    weights : {"sparsity", "uniform"} or float
        "sparsity" is the paper's p0 = 2 K / L, "uniform" is 1/2, a number is p0 itself.
    k_hat : int
        Largest number of labels on a row.
    n_labels : int
        L.
    warn : bool
        Whether to warn of a p0 that favours zeros.

    Examples
    --------
    >>> resolve_p0("sparsity", k_hat=5, n_labels=200)
    0.05
    """
    if not n_labels:
        raise UsageError(
            "the data have no labels: they can be predicted ('dswml predict'), but nothing learnt from them"
        )
    if weights == "uniform":
        return 0.5
    if weights == "sparsity":
        p0 = 2 * k_hat / n_labels
        if p0 >= 1:
            raise UsageError(
                f"weights='sparsity' needs 2K < L, but K = {k_hat} and L = {n_labels} make p0 = 2K/L = "
                f"{p0:.3g}: use weights='uniform' or a number between 0 and 1"
            )
        if p0 >= 0.5 and warn:
            warnings.warn(
                f"with K = {k_hat} and L = {n_labels} the sparsity weights p0 = {p0:.3g}, p1 = {1 - p0:.3g} "
                "favour predicting nothing; weights='uniform' or a smaller number may serve better",
                stacklevel=2,
            )
        if p0 > 0:
            return p0
        raise UsageError("Y has no active label at all, so K = 0: check the labels, or give weights a number")
    if isinstance(weights, float | np.floating) and 0 < float(weights) < 1:
        return float(weights)
    raise UsageError(
        "The 'weights' parameter of SparseWeightedClassifier must be 'sparsity', 'uniform' or a float in the "
        f"range (0.0, 1.0). Got {weights!r} instead."
    )


def default_threshold(loss: str) -> float:
    """Scores from here on predict a label: 1/2 for labels in {0, 1}, 0 for labels in {-1, 1}."""
    return 0.5 if loss == "square" else 0.0


def label_probability(scores: Array, p0: float, loss: str = "square") -> Array:
    """Turn scores into P(Y = 1 | x), by inverting the population minimiser of the weighted loss.

    Examples
    --------
    >>> label_probability(np.array([0.0, 0.5, 1.0]), p0=0.1).round(3).tolist()
    [0.0, 0.1, 1.0]
    """
    p1 = 1 - p0
    if loss == "square":
        score = np.clip(scores, 1e-9, 1 - 1e-9)  # never impossible, never certain
        odds_active, odds_inactive = p0 * score, p1 * (1 - score)
        probability: Array = odds_active / (odds_active + odds_inactive)
        return probability
    shifted = 2 * scores + math.log(p0 / p1)
    return np.asarray(0.5 * (1 + np.tanh(shifted / 2)))
