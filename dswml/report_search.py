"""The sections of a report on a search that has not ended: what was asked for, and how far the grid is."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from .charts import Axis, Line, Series, chart
from .progress import format_seconds
from .report_page import Section, facts, table
from .report_sections import data_lines, or_nothing, versions_lines
from .run_file import SearchState

__all__ = ["grid", "searching"]

Array = npt.NDArray[Any]


def searching(state: SearchState) -> Section:
    """What is searched on what."""
    request, info = state.request, state.info
    radii = ", ".join(f"{radius:g}" for radius in request["radii"])
    folds = "none: all rows" if not request["folds"] else f"{request['folds']}"
    over = all(point["solved"].all() for point in state.points)
    where = "every point is solved" if over else f"before iteration {state.iteration}"
    lines = [
        *data_lines(info, info["data"]["n_features"], info["data"]["n_labels"]),
        ("Radii", radii),
        ("Weights", ", ".join(str(weights) for weights in request["weights"])),
        ("Folds", folds + (", stratified" if request["stratify"] else "")),
        ("Tolerance", f"{request['tol']:g}, of the relative gap of every point"),
        ("Seed", f"{request['seed']}"),
        ("State", f"checkpoint {state.number}, {where}"),
        ("Work", f"passes over X: {state.passes}; reads for the next iteration: {state.reads_since}"),
        ("Time", format_seconds(state.seconds)),
        *versions_lines(info),
    ]
    return Section("search", "What is searched", facts("What is searched", lines))


def grid(state: SearchState) -> Section | None:
    """Objective and gap of the points that were looked at."""
    points = [point for point in state.points if np.isfinite(point["objective"]).any()]
    if not points:
        return None
    curves = [list(group) for _, group in groupby(points, key=lambda point: point["weights"])]

    def means(group: list[dict[str, Any]], name: str) -> Array:
        return np.array([point[name][np.isfinite(point[name])].mean() for point in group])

    def figure(title: str, description: str, name: str, lines: list[Line], **axis: bool) -> str:
        series = [
            Series(
                f"weights {group[0]['weights']}",
                [point["radius"] for point in group],
                means(group, name),
                1 + number % 4,
                hollow=number // 4 % 2 == 1,
                titles=[
                    f"radius {point['radius']:g}: {point['solved'].sum()} folds solved" for point in group
                ],
            )
            for number, group in enumerate(curves)
        ]
        radii = np.array(state.request["radii"])
        x = Axis.around("radius", radii, log=bool(radii.max() > 10 * radii.min()))
        goals = [line.at for line in lines]
        return chart(
            title,
            description,
            x,
            Axis.around(title.lower(), means(points, name), goals, **axis),
            series,
            lines,
        )

    certified = "certified" if state.request["assemble"] else "estimated"
    goal = [Line("asked for", state.request["tol"])] if state.request["tol"] > 0 else []
    figures = figure("Objective", "Mean over the folds that were looked at.", "objective", []) + figure(
        "Relative gap", f"Mean over these folds, {certified}.", "relative_gap", goal, log=True
    )
    lines = [
        (f"{point['radius']:g}", str(point["weights"]), f"{point['p0']:.4g}",
         f"{point['solved'].sum()} of {point['solved'].size}", f"{objective:#.6g}", f"{gap:.1e}",
         or_nothing(point["rank"][point["solved"]].mean() if point["solved"].any() else None, ".0f"))
        for point, objective, gap in zip(points, means(points, "objective"), means(points, "relative_gap"),
                                         strict=True)
    ]  # fmt: skip
    header = ("radius", "weights", "p0", "folds solved", "objective", f"gap, {certified}", "rank")
    note = (
        ""
        if len(points) == len(state.points)
        else (
            f"<p>{len(state.points) - len(points)} of {len(state.points)} points were not looked at yet.</p>"
        )
    )
    return Section(
        "grid",
        "Points of the grid",
        f'<div class="charts">{figures}</div>{note}{table("Means over folds", header, lines)}',
    )
