"""The section of a report on labels: how well each is predicted, by its frequency and by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .charts import Axis, Series, chart
from .evaluation import Evaluation
from .evaluation_tables import percent
from .model import Model
from .report_page import Section, counted, table

__all__ = ["labels"]

Array = npt.NDArray[Any]

#: Most labels in the chart, of which some are the most frequent, labels in a list, and characters of a name.
MAX_MARKS, FREQUENT, LISTED, NAME_LENGTH = 800, 100, 10, 60
#: Rows of the data that a label must have to be listed as well or badly predicted.
FEWEST_ROWS = 5
#: Characters that turn the direction of what follows them.
_BIDI = dict.fromkeys([0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


def labels(model: Model, found: Evaluation, names: Sequence[str] | None) -> Section:
    """How well labels are predicted by how frequent they are, and the best and worst of them by name."""
    by_label = found.labels
    support, f1 = by_label["support"], by_label["f1"]
    trained = model.label_counts
    counts = support if trained is None else trained
    known = np.flatnonzero((support > 0) & (counts > 0))
    content = ""
    if known.size:
        chosen = known
        if known.size > MAX_MARKS:
            frequent = known[np.argsort(-counts[known], kind="stable")]
            some = np.random.default_rng(0).choice(frequent[FREQUENT:], MAX_MARKS - FREQUENT, replace=False)
            chosen = np.sort(np.concatenate([frequent[:FREQUENT], some]))
        where = "of the data" if trained is None else "trained on"
        of = (
            counted(known.size, "label")
            if chosen is known
            else f"The {FREQUENT} most frequent and {MAX_MARKS - FREQUENT} others of {known.size:,} labels"
        )
        titles = [
            f"{_name(names, i)}: {counted(counts[i], 'row')} {where}, F1 {f1[i]:.3f}" for i in chosen.tolist()
        ]
        middle, means = _means_by_frequency(counts[known], f1[known])
        figure = chart(
            "F1 by frequency of the label",
            f"{of} with rows in the data, and the mean over all labels of about the same frequency.",
            Axis.around(f"rows {where}", counts[known], log=True),
            Axis.around("F1", f1[chosen], means, zero=True),
            [
                Series("a label", counts[chosen], f1[chosen], line=False, faint=True, titles=titles),
                Series("mean", middle, means, 2),
            ],
        )
        content = f'<div class="charts">{figure}</div>'

    def listed(caption: str, order: Array) -> str:
        header = ["label", "F1", "precision", "recall", "rows", "predicted"]
        lines = [
            (_name(names, i), *(percent(by_label[name][i]) for name in ("f1", "precision", "recall")),
             f"{support[i]:,}", f"{by_label['predicted'][i]:,}")
            for i in order.tolist()
        ]  # fmt: skip
        return table(caption, header, lines, long=True)

    fewest = FEWEST_ROWS if np.count_nonzero(support >= FEWEST_ROWS) >= 2 * LISTED else 1
    there = np.flatnonzero(support >= fewest)
    best = there[np.lexsort((-support[there], -f1[there]))]
    worst = there[np.lexsort((-support[there], f1[there]))]
    if there.size <= 2 * LISTED:
        return Section("labels", "Labels", content + listed("Labels, best first", best))
    few = counted(fewest, "row")
    note = f"<p>Of the labels with at least {few} in the data; of equals the more frequent first.</p>"
    lists = listed("Best labels", best[:LISTED]) + listed("Worst labels", worst[:LISTED])
    return Section("labels", "Labels", f'{content}{note}<div class="tables">{lists}</div>')


def _means_by_frequency(counts: Array, f1: Array) -> tuple[Array, Array]:
    """Return the geometric middle and the mean F1 of groups of labels of about the same frequency."""
    low, high = np.log(counts.min()), np.log(counts.max())
    edges = np.linspace(low, high, min(9, 2 + int(2 * (high - low))))
    group = np.clip(np.digitize(np.log(counts), edges) - 1, 0, edges.size - 1)
    there = np.unique(group)
    middle = [np.exp(np.log(counts[group == each]).mean()) for each in there]
    return np.array(middle), np.array([f1[group == each].mean() for each in there])


def _name(names: Sequence[str] | None, label: int) -> str:
    name = f"label {label}" if names is None else names[label].translate(_BIDI).strip()
    name = name or f"(empty) label {label}"
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
