"""An evaluation in tables for people: what the command line and the report show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .evaluation import Evaluation

__all__ = ["Table", "percent", "ranking_table", "set_table", "summary"]

#: Titles of the columns, and lines: a name and its cells.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def percent(value: float) -> str:
    """Write a fraction in per cent, if it is one."""
    return "not defined" if math.isnan(value) else f"{100 * value:.2f}"


def set_table(found: Evaluation) -> Table:
    """Precision, recall and F1 in per cent, over all entries, by label and by row."""
    names = ("precision", "recall", "f1")
    lines = [
        (average, *(percent(found.scores[f"{average}_{name}"]) for name in names))
        for average in ("micro", "macro", "samples")
    ]
    return ("average", "precision", "recall", "F1"), lines


def ranking_table(found: Evaluation, k: int) -> Table:
    """Metrics of the rankings in per cent, at a few depths up to k."""
    depth = sum(name.startswith("P@") for name in found.scores)
    places = sorted({place for place in (1, 3, 5, k) if place <= depth} | {depth})
    lines = [
        (name, *(percent(found.scores[f"{name}@{place}"]) for place in places))
        for name in ("P", "nDCG", "R", "PSP", "PSnDCG")
        if f"{name}@1" in found.scores
    ]
    return ("metric", *(f"@{place}" for place in places)), lines


def summary(found: Evaluation, way_out: str) -> list[tuple[str, str]]:
    """Names and values of everything else; ``way_out`` says how to get the propensities where they lack."""
    scores, auc = found.scores, found.auc
    edges = f"{found.edges['number']:,} edges, {found.edges['kind']}"
    exact = " exact" if auc.error_bound == 0 else f" +- {_bound(100 * auc.error_bound)}"
    lines = [
        ("micro AUC", f"{percent(auc.value)}{'' if math.isnan(auc.value) else exact} ({edges})"),
        ("best micro F1", f"{percent(found.best_f1)} at the threshold {found.best_threshold:.4g}"),
        ("Hamming loss", f"{100 * scores['hamming_loss']:.4g}"),
        ("weighted Hamming loss", f"{scores['weighted_hamming_loss']:.4g} a row (p0 = {found.p0:.4g})"),
        ("coverage", f"{percent(scores['coverage'])} (labels predicted rightly at least once)"),
        (
            "labels a row",
            f"{scores['output_sparsity']:.4g} predicted, {scores['label_cardinality']:.4g} true",
        ),
    ]
    if found.propensity is None:
        lines.append(("PSP, PSnDCG", f"left out: {way_out}"))
    return lines


def _bound(value: float) -> str:
    return f"{value:.1g}" if value < 0.01 else f"{value:.2f}"
