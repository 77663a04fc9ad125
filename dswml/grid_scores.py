"""Metrics of every point of a grid on the held-out rows of every fold, in one read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import metrics
from .blocks import RowBlock
from .features import BlockSource
from .folds import Fold
from .sweep import Partial, combine

__all__ = ["HISTOGRAM", "RANKED", "SCORES", "Scoring", "named_scores", "score_block"]

Array = npt.NDArray[Any]

#: The sums of `metrics.score_histogram_block`.
HISTOGRAM = ("active_scores", "inactive_scores")
#: Scores that can choose; those of RANKED are written P@1, P@3, ...
SCORES = (
    *(
        f"{average}_{name}"
        for average in ("micro", "macro", "samples")
        for name in ("precision", "recall", "f1")
    ),
    "micro_auc",
    "best_f1",
    "coverage",
)
RANKED = ("P", "R", "nDCG")
#: Entries of a score tile.
TILE_ENTRIES = 2**21


@dataclass(frozen=True)
class Scoring:
    """What every row block is asked for: metrics of all points of a fold on its held-out rows."""

    source: BlockSource
    folds: tuple[Fold, ...]
    points: tuple[tuple[tuple[Array | None, Array], ...], ...]
    threshold: float
    k: int
    edges: Array


def score_block(block: RowBlock, job: Scoring) -> Partial:
    """Metrics of the held-out rows of one block, for every fold and point."""
    features, labels = job.source.features(block), job.source.labels(block)
    out: Partial = {"rows_read": np.array(block.n_rows)}
    for number, (fold, points) in enumerate(zip(job.folds, job.points, strict=True)):
        rows = fold.held_out_rows(block)
        held_out, truth = features.subset(rows), labels[rows]
        for at, (u, mt) in enumerate(points):
            assert u is not None
            z = held_out.times(u).astype(np.float64, copy=False)
            parts = [
                _score_piece(truth[piece], z[piece] @ mt.T, job)
                for piece in _pieces(rows.size, labels.shape[1])
            ]
            sums = combine(parts) if len(parts) > 1 else parts[0]
            out.update({f"{number}:{at}:{name}": value for name, value in sums.items()})
    return out


def _pieces(n_rows: int, n_labels: int) -> list[slice]:
    step = max(1, TILE_ENTRIES // n_labels)
    return [slice(start, min(start + step, n_rows)) for start in range(0, max(n_rows, 1), step)]


def _score_piece(truth: Any, scores: Array, job: Scoring) -> Partial:
    scores = np.ascontiguousarray(scores)
    return {
        **metrics.label_block(truth, metrics.select_at_threshold(scores, job.threshold)),
        **metrics.ranking_block(truth, metrics.top_k(scores, job.k)[0], coverage=False),
        **metrics.score_histogram_block(truth, scores, job.edges),
    }


def named_scores(sums: Partial, edges: Array, p0: float) -> dict[str, float]:
    """Return the metrics by their names in the table, from the sums of one point on one fold."""
    return {
        **metrics.label_scores(sums, p0=p0),
        **metrics.ranking_scores(sums),
        "micro_auc": metrics.auc_from_histogram(sums, edges).value,
        "best_f1": metrics.threshold_curve(sums, edges).best()[1],
    }
