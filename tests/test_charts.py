"""Charts: round ticks inside the axis, marks where the numbers say, text that stays text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dswml.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, Line, Series, chart, linear_ticks, log_ticks


def svg_of(figure: str) -> ElementTree.Element:
    found = ElementTree.fromstring(figure).find("svg")
    assert found is not None
    return found


def marks(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return [each for each in svg.iter() if each.get("class", "").startswith("mark")]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_linear_ticks_are_few_inside_and_equidistant(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    ticks = linear_ticks(low, high)
    assert 1 <= len(ticks) <= 6
    assert low - 1e-6 * width <= min(ticks) <= max(ticks) <= high + 1e-6 * width
    if len(ticks) > 2:
        np.testing.assert_allclose(np.diff(ticks), ticks[1] - ticks[0], rtol=1e-5, atol=1e-9)


@given(st.floats(1e-12, 1e6), st.floats(1.01, 1e14))
def test_log_ticks_are_few_and_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 7
    assert low * 0.999 <= min(ticks) <= max(ticks) <= low * ratio * 1.001
    axis = Axis("x", low, low * ratio, log=True)
    assert len(set(axis.labels())) == len(ticks)


@pytest.mark.parametrize(
    "values", [[0.0], [3.0], [-2.0, -2.0], [np.nan], [np.inf, 1.0], [0, 1e-9], [1e9, 2e9]]
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_have_an_axis(values: list[float], log: bool) -> None:
    axis = Axis.around("x", values, log=log)
    assert axis.low < axis.high
    assert axis.ticks()
    assert np.isfinite(axis.shares(axis.ticks())).all()


def test_marks_and_bars_are_where_the_numbers_say() -> None:
    x, y = Axis("n", 0, 10), Axis("gap", 1e-4, 1, log=True)
    series = Series("a", [0, 5, 10, 20], [1, 1e-2, 1e-4, 0], titles=["first", "second", "third", "fourth"])
    drawn = marks(svg_of(chart("t", "d", x, y, [series])))
    places = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in drawn]
    middle = ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2)
    assert places == [(LEFT, TOP), middle, (RIGHT, BOTTOM)]  # the last lies outside and has no logarithm
    assert ["".join(each.itertext()) for each in drawn] == ["first", "second", "third"]

    bars = chart("t", "d", x, Axis("s", 0, 1), [Series("", [5], [0.5], errors=[0.25])])
    found = re.search(r'class="bar[^"]*" d="M[\d.]+ ([\d.]+)h12m-6 0V([\d.]+)', bars)
    assert found is not None
    height = BOTTOM - TOP
    assert [float(part) for part in found.groups()] == pytest.approx(
        [BOTTOM - 0.25 * height, BOTTOM - 0.75 * height], abs=0.06
    )


def test_a_bar_shorter_than_a_mark_is_seen() -> None:
    series = Series("", [5], [0.5], errors=[0.004])
    drawn = list(svg_of(chart("t", "d", Axis("n", 0, 10), Axis("s", 0, 1), [series])))
    mark, bar = drawn[-2:]
    assert (mark.get("class"), bar.get("class")) == ("mark c1", "bar c1")  # the bar lies above the mark
    ends = re.search(r"M([\d.]+) [\d.]+h(\d+)", bar.get("d", ""))
    assert ends is not None
    assert float(ends[1]) <= float(mark.get("cx", "")) - 2 * float(mark.get("r", ""))
    assert float(ends[2]) >= 4 * float(mark.get("r", ""))


@pytest.mark.parametrize("values", [[0.0, 2e6], [0.500001, 0.500002], [1.5e9, 1.6e9], [0.0, 1.0]])
def test_long_numbers_beside_the_axis_are_not_cut_off(values: list[float]) -> None:
    y = Axis.around("s", values)
    svg = svg_of(chart("t", "d", Axis("n", 0, 10), y, [Series("", [0, 10], [y.low, y.high])]))
    labels = [each for each in svg if each.get("class") == "end"]
    assert [each.text for each in labels] == y.labels()
    assert min(float(each.get("x", "")) - 7 * len(each.text or "") for each in labels) > 0
    first, last = (float(each.get("cx", "")) for each in marks(svg))
    assert (first > float(labels[0].get("x", "")), last) == (True, RIGHT)


def test_whole_numbers_have_whole_ticks() -> None:
    for values in ([1, 1], [1, 2], [0, 3], [1, 7], [1, 900]):
        ticks = Axis.around("passes", values, zero=True, whole=True).ticks()
        assert ticks
        assert all(tick.is_integer() for tick in ticks)


def test_a_line_across_stands_at_its_value_or_is_left_out() -> None:
    axes = Axis("n", 0, 10), Axis("s", 0, 1)
    lines = [Line("goal", 0.5), Line("best", 5.0, "x"), Line("far", 7.0)]
    figure = chart("t", "d", *axes, [], lines)
    assert f'd="M{LEFT} {(TOP + BOTTOM) / 2:.1f}H{RIGHT}"' in figure
    assert f'd="M{(LEFT + RIGHT) / 2:.1f} {BOTTOM}V{TOP}"' in figure
    drawn = [each for each in svg_of(figure) if each.get("class", "").startswith("dash")]
    assert len(drawn) == 2


def test_text_stays_text_and_a_chart_says_what_it_shows() -> None:
    hostile = '<script>alert("1")</script>&'
    series = Series(hostile, [1, 2], [1, 2], titles=[hostile, hostile])
    figure = chart(hostile, hostile, Axis(hostile, 0, 3), Axis(hostile, 0, 3), [series], [Line(hostile, 1)])
    assert "<script" not in figure
    svg = svg_of(figure)
    assert svg.get("role") == "img"
    assert (svg[0].tag, svg[0].text, svg[1].tag, svg[1].text) == ("title", hostile, "desc", hostile)
