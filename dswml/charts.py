"""Small charts as SVG inside HTML: axes with sensible ticks, lines, points, error bars and a legend.

Colours, fonts and the weight of lines are those of the page (`dswml.report_page`), so that a chart follows
its dark and printed forms. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Axis", "Line", "Series", "chart", "linear_ticks", "log_ticks"]

Array = npt.NDArray[Any]

WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 406, 30, 232
#: Width of a digit, on a phone.
DIGIT = 7.6
#: Half the width of the ends of an error bar: more than a mark.
CAP = 6
#: Marks of the series, by their number.
SHAPES = ("circle", "square", "diamond", "triangle")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most so many round numbers between two, at equal distances.

    Examples
    --------
    >>> linear_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> linear_ticks(3, 17, most=4)
    [5.0, 10.0, 15.0]
    """
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return powers of ten between two positive numbers, with their double and fivefold if there is room.

    Examples
    --------
    >>> log_ticks(5, 200)
    [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    >>> log_ticks(1e-9, 1)
    [1e-08, 1e-06, 0.0001, 0.01, 1.0]
    >>> log_ticks(2.2, 4.8)
    [2.5, 3.0, 3.5, 4.0, 4.5]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))

    def between(factors: tuple[int, ...], every: int) -> list[float]:
        powers = [power for power in range(first, last + 1) if power % every == 0]
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]

    fine = between((1, 2, 5), 1)
    if len(fine) < 3:
        return linear_ticks(low, high, most)
    return (
        fine
        if len(fine) <= most
        else next(ticks for every in count(1) if len(ticks := between((1,), every)) <= most)
    )


