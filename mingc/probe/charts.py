"""Charts of a probe as SVG elements: lines over logarithmic axes, a roofline, consecutive bars.

Every drawn figure keeps its exact value in `data-x` and `data-y` (bars: `data-from` and `data-to`), and has a tooltip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard
from xml.etree.ElementTree import Element, SubElement

WIDTH = 980.0
_PLOT_WIDTH, _PLOT_HEIGHT = 560.0, 300.0
_LEFT, _TOP, _BOTTOM = 74.0, 14.0, 50.0
_LEGEND_X, _LEGEND_ROW = _LEFT + _PLOT_WIDTH + 16, 17.0
_LEGEND_LETTERS = 42
_TICK_SPACE = 36.0  # between labels of one axis
_BAR_LABEL, _BAR_ROW, _BAR_VALUE = 380.0, 22.0, 70.0
_BAR_LETTERS = 52
# Dark enough on white, and apart for colour-blind readers; then again with another dash.
COLOURS = ("#0072b2", "#d55e00", "#007a5a", "#a3478a", "#7a5c00", "#2b2b2b", "#1f8fc9", "#8c2d04")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A figure at (x, y), and the range of y around it when there is one."""

    x: float
    y: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points of one colour, joined by a line if `is_joined`."""

    name: str
    points: tuple[Point, ...]
    is_joined: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    """A bound of the roofline: y rises as x times `slope` up to `peak`."""

    name: str
    slope: float
    peak: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A part, from `start` to `end`, of the total length of all bars."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Axis:
    """Positions of values between two ends; `ticks` are values that get a label."""

    low: float
    high: float
    first: float  # position of `low`
    last: float
    ticks: tuple[float, ...] = field(default=())
    is_log: bool = True

    def at(self, value: float) -> float:
        """Position of `value`."""
        measure: Callable[[float], float] = math.log if self.is_log else float
        share = (measure(value) - measure(self.low)) / (measure(self.high) - measure(self.low))
        return self.first + share * (self.last - self.first)


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> Element:
    """Series over logarithmic axes; x has a tick for each of its values where there is space.

    Points that a logarithmic axis cannot show are left out, and the chart states their number.
    """
    series, left_out = _with_places(series)
    points = [point for each in series for point in each.points]
    sizes = sorted({point.x for point in points}) or [1.0]
    x = _Axis(sizes[0] / 1.25, sizes[-1] * 1.25, _LEFT, _LEFT + _PLOT_WIDTH, tuple(sizes))
    values = [value for point in points for value in (point.y, point.low, point.high) if _has_place(value)]
    y = _value_axis(values)
    svg, plot = _frame(title, x, y, x_label, y_label, rows=len(series))
    _note_left_out(svg, left_out)
    for index, each in enumerate(series):
        _draw_series(svg, plot, index, each, x, y)
    return svg


def roofline_chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], roofs: Sequence[Roof]
) -> Element:
    """Points below roofs, over logarithmic axes.

    Points that cannot be shown are left out, and the chart states their number.
    """
    series, left_out = _with_places(series)
    left_out += len(roofs)
    roofs = [roof for roof in roofs if _has_place(roof.slope) and _has_place(roof.peak)]
    left_out -= len(roofs)
    points = [point for each in series for point in each.points]
    bends = [roof.peak / roof.slope for roof in roofs]
    low, high = _ends([*(point.x for point in points), *bends])
    x = _Axis(low, high, _LEFT, _LEFT + _PLOT_WIDTH, _ticks(low, high))
    y = _value_axis([*(point.y for point in points), *(roof.peak for roof in roofs)])
    svg, plot = _frame(title, x, y, x_label, y_label, rows=len(series) + len(roofs))
    _note_left_out(svg, left_out)
    for index, roof in enumerate(roofs):
        start = max(x.low, y.low / roof.slope)  # where it comes into the plot
        bend = max(start, roof.peak / roof.slope)
        corners = [(start, min(roof.peak, start * roof.slope)), (bend, roof.peak), (x.high, roof.peak)]
        line = SubElement(plot, "polyline", {"class": "roof"})
        line.set("data-slope", repr(roof.slope))
        line.set("data-peak", repr(roof.peak))
        line.set("points", " ".join(f"{x.at(a):.2f},{y.at(b):.2f}" for a, b in corners))
        line.set("stroke-dasharray", _DASHES[index % len(_DASHES)])
        _tooltip(line, roof.name)
        dash = _DASHES[index % len(_DASHES)]
        _legend(svg, len(series) + index, roof.name, "#555555", dash, has_line=True, has_point=False)
    for index, each in enumerate(series):
        _draw_series(svg, plot, index, each, x, y)
    return svg


def bar_chart(title: str, x_label: str, bars: Sequence[Bar]) -> Element:
    """Bars, each starting where the previous one ended, over a linear axis from 0."""
    height = _TOP + _BAR_ROW * len(bars) + _BOTTOM
    svg = _svg(title, height)
    ticks = _linear_ticks(max(bar.end for bar in bars))
    x = _Axis(0.0, ticks[-1], _BAR_LABEL, WIDTH - _BAR_VALUE, ticks, is_log=False)
    bottom = height - _BOTTOM
    _x_ticks(svg, x, _TOP, bottom)
    _text(svg, (x.first + x.last) / 2, height - 8, x_label, anchor="middle", kind="label")
    for index, bar in enumerate(bars):
        middle = _TOP + _BAR_ROW * (index + 0.5)
        start, end = x.at(bar.start), x.at(bar.end)
        attributes = {
            "class": "bar",
            "x": start,
            "y": middle - 7,
            "width": max(1.0, end - start),
            "height": 14.0,
        }
        drawn = _shape(svg, "rect", attributes, fill=COLOURS[index % len(COLOURS)])
        drawn.set("data-from", repr(bar.start))
        drawn.set("data-to", repr(bar.end))
        value = f"{number(bar.end - bar.start)} s"
        _tooltip(drawn, f"{bar.name}: {value}")
        _text(svg, _BAR_LABEL - 8, middle + 4, shorten(bar.name, _BAR_LETTERS), anchor="end", kind="row")
        _text(svg, max(end, start + 1) + 5, middle + 4, value, anchor="start", kind="row")
    return svg


def number(value: float) -> str:
    """Three significant digits; powers of ten only where they are shorter."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shorten(text: str, letters: int) -> str:
    """A printable text, cut off if it is too long."""
    text = printable(text)
    return text if len(text) <= letters else text[: letters - 1] + "…"


