"""Line charts as SVG text: axes with ticks, lines or dots, a legend. No more than `picture` needs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

COLOURS = ("#1f6fb4", "#d1602a", "#3a8f4b", "#8353a8", "#a3822b", "#b8396b", "#4a4a4a", "#1c9aa3")
_INK, _GRID, _PAPER = "#333333", "#e2e2e2", "#ffffff"
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 64, 46
"""Space around a chart's plot, in pixels; the title and two lines of legend stand above it."""
_LEAST = 1e-9
"""What is smaller than that is drawn as 0."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the chart's own units, in order of x. Drawn as a line, or as dots."""

    label: str
    points: tuple[tuple[float, float], ...]
    dots: bool = False
    dashed: bool = False
    colour: int | None = None
    """Which of `COLOURS`; by its place among the series, if absent."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot. Axes begin at 0 unless a point lies below."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    y_most: float | None = None
    """Where the y axis ends; behind the largest value, if absent."""


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`, about `count` steps of 1, 2 or 5 times a power of ten."""
    if most < _LEAST:
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [round(place * step, 10) for place in range(ceil(most / step - 1e-9) + 1)]


def document(charts: Sequence[Chart], *, width: int = 420, height: int = 300) -> str:
    """The charts side by side, on white paper. Sizes in pixels, of one chart."""
    whole = width * len(charts)
    plots = [_chart(chart, place * width, width, height) for place, chart in enumerate(charts)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{height}" '
            f'viewBox="0 0 {whole} {height}" font-family="Helvetica, Arial, sans-serif" font-size="11" fill="{_INK}">',
            f'<rect width="{whole}" height="{height}" fill="{_PAPER}"/>',
            *plots,
            "</svg>\n",
        ]
    )


class _Frame:
    """From a chart's units to pixels."""

    def __init__(self, chart: Chart, left: int, width: int, height: int) -> None:
        points = [point for series in chart.series for point in series.points]
        self.x_ticks = ticks(max((x for x, _ in points), default=0.0), 6)
        self.y_ticks = ticks(chart.y_most or max((y for _, y in points), default=0.0))
        self.left, self.right = left + _LEFT, left + width - _RIGHT
        self.top, self.bottom = _TOP, height - _BOTTOM

    def x(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * value / self.x_ticks[-1], 1)

    def y(self, value: float) -> float:
        return round(self.bottom - (self.bottom - self.top) * value / self.y_ticks[-1], 1)


def _chart(chart: Chart, left: int, width: int, height: int) -> str:
    frame = _Frame(chart, left, width, height)
    middle = (frame.left + frame.right) / 2
    parts = [_text(middle, 18, chart.title, anchor="middle", more=' font-size="13" font-weight="bold"')]
    parts += _axes(chart, frame)
    for place, series in enumerate(chart.series):
        parts.append(_series(series, frame, _colour(series, place)))
    parts += _legend(chart.series, frame)
    return "\n".join(["<g>", *parts, "</g>"])


def _axes(chart: Chart, frame: _Frame) -> list[str]:
    parts = []
    for value in frame.y_ticks:
        y = frame.y(value)
        parts.append(f'<line x1="{frame.left}" y1="{y}" x2="{frame.right}" y2="{y}" stroke="{_GRID}"/>')
        parts.append(_text(frame.left - 6, y + 4, f"{value:g}", anchor="end"))
    for value in frame.x_ticks:
        x = frame.x(value)
        parts.append(f'<line x1="{x}" y1="{frame.bottom}" x2="{x}" y2="{frame.bottom + 4}" stroke="{_INK}"/>')
        parts.append(_text(x, frame.bottom + 16, f"{value:g}", anchor="middle"))
    corners = f"{frame.left},{frame.top} {frame.left},{frame.bottom} {frame.right},{frame.bottom}"
    parts.append(f'<polyline points="{corners}" fill="none" stroke="{_INK}"/>')
    parts.append(_text((frame.left + frame.right) / 2, frame.bottom + 34, chart.x, anchor="middle"))
    x, y = frame.left - 44, (frame.top + frame.bottom) / 2
    parts.append(_text(x, y, chart.y, anchor="middle", more=f' transform="rotate(-90 {x} {y})"'))
    return parts


def _series(series: Series, frame: _Frame, colour: str) -> str:
    places = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if series.dots:
        return "".join(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in places)
    dashes = ' stroke-dasharray="5 3"' if series.dashed else ""
    line = " ".join(f"{x},{y}" for x, y in places)
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'


def _legend(series: Sequence[Series], frame: _Frame) -> list[str]:
    """Between title and plot, two to a line."""
    parts = []
    for place, each in enumerate(series):
        x = frame.left + (frame.right - frame.left) / 2 * (place % 2)
        y = 36 + 15 * (place // 2)
        colour = _colour(each, place)
        dashes = ' stroke-dasharray="5 3"' if each.dashed else ""
        parts.append(
            f'<circle cx="{x + 12}" cy="{y}" r="3" fill="{colour}"/>'
            if each.dots
            else f'<line x1="{x + 4}" y1="{y}" x2="{x + 20}" y2="{y}" stroke="{colour}" stroke-width="2"{dashes}/>'
        )
        parts.append(_text(x + 26, y + 4, each.label))
    return parts


def _colour(series: Series, place: int) -> str:
    return COLOURS[(place if series.colour is None else series.colour) % len(COLOURS)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
