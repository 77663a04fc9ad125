"""The table of a search: what was reached at every point of the grid, and the two choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .roc import ThresholdCurve
from .rules import direction
from .scoring import Rule

__all__ = ["GridPoint", "Tuned"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class GridPoint:
    """One radius and weighting: what was reached on each fold, and the held-out scores.

    Attributes
    ----------
    radius : float
    weights : str or float
        As given.
    p0 : float
        What the weights are on all rows; sparsity weights of a fold are those of its training rows.
    objective, relative_gap : ndarray (folds,)
        Training objective and relative gap on each fold.
    rank : ndarray (folds,)
    scores : dict of str to ndarray (folds,)
        Metrics on the held-out rows of each fold, at the given threshold or with the rule that is best on
        the other folds; "best_f1" at the best threshold. Where a rule is tuned, "macro" scores and coverage
        are known if one of them is chosen by, and with thresholds label by label, "samples" scores are not.
    rule : Rule or None
        How a model fitted on all rows is to predict; None without folds.
    curve : ThresholdCurve or None
        True and false positives over all held-out rows against the threshold; None without folds.
    certified : bool
        Whether the gaps are certified; else they are estimates, as a rule 0.6 to 1 times the true ones.
    """

    radius: float
    weights: str | float
    p0: float
    objective: Array
    relative_gap: Array
    rank: Array
    scores: dict[str, Array]
    rule: Rule | None
    curve: ThresholdCurve | None
    certified: bool

    @property
    def threshold(self) -> float:
        """Best threshold for micro-F1 over all held-out rows; NaN without folds."""
        return float("nan") if self.curve is None else float(self.curve.best()[0])

    def mean(self, score: str) -> float:
        """Mean of a metric over folds."""
        return float(self.scores[score].mean())

    def standard_error(self, score: str) -> float:
        """Standard error of that mean."""
        values = self.scores[score]
        return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


@dataclass(frozen=True)
class Tuned:
    """The table of a search, what was asked for, the number of reads of X it took, and its two choices."""

    points: tuple[GridPoint, ...]
    score: str
    threshold: float | str
    passes: int
    iterations: int

    @property
    def certified(self) -> bool:
        """Whether the gaps of all points are certified."""
        return all(point.certified for point in self.points)

    @property
    def best(self) -> GridPoint:
        """The point with the best mean score, the least of a loss; the smaller radius among equals."""
        return max(self.points, key=lambda point: (self._merit(point), -point.radius))

    @property
    def one_standard_error(self) -> GridPoint:
        """The smallest radius whose mean is within a standard error of the best."""
        least = self._merit(self.best) - self.best.standard_error(self.score)
        close = [point for point in self.points if not self._merit(point) < least]
        return min(close, key=lambda point: (point.radius, -self._merit(point)))

    def _merit(self, point: GridPoint) -> float:
        """What to choose by: the least where there is no score, or a fold was never solved."""
        mean = direction(self.score) * point.mean(self.score)
        return mean if math.isfinite(mean) and np.isfinite(point.relative_gap).all() else -math.inf
