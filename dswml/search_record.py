"""What a model remembers of the search that chose it: the grid in a few kilobytes of JSON."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .roc import ThresholdCurve

if TYPE_CHECKING:
    from .model import Model
    from .tuning import GridPoint, Tuned

__all__ = ["curve_of", "searched", "thinned"]

Array = npt.NDArray[Any]

#: Most points of the grid, and of the threshold curve, that are kept.
MAX_POINTS, MAX_CURVE = 400, 150


def searched(model: Model, tuned: Tuned, chosen: GridPoint) -> Model:
    """Return the model with the rule that was chosen, and the table of its search in ``info["search"]``.

    Of a grid with very many points some are left out, but neither choice. The threshold curve is that of
    the chosen point over the held-out rows of all folds.
    """
    step = -(-len(tuned.points) // MAX_POINTS)
    choices = (chosen, tuned.best, tuned.one_standard_error)
    kept = [
        point
        for place, point in enumerate(tuned.points)
        if place % step == 0 or any(point is c for c in choices)
    ]
    numbers = {id(point): number for number, point in enumerate(kept)}
    found: dict[str, Any] = {
        "score": tuned.score,
        "threshold": tuned.threshold,
        "folds": int(chosen.objective.size),
        "passes": tuned.passes,
        "n_points": len(tuned.points),
        "gaps_certified": tuned.certified,
        "chosen": numbers[id(chosen)],
        "best": numbers[id(tuned.best)],
        "one_standard_error": numbers[id(tuned.one_standard_error)],
        "points": [_described(point, tuned.score) for point in kept],
    }
    if chosen.curve is not None:
        curve = thinned(chosen.curve, MAX_CURVE)
        found["micro_auc"] = _area(chosen.curve)
        found["curve"] = {
            "thresholds": curve.thresholds[1:-1].tolist(),
            "tp": curve.tp.tolist(),
            "fp": curve.fp.tolist(),
        }
    if chosen.rule is not None:
        model = model.with_threshold(chosen.rule.threshold, top_k=chosen.rule.top_k)
        found["rule"] = str(chosen.rule)
    return replace(model, info={**model.info, "search": found})


def curve_of(search: dict[str, Any]) -> ThresholdCurve | None:
    """Return the threshold curve that `searched` kept."""
    kept = search.get("curve")
    if kept is None:
        return None
    tp, fp = np.array(kept["tp"], dtype=np.int64), np.array(kept["fp"], dtype=np.int64)
    thresholds = np.concatenate([[-np.inf], kept["thresholds"], [np.inf]])
    return ThresholdCurve(thresholds, tp, fp, int(tp[0]), int(fp[0]))


def thinned(curve: ThresholdCurve, number: int) -> ThresholdCurve:
    """Return so many points of a curve, spread evenly along its course, its ends and its best one.

    Examples
    --------
    >>> thresholds = np.concatenate([[-np.inf], np.linspace(0, 1, 1001), [np.inf]])
    >>> tp = np.concatenate([[1000], np.arange(1000, -1, -1), [0]])
    >>> curve = thinned(ThresholdCurve(thresholds, tp, tp // 2, 1000, 500), 11)
    >>> curve.thresholds.size <= 14, curve.best()
    (True, (0.0, 0.8))
    """
    finite = curve.thresholds[1:-1]
    if finite.size <= number:
        return curve
    span = float(finite[-1] - finite[0]) or 1.0
    ways = (curve.precision, curve.recall, curve.f1, curve.false_positive_rate)
    course = np.stack([finite / span, *(way()[1:-1] for way in ways)])
    length = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(course)).sum(axis=0))])
    places = np.searchsorted(length, np.linspace(0, length[-1], number))
    best = np.flatnonzero(finite == curve.best()[0])
    inner = 1 + np.unique(np.concatenate([places, best]))
    kept = np.concatenate([[0], inner, [curve.thresholds.size - 1]])
    return replace(curve, thresholds=curve.thresholds[kept], tp=curve.tp[kept], fp=curve.fp[kept])


def _area(curve: ThresholdCurve) -> list[float]:
    """Return the area under the ROC curve of all held-out rows as one, and the bound on its error."""
    across, up = -np.diff(curve.false_positive_rate()), curve.recall()
    return [float(across @ (up[1:] + up[:-1]) / 2), float(across @ -np.diff(up) / 2)]


def _described(point: GridPoint, score: str) -> dict[str, Any]:
    gap = float(point.relative_gap.max())
    return {
        "radius": point.radius,
        "weights": point.weights,
        "p0": point.p0,
        "mean": _number(point.mean(score)),
        "standard_error": _number(point.standard_error(score)),
        "best_f1": _number(point.mean("best_f1")),
        "threshold": _number(point.threshold),
        "rank": float(point.rank.mean()),
        "relative_gap": _number(gap),
    }


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
