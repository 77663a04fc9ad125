"""The page of all benchmarks, from their JSON files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dswml.charts import Axis, Line, Series, chart
from dswml.report_page import Section, page, table, tiles

#: Parts of a flame graph below this share are not drawn.
LEAST = 0.004
WIDTH, HEIGHT = 860, 17


def benchmark_page(results: Sequence[dict[str, Any]]) -> str:
    """Return the page: the goals first, then every benchmark with its tables and charts."""
    goals = [goal for result in results for goal in result["goals"]]
    met = sum(goal["met"] is True for goal in goals)
    missed = sum(goal["met"] is False for goal in goals)
    when = [
        f"{each['title']}: {each['machine']['when']}, load {each['machine']['load']:g}" for each in results
    ]
    cores = results[0]["machine"]["cores"] if results else 0
    packages = results[0]["machine"]["packages"] if results else {}
    top = tiles(
        [
            ("goals met", str(met)),
            ("goals missed", str(missed)),
            ("not measured", str(len(goals) - met - missed)),
        ]
    )
    notes = [*when, ", ".join(f"{name} {number}" for name, number in packages.items())]
    lead = f"Ratios measured side by side with {cores} cores: medians, with the extremes in brackets."
    return page("dswml: benchmarks", lead, top, [_section(result) for result in results], notes)


def _section(result: dict[str, Any]) -> Section:
    parts = [f"<p>{escape(result['question'])}</p>"]
    if result["goals"]:
        lines = [
            [
                goal["text"],
                "-" if goal["measured"] is None else f"{goal['measured']:.3g}",
                f"{'at most' if goal['at_most'] else 'at least'} {goal['limit']:g}",
                {True: "met", False: "missed", None: "not measured"}[goal["met"]],
                goal["note"],
            ]
            for goal in result["goals"]
        ]
        parts.append(table("Goals", ["what", "measured", "goal", "", "note"], lines, long=True))
    parts += [table(each["caption"], each["header"], each["lines"], long=True) for each in result["tables"]]
    if result["charts"]:
        parts.append(f'<div class="charts">{"".join(_chart(each) for each in result["charts"])}</div>')
    if result["flame"]:
        parts.append(_flame(result["flame"]))
    parts += [f'<p class="soft">{escape(note)}</p>' for note in result["notes"]]
    return Section(result["name"], result["title"], "".join(parts))


def _chart(found: dict[str, Any]) -> str:
    curves = found["curves"]
    level = [found["level"]] if found["level"] is not None else []
    x = Axis.around(found["x_title"], *(curve["x"] for curve in curves), log=found["log_x"])
    y = Axis.around(found["y_title"], *(curve["y"] for curve in curves), level, log=found["log_y"])
    series = [
        Series(
            curve["name"],
            curve["x"],
            curve["y"],
            colour=number % 4 + 1,
            errors=curve["errors"],
            marks=len(curve["x"]) < 30,
        )
        for number, curve in enumerate(curves)
    ]
    lines = [Line(found["level_name"], found["level"])] if level else []
    return chart(found["title"], found["description"], x, y, series, lines)


def _flame(stacks: dict[str, int]) -> str:
    """Draw samples of stacks: every function below the one that called it, as wide as its share."""
    tree: dict[str, Any] = {}
    for stack, number in stacks.items():
        level = tree
        for name in stack.split(";"):
            node = level.setdefault(name, {"number": 0, "children": {}})
            node["number"] += number
            level = node["children"]
    total = sum(node["number"] for node in tree.values())
    boxes: list[str] = []
    depth = _boxes(tree, 0.0, 0, total, boxes)
    title = "Where the time of a pass out of core goes"
    box = f"0 0 {WIDTH} {depth * HEIGHT}"
    return (
        f'<figure style="max-width:none"><h3>{title}</h3><div class="scroll">'
        f'<svg viewBox="{box}" style="min-width:44rem;width:100%" role="img"><title>{title}</title>'
        f"{''.join(boxes)}</svg></div><figcaption>{total:,} samples of the threads that work, 5 ms apart; "
        "the widths are shares of them.</figcaption></figure>"
    )


def _boxes(level: dict[str, Any], left: float, depth: int, total: int, boxes: list[str]) -> int:
    deepest = depth
    for name, node in sorted(level.items(), key=lambda item: -item[1]["number"]):
        width = WIDTH * node["number"] / total
        if width >= LEAST * WIDTH:
            share = f"{name}: {node['number'] / total:.1%}"
            text = escape(name[: int(width / 6.5)]) if width > 40 else ""
            boxes.append(
                f'<rect class="mark faint c{depth % 4 + 1}" x="{left:.1f}" y="{depth * HEIGHT}" '
                f'width="{width - 0.6:.1f}" height="{HEIGHT - 1}"><title>{escape(share)}</title></rect>'
                f'<text class="name" style="font-size:10px" x="{left + 3:.1f}" y="{depth * HEIGHT + 12}">'
                f"{text}</text>"
            )
            deepest = max(deepest, _boxes(node["children"], left, depth + 1, total, boxes))
        left += width
    return deepest if level else depth
