"""Charts as plain SVG text: the same bytes on every machine, small, in a light and a dark colour scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 420
LEGEND_ROW = 17
Series = dict[str, list[tuple[float, float]]]


class Scheme(NamedTuple):
    """Colours of one scheme: text, faint lines, and one colour for each series."""

    text: str
    faint: str
    colours: tuple[str, ...]


SCHEMES = {
    "light": Scheme(
        "#404040",
        "#c8c8c8",
        ("#3949ab", "#e65100", "#00796b", "#8e24aa", "#c62828", "#6d4c41", "#0288d1", "#9e9d24", "#d81b60", "#546e7a"),
    ),
    "dark": Scheme(
        "#d0d0d8",
        "#50536a",
        ("#8c9eff", "#ffb74d", "#4db6ac", "#ce93d8", "#ef9a9a", "#bcaaa4", "#81d4fa", "#e6ee9c", "#f48fb1", "#b0bec5"),
    ),
}


class Drawing:
    """SVG elements of one picture; coordinates are rounded to a tenth."""

    def __init__(self, height: float, scheme: Scheme, title: str):
        self.height, self.scheme, self.title = height, scheme, title
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> None:
        """A straight line."""
        self._parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width}"/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str, *, dots: bool) -> None:
        """Straight lines through points, with a dot on each where wanted."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        if dots:
            self._parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle."""
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def band(self, points: Sequence[tuple[float, float, float]], colour: str) -> None:
        """A faint area between two curves, given as (x, lower y, upper y)."""
        there = [f"{x:.1f} {low:.1f}" for x, low, _ in points]
        back = [f"{x:.1f} {high:.1f}" for x, _, high in reversed(points)]
        self._parts.append(f'<path d="M{"L".join(there + back)}Z" fill="{colour}" fill-opacity="0.13"/>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", colour: str = "", weight: str = "normal") -> None:
        """A line of text whose baseline starts, ends or has its middle at a point."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour or self.scheme.text}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def legend(self, names: Sequence[str]) -> None:
        """Names of the series in their colours at the top, side by side, in as many rows as they take."""
        y = 16
        for row in legend_rows(names):
            x = 10.0
            for name in row:
                self.bar(x, y - 9, 10, 10, self.scheme.colours[names.index(name)])
                self.text(x + 14, y, name)
                x += _legend_width(name)
            y += LEGEND_ROW

    def svg(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" width="{WIDTH}" '
            f'height="{self.height:.0f}" font-family="sans-serif" font-size="12" role="img">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self._parts, "</svg>", ""])


def legend_rows(names: Sequence[str]) -> list[list[str]]:
    """Splits the names of a legend into rows that fit."""
    rows: list[list[str]] = [[]]
    for name in names:
        if rows[-1] and sum(map(_legend_width, [*rows[-1], name])) > WIDTH - 10:
            rows.append([])
        rows[-1].append(name)
    return rows


def _legend_width(name: str) -> float:
    return 30 + 6.7 * len(name)


def lines(
    scheme: Scheme,
    title: str,
    series: Series,
    *,
    x_label: str,
    top: float,
    ticks: Sequence[float],
    dots: bool = True,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
) -> str:
    """Curves over an x axis whose ticks stand where they are named; x between ticks is placed linearly between them.

    Args:
        scheme: the colours.
        title: what a reader who cannot see it is told.
        series: points (x, y) by name, x rising.
        x_label: what x is.
        top: upper end of the y axis, which begins at 0.
        ticks: places of the x axis, evenly spaced on paper.
        dots: mark the points.
    """
    below = LEGEND_ROW * (len(legend_rows(list(series))) - 1)
    left, right, high, low = 40.0, WIDTH - 14.0, 34.0 + below, 230.0 + below
    drawing = Drawing(270 + below, scheme, title)
    drawing.legend(list(series))

    def place(x: float) -> float:
        after = min(max(1, sum(tick < x for tick in ticks)), len(ticks) - 1)
        share = after - 1 + (x - ticks[after - 1]) / (ticks[after] - ticks[after - 1])
        return left + (right - left) * share / (len(ticks) - 1)

    for share in range(5):
        y = low - (low - high) * share / 4
        drawing.line(left, y, right, y, scheme.faint)
        drawing.text(left - 5, y + 4, f"{top * share / 4:g}", anchor="end")
    for tick in ticks:
        drawing.text(place(tick), low + 16, f"{tick:g}", anchor="middle")
    drawing.text((left + right) / 2, low + 34, x_label, anchor="middle")

    def height(y: float) -> float:
        return low - (low - high) * y / top

    for name, colour in zip(bands or {}, scheme.colours, strict=False):
        drawing.band([(place(x), height(bottom), height(end)) for x, bottom, end in (bands or {})[name]], colour)
    for points, colour in zip(series.values(), scheme.colours, strict=False):
        drawing.curve([(place(x), height(y)) for x, y in points], colour, dots=dots)
    return drawing.svg()


def bars(
    scheme: Scheme,
    title: str,
    rows: Sequence[str],
    series: dict[str, list[float]],
    *,
    top: float,
    intervals: dict[str, list[tuple[float, float]]] | None = None,
    mark: float | None = None,
) -> str:
    """Lying bars in groups, one group a row.

    Args:
        scheme: the colours.
        title: what a reader who cannot see it is told.
        rows: names of the groups.
        series: one value a row, by name.
        top: right end of the axis, which begins at 0; a longer interval is cut there.
        intervals: both ends of the interval of each value, by the names of `series`.
        mark: a value to draw a line at.
    """
    left, right, thick = 100.0, WIDTH - 40.0, 11
    group = thick * len(series) + 9
    top_of_rows = 32 + LEGEND_ROW * (len(legend_rows(list(series))) - 1)
    drawing = Drawing(top_of_rows + 8 + group * len(rows), scheme, title)
    drawing.legend(list(series))
    scale = (right - left) / top
    for index, row in enumerate(rows):
        y = top_of_rows + index * group
        drawing.text(left - 6, y + (group - 9) / 2 + 4, row, anchor="end")
        for number, (name, colour) in enumerate(zip(series, scheme.colours, strict=False)):
            value, middle = series[name][index], y + number * thick + thick / 2
            drawing.bar(left, middle - thick / 2, value * scale, thick - 1, colour)
            end = value
            if intervals:
                bottom, end = intervals[name][index]
                end = min(end, top)
                drawing.line(left + bottom * scale, middle - 0.5, left + end * scale, middle - 0.5, scheme.text)
            drawing.text(left + max(end, value) * scale + 5, middle + 4, f"{value:.2f}")
    if mark is not None:
        drawing.line(left + mark * scale, top_of_rows - 6, left + mark * scale, top_of_rows + group * len(rows), scheme.text)
    return drawing.svg()
