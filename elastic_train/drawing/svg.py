"""Write SVG: elements, axes, and curves whose size does not grow with the length of a run.

Colours are classes, never values, so that the page's style sheet can be light or dark. Coordinates have one decimal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

WIDTH, LEFT, RIGHT = 1080.0, 76.0, 1064.0
"""Width of a figure, and left and right edge of its plot."""

MOST_TITLED = 600
"""Largest number of marks of one kind that get a tooltip."""

Point = tuple[float, float]
_TIMES = ((1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "d"))


def tag(name: str, *children: Markup | str, **attributes: str | float | None) -> Markup:
    """Return an element; text is escaped, `class_` is class, `stroke_width` stroke-width; None omits an attribute."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else num(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>")


def num(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def titled(element: str, title: str, **attributes: str | float | None) -> Markup:
    return tag(element, tag("title", title), **attributes)


def text(x: float, y: float, what: str, **attributes: str | float | None) -> Markup:
    return tag("text", what, x=x, y=y, **attributes)


def rect(lo: Point, hi: Point, title: str, **attributes: str | float | None) -> Markup:
    """Return a rectangle from one corner to the other, at least one unit wide and high."""
    size = {"width": max(1.0, hi[0] - lo[0]), "height": max(1.0, hi[1] - lo[1])}
    return titled("rect", title, x=lo[0], y=lo[1], **size, **attributes)


def figure(height: float, label: str, parts: Iterable[Markup]) -> Markup:
    """Return a complete figure; `label` describes it for screen readers."""
    box = f"0 0 {num(WIDTH)} {num(height)}"
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values [lo, hi] to coordinates [start, end]; ticks are at least `apart`."""

    lo: float
    hi: float
    start: float = LEFT
    end: float = RIGHT
    apart: float = 0.0

    def __call__(self, value: float) -> float:
        span = self.hi - self.lo or 1.0
        return self.start + (self.end - self.start) * (value - self.lo) / span

    def ticks(self, most: int = 8) -> list[float]:
        """Return round tick values, about `most` at most."""
        span = self.hi - self.lo or 1.0
        rough = max(span / most, self.apart)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first = math.ceil(self.lo / step - 1e-9)
        return [step * place for place in range(first, math.floor(self.hi / step + 1e-9) + 1)]


def time_axis(until: float) -> tuple[Axis, str]:
    """Return the axis of a run's time of `until` seconds, and its unit: s, min, h or d."""
    scale, unit = next((item for item in reversed(_TIMES) if until >= 4 * item[0]), _TIMES[0])
    return Axis(0.0, max(until, 1e-3) / scale), unit


def seconds_in(unit: str) -> float:
    return next(scale for scale, name in _TIMES if name == unit)


def along_x(axis: Axis, top: float, bottom: float, unit: str) -> list[Markup]:
    """Return grid lines and labels of a horizontal axis."""
    parts = []
    for value in axis.ticks():
        x, label = axis(value), f"{value:g}"
        parts += [
            tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"),
            text(x, bottom + 15, label, class_="mid"),
        ]
    return [*parts, text(RIGHT, bottom + 29, unit, class_="end faint")]


def along_y(axis: Axis, unit: str, shown: Callable[[float], str] = "{:g}".format, most: int = 5) -> list[Markup]:
    """Return grid lines and labels of a vertical axis."""
    parts = []
    for value in axis.ticks(most):
        y = axis(value)
        parts += [
            tag("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"),
            text(LEFT - 8, y + 4, shown(value), class_="end"),
        ]
    return [*parts, text(8, axis.end - 8, unit, class_="faint")]


@dataclass(frozen=True, slots=True)
class Stroke:
    """A path with its class, its coordinates and its title."""

    class_: str
    d: str
    title: str


def value_axis(lo: float, hi: float, bottom: float, top: float) -> Axis:
    """Return a vertical axis with a margin around the values [lo, hi]."""
    margin = 0.05 * (hi - lo) or 0.05 * abs(hi) or 0.5
    return Axis(lo - margin, hi + margin, bottom, top)


def curve(values: Iterable[tuple[float, float]], axis: Axis, height: Axis, title: str, class_: str) -> list[Stroke]:
    """Draw values over steps as strokes, interrupted where a value is not a number."""
    groups = groupby(values, key=lambda value: math.isfinite(value[1]))
    drawn = [[(axis(x), height(y)) for x, y in group] for is_finite, group in groups if is_finite]
    return [Stroke(class_, path(points), title) for points in drawn]


def paths(strokes: Sequence[Stroke]) -> list[Markup]:
    """Return a path per stroke; for very many, one per class without titles, which keeps a page small."""
    if len(strokes) <= MOST_TITLED:
        return [titled("path", stroke.title, class_=stroke.class_, d=stroke.d) for stroke in strokes]
    together: dict[str, list[str]] = defaultdict(list)
    for stroke in strokes:
        together[stroke.class_].append(stroke.d)
    return [tag("path", class_=class_, d="".join(drawn)) for class_, drawn in together.items()]


def path(points: Sequence[Point]) -> str:
    """Format a curve as a path, with the first, lowest, highest and last point per unit of width.

    A curve of one point is drawn as a dash.
    """
    kept: list[Point] = [(points[0][0] - 1.0, points[0][1])] if len(points) == 1 else []
    for _, group in groupby(points, key=lambda point: math.floor(point[0])):
        column = list(group)
        places = range(len(column))
        lowest, highest = (pick(places, key=lambda place: column[place][1]) for pick in (min, max))
        kept += [column[place] for place in sorted({0, lowest, highest, len(column) - 1})]
    return "".join(f"{'L' if place else 'M'}{num(x)} {num(y)}" for place, (x, y) in enumerate(kept))


def boxes(rects: Iterable[tuple[float, float, float, float]]) -> str:
    """Format rectangles (x, y, width, height) as one path."""
    return "".join(f"M{num(x)} {num(y)}h{num(w)}v{num(h)}h{num(-w)}z" for x, y, w, h in rects)