def printable(text: str) -> str:
    """A text that is valid in a document: control characters and bytes that are not text are escaped."""
    return re.sub(
        r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]",
        lambda found: ascii(found[0])[1:-1],
        text,
    )


def _has_place(value: float | None) -> TypeGuard[float]:
    """Whether a logarithmic axis can show `value`."""
    return value is not None and math.isfinite(value) and value > 0


def _with_places(series: Sequence[Series]) -> tuple[list[Series], int]:
    """The series with only the points that logarithmic axes can show, and the number of the others."""
    kept = [
        replace(each, points=tuple(p for p in each.points if _has_place(p.x) and _has_place(p.y)))
        for each in series
    ]
    return kept, sum(len(each.points) for each in series) - sum(len(each.points) for each in kept)


def _note_left_out(svg: Element, count: int) -> None:
    if count:
        text = f"not drawn: {count} without a place on a logarithmic axis"
        _text(svg, _LEFT + 8, _TOP + 16, text, anchor="start", kind="row")


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The numbers of the form 1, 2 or 5 times a power of ten around `values`, with space on both sides.

    Around 1 when there are none.
    """
    found = list(values) or [1.0]
    low, high = _round(min(found) / 1.15, up=False), _round(max(found) * 1.15, up=True)
    return low, high


def _round(value: float, *, up: bool) -> float:
    power = math.floor(math.log10(value))
    steps = [digit * 10.0**exponent for exponent in (power - 1, power, power + 1) for digit in (1, 2, 5)]
    return (
        next(each for each in steps if each >= value)
        if up
        else next(each for each in steps[::-1] if each <= value)
    )


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 in each decade; with many decades only 1."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    values = [digit * 10.0**power for power in decades for digit in digits]
    return tuple(each for each in values if low * 0.999 <= each <= high * 1.001)


def _linear_ticks(most: float) -> tuple[float, ...]:
    """From 0 to beyond `most` in four to ten equal steps."""
    step = _round(max(most, 1e-6) / 8, up=True)
    return tuple(step * index for index in range(math.ceil(most / step * 1.0001) + 1))


def _value_axis(values: Sequence[float]) -> _Axis:
    low, high = _ends(values)
    return _Axis(low, high, _TOP + _PLOT_HEIGHT, _TOP, _ticks(low, high))


def _svg(title: str, height: float) -> Element:
    svg = Element(
        "svg", {"viewBox": f"0 0 {WIDTH:g} {height:g}", "role": "img", "aria-label": printable(title)}
    )
    return svg


def _frame(
    title: str, x: _Axis, y: _Axis, x_label: str, y_label: str, *, rows: int
) -> tuple[Element, Element]:
    """An SVG with grid, ticks and labels of both axes, and the group that figures are drawn into."""
    height = max(_TOP + _PLOT_HEIGHT + _BOTTOM, _TOP + _LEGEND_ROW * rows + 10)
    svg = _svg(title, height)
    right, bottom = _LEFT + _PLOT_WIDTH, _TOP + _PLOT_HEIGHT
    _x_ticks(svg, x, _TOP, bottom)
    for value in y.ticks:
        at = y.at(value)
        _shape(svg, "line", {"class": "grid", "x1": _LEFT, "x2": right, "y1": at, "y2": at})
        tick = _text(svg, _LEFT - 6, at + 4, number(value), anchor="end", kind="tick")
        tick.set("data-y-tick", repr(value))
    frame = {"class": "frame", "x": _LEFT, "y": _TOP, "width": _PLOT_WIDTH, "height": _PLOT_HEIGHT}
    _shape(svg, "rect", frame)
    _text(svg, (_LEFT + right) / 2, bottom + 36, x_label, anchor="middle", kind="label")
    middle = _TOP + _PLOT_HEIGHT / 2
    turned = _text(svg, 16, middle, y_label, anchor="middle", kind="label")
    turned.set("transform", f"rotate(-90 16 {middle:g})")
    return svg, SubElement(svg, "g")


def _x_ticks(svg: Element, x: _Axis, top: float, bottom: float) -> None:
    last = -math.inf
    for value in x.ticks:
        at = x.at(value)
        _shape(svg, "line", {"class": "grid", "x1": at, "x2": at, "y1": top, "y2": bottom})
        if at - last >= _TICK_SPACE:
            tick = _text(svg, at, bottom + 16, number(value), anchor="middle", kind="tick")
            tick.set("data-x-tick", repr(value))
            last = at


def _draw_series(svg: Element, plot: Element, index: int, series: Series, x: _Axis, y: _Axis) -> None:
    colour = COLOURS[index % len(COLOURS)]
    dash = _DASHES[index // len(COLOURS) % len(_DASHES)] if series.is_joined else ""
    points = sorted(series.points, key=lambda point: point.x)
    if series.is_joined and len(points) > 1:
        line = SubElement(plot, "polyline", {"class": "line", "stroke": colour, "stroke-dasharray": dash})
        line.set("points", " ".join(f"{x.at(each.x):.2f},{y.at(each.y):.2f}" for each in points))
    for each in points:
        at = x.at(each.x)
        if _has_place(each.low) and _has_place(each.high):
            ends = {"class": "range", "x1": at, "x2": at, "y1": y.at(each.low), "y2": y.at(each.high)}
            _shape(plot, "line", ends, stroke=colour)
        drawn = _shape(
            plot, "circle", {"class": "point", "cx": at, "cy": y.at(each.y), "r": 4.0}, fill=colour
        )
        drawn.set("data-x", repr(each.x))
        drawn.set("data-y", repr(each.y))
        _tooltip(drawn, each.label)
    _legend(svg, index, series.name, colour, dash, has_line=series.is_joined, has_point=True)


def _legend(
    svg: Element, row: int, name: str, colour: str, dash: str, *, has_line: bool, has_point: bool
) -> None:
    y = _TOP + _LEGEND_ROW * (row + 0.5)
    if has_line:
        line = {"class": "sample", "x1": _LEGEND_X, "x2": _LEGEND_X + 20, "y1": y, "y2": y}
        _shape(svg, "line", line, stroke=colour).set("stroke-dasharray", dash)
    if has_point:
        _shape(svg, "circle", {"class": "sample", "cx": _LEGEND_X + 10, "cy": y, "r": 3.5}, fill=colour)
    text = _text(svg, _LEGEND_X + 26, y + 4, shorten(name, _LEGEND_LETTERS), anchor="start", kind="legend")
    _tooltip(text, name)


def _text(svg: Element, x: float, y: float, text: str, *, anchor: str, kind: str) -> Element:
    element = _shape(svg, "text", {"class": kind, "x": x, "y": y})
    element.set("text-anchor", anchor)
    element.text = printable(text)
    return element


def _shape(parent: Element, tag: str, attributes: Mapping[str, object], **colours: str) -> Element:
    shape = SubElement(parent, tag)
    for name, value in {**attributes, **colours}.items():
        shape.set(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    return shape


def _tooltip(element: Element, text: str) -> None:
    SubElement(element, "title").text = printable(text)
