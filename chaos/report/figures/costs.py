"""The cost of faults by kind: one dot per recovery, at the seconds to the next applied step."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from markupsafe import Markup

from chaos.report.story import Story
from elastic_train.drawing.svg import LEFT, RIGHT, Axis, figure, tag, text, titled

_TOP, _ROW = 14.0, 26.0
_LEFT, _APART = LEFT + 60.0, 3.0
_TICKS = [factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5)]


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of one kind of fault: numbers of faults and recoveries, quantiles of RTO and RPO."""

    kind: str
    num_faults: int
    rto_s: list[float]
    rpo_steps: list[int]

    def rto(self, quantile: float) -> float | None:
        """Return a quantile of the observed RTOs, by nearest rank; None without recoveries."""
        return self.rto_s[math.ceil(quantile * len(self.rto_s)) - 1] if self.rto_s else None

    @property
    def rpo(self) -> int | None:
        """The largest RPO; None without recoveries."""
        return max(self.rpo_steps, default=None)


def prices(story: Story) -> list[Price]:
    """Return the cost of each kind, sorted by name; lists are sorted."""
    groups = defaultdict(list)
    for fault in story.faults:
        groups[f"{fault.kind}@{fault.point}" if fault.point else fault.kind].append(fault)
    priced = []
    for kind, group in sorted(groups.items()):
        costs = [fault.cost for fault in group if fault.cost is not None]
        rto, rpo = sorted(cost.rto_s for cost in costs), sorted(cost.rpo_steps for cost in costs)
        priced.append(Price(kind, len(group), rto, rpo))
    return priced


def costs_figure(story: Story) -> Markup:
    """Draw a row per kind, a dot per recovery and a bar at the median, on a logarithmic axis."""
    rows = [price for price in prices(story) if price.rto_s]
    if not rows:
        raise ValueError("no fault was recovered from")
    lo, hi = min(price.rto_s[0] for price in rows), max(price.rto_s[-1] for price in rows)
    first = max((tick for tick in _TICKS if tick <= lo), default=_TICKS[0])
    last = min((tick for tick in _TICKS if tick >= hi), default=_TICKS[-1])
    axis = Axis(math.log10(first), math.log10(max(last, 2 * first)), _LEFT, RIGHT - 10)
    bottom = _TOP + _ROW * len(rows)
    parts = []
    for tick in [tick for tick in _TICKS if first <= tick <= max(last, 2 * first)]:
        x = axis(math.log10(tick))
        parts.append(tag("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid"))
        parts.append(text(x, bottom + 15, f"{tick:g}", class_="mid"))
    for place, price in enumerate(rows):
        parts += _row(price, axis, _TOP + _ROW * (place + 0.5))
    parts.append(text(RIGHT, bottom + 29, "seconds to the next applied step", class_="end faint"))
    return figure(bottom + 34, "seconds to the next applied step after each fault, by kind", parts)


def _row(price: Price, axis: Axis, y: float) -> list[Markup]:
    """Draw one kind; recoveries of similar duration share a dot."""
    together: dict[int, list[float]] = defaultdict(list)
    for rto in price.rto_s:
        together[int(_along(axis, rto) / _APART)].append(rto)
    parts = [text(_LEFT - 10, y + 4, price.kind, class_="end")]
    for group in together.values():
        more = f", and {len(group) - 1} about as long" if len(group) > 1 else ""
        title = f"{price.kind}: {group[0]:.2f} s{more}"
        parts.append(titled("circle", title, cx=_along(axis, group[0]), cy=y, r=4.0, class_="recovery"))
    median = price.rto(0.5)
    if median is not None:
        x = _along(axis, median)
        parts.append(tag("line", x1=x, x2=x, y1=y - 9, y2=y + 9, class_="median"))
    return parts


def _along(axis: Axis, rto_s: float) -> float:
    return axis(math.log10(max(rto_s, _TICKS[0])))
