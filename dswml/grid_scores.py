"""Metrics of every point of a grid on the held-out rows of every fold, in one read.

Where the rule that chooses labels is tuned, a fold is scored with the one that is best on the held-out
rows of all other folds, so that the rows of a score had no say in its rule. The rule of the point, for
a model fitted on all rows, is the best on the held-out rows of all folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from . import metrics
from .blocks import RowBlock
from .errors import UsageError
from .executor import Executor, share_out
from .features import BlockSource, Features, some_rows
from .folds import Fold
from .ranking import inverse_propensities
from .rules import RULE_SCORES, Candidates, plan_candidates
from .scoring import Rule
from .stored import Dataset
from .sweep import Partial, combine

__all__ = ["RANKED", "SCORES", "HeldOut", "Scoring", "plan_scoring", "score_grid"]

Array = npt.NDArray[Any]
#: U and M^T of a point.
Factors = tuple[Array | None, Array]

#: Scores that can choose; those of RANKED are written P@1, P@3, ...
SCORES = (*RULE_SCORES, "micro_auc", "best_f1")
RANKED = ("P", "R", "nDCG", "PSP", "PSnDCG")
#: Training rows without which there are no propensities.
FEWEST_ROWS = 3
#: Entries of a score tile.
TILE_ENTRIES = 2**21


@dataclass(frozen=True)
class Scoring:
    """How held-out rows are scored.

    Attributes
    ----------
    score : str
        The metric that chooses the point.
    rules : Candidates
        The rules to choose from.
    k : int
        Length of the rankings.
    edges : ndarray
        Of the histogram of scores, for the AUC and the threshold curve.
    together : int
        Number of points that are scored in one read.
    nbytes : int
        Size of what a task returns.
    """

    score: str
    rules: Candidates
    k: int
    edges: Array
    together: int
    nbytes: int


def plan_scoring(
    data: Dataset, folds: int, points: int, *, score: str, threshold: float | str, k: int, room: float
) -> Scoring:
    """Check what is asked for, and decide how many points are scored in one read.

    Parameters
    ----------
    data : Dataset
    folds, points : int
        Size of the grid.
    score, threshold, k
        As for `dswml.tuning.tune`.
    room : float
        Bytes that a task may return: one point a read takes more only where nothing else is possible.
    """
    n_labels = data.n_labels
    name, _, depth = score.partition("@")
    k = min(k, n_labels)
    if (
        name in RANKED
        and depth.isdecimal()
        and score == f"{name}@{int(depth)}"
        and 1 <= int(depth) <= n_labels
    ):
        k = max(k, int(depth))
    elif score not in SCORES:
        raise UsageError(
            f"there is no score {score!r}: choose one of {', '.join(SCORES)}, or "
            f"{', '.join(f'{name}@k' for name in RANKED)} with k from 1 to {n_labels}"
        )
    rules = plan_candidates(threshold, score, n_labels, data.k_hat, room / folds)
    edges = metrics.uniform_edges()
    each = folds * (rules.nbytes + 16 * (edges.size + 1) + 64 * k)
    together = int(min(max(room // each, 1), points))
    return Scoring(score, rules, k, edges, together, together * each)


@dataclass(frozen=True)
class HeldOut:
    """What the held-out rows say of a point.

    Attributes
    ----------
    scores : dict of str to ndarray (folds,)
        What is known of every metric, by name.
    rule : Rule
        The best one on the held-out rows of all folds, or the one that was given.
    curve : ThresholdCurve
        Over the held-out rows of all folds.
    """

    scores: dict[str, Array]
    rule: Rule
    curve: metrics.ThresholdCurve


@dataclass(frozen=True)
class _Job:
    """What every row block is asked for: counts of some points of every fold on its held-out rows."""

    source: BlockSource
    folds: Sequence[Fold]
    points: Sequence[Sequence[Factors]]
    inverse_propensity: Sequence[Array | None]
    scoring: Scoring


def score_grid(
    executor: Executor,
    source: BlockSource,
    folds: Sequence[Fold],
    points: Sequence[Sequence[Factors]],
    p0s: Sequence[float],
    training: Sequence[tuple[Array, int]],
    scoring: Scoring,
) -> tuple[list[HeldOut], int]:
    """Score all points, and return the number of rows that were read too.

    Parameters
    ----------
    executor, source, folds
        Who reads what.
    points : sequence (folds) of sequences (points) of U and M^T
    p0s : sequence (points) of float
    training : sequence (folds) of label counts and number of rows
        Of the rows that each fold was trained on: the propensities of labels follow from them.
    scoring : Scoring
    """
    needed = scoring.score.startswith("PS")
    weights = [inverse_propensities(*own) if needed or own[1] >= FEWEST_ROWS else None for own in training]
    job = _Job(source, folds, points, weights, scoring)
    found: list[HeldOut] = []
    rows_read = 0
    for first in range(0, len(p0s), scoring.together):
        group = slice(first, first + scoring.together)
        some = replace(job, points=[own[group] for own in points])
        sums = executor.reduce(_score_block, combine, source.data.blocks, some)
        rows_read += int(sums.pop("rows_read"))
        parts: dict[str, Partial] = {}
        for name, value in sums.items():
            place, _, own_name = name.rpartition(":")
            parts.setdefault(place, {})[own_name] = value
        for at, p0 in enumerate(p0s[group]):
            found.append(_held_out([parts[f"{fold}:{at}"] for fold in range(len(folds))], p0, scoring))
    return found, rows_read


def _held_out(parts: list[Partial], p0: float, scoring: Scoring) -> HeldOut:
    """Tune the rule for every fold on all others, and score the fold with it."""
    rules, pooled = scoring.rules, combine(parts)
    best = rules.best(pooled, p0)
    scores = []
    for fold, own in enumerate(parts):
        rule = rules.best(combine([*parts[:fold], *parts[fold + 1 :]]), p0) if rules.tuned else best
        scores.append(_named_scores(own, rule, p0, scoring))
    return HeldOut(
        {name: np.array([fold[name] for fold in scores]) for name in scores[0]},
        best,
        metrics.threshold_curve(pooled, scoring.edges),
    )


def _named_scores(sums: Partial, rule: Rule, p0: float, scoring: Scoring) -> dict[str, float]:
    """Return the metrics by their names in the table, from the sums of one point on one fold."""
    rules, edges = scoring.rules, scoring.edges
    curves = metrics.label_curves(rules.at(sums, rule), rules.n_labels, p0=p0)
    return {
        **{name: float(values[0]) for name, values in curves.items()},
        **metrics.ranking_scores(sums),
        "micro_auc": metrics.auc_from_histogram(sums, edges).value,
        "best_f1": metrics.threshold_curve(sums, edges).best()[1],
    }


def _score_block(block: RowBlock, job: _Job) -> Partial:
    """Counts of the held-out rows of one block, for every fold and point."""
    features, labels = job.source.features(block), job.source.labels(block)
    out: Partial = {"rows_read": np.array(block.n_rows)}
    for number, (fold, points) in enumerate(zip(job.folds, job.points, strict=True)):
        rows = fold.held_out_rows(block)
        held_out, truth = features.subset(rows), some_rows(labels, rows)
        pieces = [(piece, truth[piece]) for piece in _pieces(rows.size, labels.shape[1])]
        count = partial(_score_point, held_out, pieces, job.inverse_propensity[number], job.scoring)
        for at, sums in enumerate(share_out(count, points)):
            out.update({f"{number}:{at}:{name}": value for name, value in sums.items()})
    return out


def _score_point(
    held_out: Features,
    pieces: Sequence[tuple[slice, Any]],
    inverse_propensity: Array | None,
    scoring: Scoring,
    point: Factors,
) -> Partial:
    """Counts of one point on some rows, whose true labels come in pieces."""
    u, mt = point
    assert u is not None
    z = held_out.times(u).astype(np.float64, copy=False)
    parts = [_score_piece(truth, z[piece] @ mt.T, inverse_propensity, scoring) for piece, truth in pieces]
    return combine(parts) if len(parts) > 1 else parts[0]


def _pieces(n_rows: int, n_labels: int) -> list[slice]:
    step = max(1, TILE_ENTRIES // n_labels)
    return [slice(start, min(start + step, n_rows)) for start in range(0, max(n_rows, 1), step)]


def _score_piece(truth: Any, scores: Array, inverse_propensity: Array | None, scoring: Scoring) -> Partial:
    scores = np.ascontiguousarray(scores)
    top = metrics.top_k(scores, max(scoring.k, scoring.rules.top_k))[0]
    return {
        **scoring.rules.count(truth, scores, top),
        **metrics.ranking_block(truth, top[:, : scoring.k], inverse_propensity, coverage=False),
        **metrics.score_histogram_block(truth, scores, scoring.edges),
    }