@dataclass(frozen=True)
class Axis:
    """One axis: its title and its range; ``whole`` if it has whole numbers only."""

    title: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    @classmethod
    def around(
        cls, title: str, *values: Any, log: bool = False, zero: bool = False, whole: bool = False
    ) -> Axis:
        """Return an axis with room for all values; with ``zero``, from zero on."""
        found = np.concatenate([np.asarray(each, dtype=np.float64).ravel() for each in values])
        found = found[np.isfinite(found) & ((found > 0) | (not log))]
        low, high = (float(found.min()), float(found.max())) if found.size else (1.0, 1.0)
        if log:
            margin = (high / low) ** 0.04 if high > low else 2.0
            return cls(title, low / margin, high * margin, log=True)
        low = min(low, 0.0) if zero else low
        margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
        return cls(title, low if zero and low == 0 else low - margin, high + margin, whole=whole)

    def ticks(self) -> list[float]:
        ticks = (log_ticks if self.log else linear_ticks)(self.low, self.high)
        return [tick for tick in ticks if tick.is_integer()] if self.whole else ticks

    def labels(self) -> list[str]:
        """Return what stands at the ticks: as many decimals as they need, powers where they are far apart."""
        ticks = self.ticks()
        if self.log and (min(ticks) < 1e-3 or max(ticks) > 1e4):
            return [_power(tick) for tick in ticks]
        if self.log or len(ticks) < 2:
            return [f"{tick:,.10g}" for tick in ticks]
        step = min(b - a for a, b in pairwise(ticks))
        if max(map(abs, ticks)) < 1e-3 or max(map(abs, ticks)) >= 1e7:
            return [f"{tick:.3g}" for tick in ticks]
        decimals = max(0, -math.floor(math.log10(step * (1 + 1e-9))))
        return [f"{tick:,.{decimals}f}" for tick in ticks]

    def shares(self, values: Any) -> Array:
        """Return where values are between the ends of the axis, 0 to 1; NaN where they have no place."""
        found = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.log:
            found = np.log(np.where(found > 0, found, np.nan))
            low, high = math.log(low), math.log(high)
        shares: Array = (found - low) / (high - low)
        return np.where((shares > -1e-9) & (shares < 1 + 1e-9), shares, np.nan)


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes
    ----------
    name : str
        In the legend; empty for none.
    x, y : array-like
        Those outside the axes are not drawn.
    colour : int
        Number of a colour of the page, and of a mark.
    line, marks : bool
        Whether points are joined, whether they are marked.
    hollow : bool
        Marks without a filling, and a line of dashes.
    errors : array-like, optional
        Half the length of a bar through every point, whose mark is small then.
    titles : sequence of str, optional
        What a pointer over a mark shows.
    shift : float
        Pixels to the right, so that bars of several series do not cover each other.
    faint, large : bool
        Marks that many may lie over each other, and marks around others.
    """

    name: str
    x: Any
    y: Any
    colour: int = 1
    line: bool = True
    marks: bool = True
    hollow: bool = False
    errors: Any = None
    titles: Sequence[str] | None = None
    shift: float = 0.0
    faint: bool = False
    large: bool = False

    @property
    def classes(self) -> str:
        names = {"hollow": self.hollow, "faint": self.faint, "large": self.large}
        return " ".join([f"c{self.colour}", *(name for name, there in names.items() if there)])


@dataclass(frozen=True)
class Line:
    """A dashed line across the chart, at a value of one of the axes, or the diagonal."""

    name: str
    at: float = 0.0
    axis: str = "y"
    colour: int = 0


def chart(
    title: str, description: str, x: Axis, y: Axis, series: Sequence[Series], lines: Sequence[Line] = ()
) -> str:
    """Return a figure: the chart with its title and description, and its legend.

    Examples
    --------
    >>> line = Series("", [0, 2], [0, 4])
    >>> figure = chart("Sizes", "They grow.", Axis("n", 0, 2), Axis("size", 0, 4), [line])
    >>> figure.count("<circle"), "<title>Sizes</title>" in figure
    (2, True)
    """
    plot = _Plot(x, y)
    drawn = [*plot.grid(), *(plot.across(line) for line in lines)]
    for each in series:
        drawn += plot.drawn(each)
    legend = [_entry(f'<path class="dash c{line.colour}" d="M1 6H25"/>', line.name) for line in lines]
    legend = [_entry(_swatch(each), each.name) for each in series if each.name] + legend
    return (
        f'<figure><h3>{escape(title)}</h3><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(drawn)}</svg>"
        + (f'<ul class="legend">{"".join(legend)}</ul>' if legend else "")
        + f"<figcaption>{escape(description)}</figcaption></figure>"
    )


def _power(value: float) -> str:
    power = math.floor(math.log10(value) + 1e-9)
    factor = value / 10.0**power
    return ("" if abs(factor - 1) < 1e-9 else f"{factor:.6g}·") + "10" + str(power).translate(_SUPERSCRIPT)


@dataclass(frozen=True)
class _Plot:
    """Where things stand between two axes; farther to the right where the numbers beside them are long."""

    x: Axis
    y: Axis

    @property
    def left(self) -> float:
        return max(LEFT, 8 + DIGIT * max(map(len, self.y.labels()), default=0))

    def place_x(self, values: Any) -> Any:
        return self.left + (RIGHT - self.left) * self.x.shares(values)

    def place_y(self, values: Any) -> Any:
        return BOTTOM - (BOTTOM - TOP) * self.y.shares(values)

    def grid(self) -> list[str]:
        x, y, left, parts = self.x, self.y, f"{self.left:g}", []
        for place, label in zip(self.place_y(y.ticks()), y.labels(), strict=True):
            parts.append(f'<path class="grid" d="M{left} {place:.1f}H{RIGHT}"/>')
            parts.append(f'<text class="end" x="{self.left - 6:g}" y="{place + 4:.1f}">{label}</text>')
        for place, label in zip(self.place_x(x.ticks()), x.labels(), strict=True):
            parts.append(f'<path class="axis" d="M{place:.1f} {BOTTOM}v4"/>')
            parts.append(f'<text class="middle" x="{place:.1f}" y="{BOTTOM + 18}">{label}</text>')
        parts.append(f'<path class="axis" d="M{left} {BOTTOM}H{RIGHT}"/>')
        parts.append(f'<text class="name" x="4" y="15">{escape(y.title)}</text>')
        parts.append(f'<text class="name end" x="{RIGHT}" y="{BOTTOM + 38}">{escape(x.title)}</text>')
        return parts

    def across(self, line: Line) -> str:
        if line.axis == "diagonal":
            return f'<path class="dash c{line.colour}" d="M{self.left:g} {BOTTOM}L{RIGHT} {TOP}"/>'
        place = float((self.place_y if line.axis == "y" else self.place_x)(line.at))
        if math.isnan(place):
            return ""
        way = f"M{self.left:g} {place:.1f}H{RIGHT}" if line.axis == "y" else f"M{place:.1f} {BOTTOM}V{TOP}"
        return f'<path class="dash c{line.colour}" d="{way}"/>'

    def drawn(self, series: Series) -> list[str]:
        across, up = self.place_x(series.x) + series.shift, self.place_y(series.y)
        there = np.flatnonzero(np.isfinite(across) & np.isfinite(up)).tolist()
        parts = []
        if series.line and len(there) > 1:
            points = " ".join(f"{across[i]:.1f},{up[i]:.1f}" for i in there)
            parts.append(f'<polyline class="line {series.classes}" points="{points}"/>')
        if series.marks:
            for i in there:
                title = "" if series.titles is None else f"<title>{escape(series.titles[i])}</title>"
                parts.append(_mark(series, across[i], up[i], title))
        if series.errors is not None:  # above the marks, which are larger than most bars
            middle, half = (np.asarray(each, dtype=np.float64) for each in (series.y, series.errors))
            # A bar that leaves the chart ends at its edge.
            low, high = (
                self.place_y(np.clip(middle + sign * half, self.y.low, self.y.high)) for sign in (-1, 1)
            )
            parts += [
                f'<path class="bar {series.classes}" d="M{across[i] - CAP:.1f} {low[i]:.1f}h{2 * CAP}'
                f'm-{CAP} 0V{high[i]:.1f}m-{CAP} 0h{2 * CAP}"/>'
                for i in there
            ]
        return parts


def _mark(series: Series, x: float, y: float, title: str = "") -> str:
    shape = "circle" if series.large else SHAPES[(series.colour - 1) % len(SHAPES)]
    classes = f"mark {series.classes}"
    small = series.errors is not None
    if shape == "circle":
        size = 7 if series.large else 2.2 if small else 3.2
        return f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{size}">{title}</circle>'
    ways = {"square": "m-3 -3h6v6h-6z", "diamond": "m0 -4.2l4.2 4.2l-4.2 4.2l-4.2 -4.2z"}
    if small:
        ways = {"square": "m-2 -2h4v4h-4z", "diamond": "m0 -3l3 3l-3 3l-3 -3z", "triangle": "m0 -3l3 5h-6z"}
    way = ways.get(shape, "m0 -4l4 7h-8z")
    return f'<path class="{classes}" d="M{x:.1f} {y:.1f}{way}">{title}</path>'


def _swatch(series: Series) -> str:
    line = f'<path class="line {series.classes}" d="M1 6H25"/>' if series.line else ""
    return line + (_mark(series, 13, 6) if series.marks else "")


def _entry(swatch: str, name: str) -> str:
    return f'<li><svg viewBox="0 -2 26 16" aria-hidden="true">{swatch}</svg>{escape(name)}</li>'
