"""Render a plan as one self-contained HTML page; a pure function of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from markupsafe import Markup

from elastic_train.drawing.page import draw, fill
from elastic_train.drawing.svg import (
    LEFT,
    RIGHT,
    Axis,
    Stroke,
    along_y,
    figure,
    path,
    paths,
    rect,
    tag,
    text,
    titled,
)
from elastic_train.planning.report import Report
from elastic_train.planning.search import Outcome, ScalingRow
from elastic_train.system.wording import counted, duration, size

_TEMPLATE = Path(__file__).parent / "page.html.j2"
_TOP, _BOTTOM = 14.0, 226.0
_NAMES, _ROW, _BAR = 380.0, 24.0, 17.0
"""Left edge of the bars, distance between bars, and height of a bar."""

_SCALING_HEAD = ("devices", "step", "{}/s", "speed-up", "efficiency", "waits", "MFU", "fits")
_OUTCOME_HEAD = ("layout", "memory", "step", "{}/s", "MFU", "goodput", "days", "cost", "runs today")
Parts = Sequence[tuple[str, float]]


def render(report: Report) -> str:
    model, device = report.job.model, report.job.cluster.device
    fitting = [one for one in [report.own, *report.best] if one.memory is not None]
    memory, steps = [_memory_of(one) for one in fitting], [_step_of(row) for row in report.strong]
    names = ["this configuration" if one is report.own else one.layout.name for one in fitting]
    devices = [counted(row.devices, "device") for row in report.strong]
    scaling = [("the run's global batch", report.strong), ("as many lanes a device", report.weak)]
    return fill(
        _TEMPLATE,
        {
            "title": f"Plan of {model.name} on {report.job.cluster.name}",
            "lines": report.lines(),
            "memory": draw(lambda: _bars("memory of a device", names, memory, size, device.usable_bytes)),
            "memory_parts": [part for part, _ in memory[0]] if memory else [],
            "scaling": [(what, draw(partial(_curves, rows)), _scaling(rows)) for what, rows in scaling if rows],
            "series": list(_series(report.strong)),
            "scaling_head": [name.format(model.amount) for name in _SCALING_HEAD],
            "steps": draw(lambda: _bars("a step's time", devices, steps, duration)),
            "step_parts": [part for part, _ in steps[0]] if steps else [],
            "by": report.by,
            "outcome_head": [name.format(model.amount) for name in _OUTCOME_HEAD],
            "outcomes": [_outcome(one) for one in report.best],
            "refused": [("; ".join(names), why) for why, names in report.refused_by_reason().items()],
        },
    )


def _memory_of(one: Outcome) -> Parts:
    assert one.memory is not None, "bars are of what was worked out"
    return list(one.memory.parts.items())


def _step_of(row: ScalingRow) -> Parts:
    step = row.outcome.step
    assert step is not None, "a row of scaling was worked out"
    return [
        ("computes", step.compute_s),
        ("computes again", step.recompute_s),
        ("pipeline bubble", step.bubble_s),
        ("tensor and pipeline links", step.tensor_s),
        ("exchange", step.exchange_s),
        ("update", step.update_s),
        ("tables", step.tables_s),
    ]


def _bars(
    what: str, names: Sequence[str], rows: Sequence[Parts], said: Callable[[float], str], limit: float | None = None
) -> Markup:
    """Draw one stacked bar per row; a limit that is close enough is drawn as a line."""
    if not rows:
        raise ValueError("nothing fits")
    most = max(sum(value for _, value in parts) for parts in rows)
    is_near = limit is not None and limit <= 1.5 * most
    across, height = Axis(0.0, max(most, limit or 0.0 if is_near else 0.0), _NAMES), _ROW * len(rows)
    marks: list[Markup] = []
    for place, (name, parts) in enumerate(zip(names, rows, strict=True)):
        top, end = _ROW * place, 0.0
        marks.append(text(_NAMES - 8, top + 13, name, class_="end"))
        for number, (part, value) in enumerate(parts):
            if value > 0:
                corners = (across(end), top), (across(end + value), top + _BAR)
                marks.append(rect(*corners, f"{part}: {said(value)}", class_=f"t{number % 8}"))
                end += value
    if limit is not None and is_near:
        title = f"what a device has to use: {said(limit)}"
        marks.append(titled("line", title, x1=across(limit), x2=across(limit), y1=0.0, y2=height, class_="gone"))
    return figure(height, what, marks)


def _series(rows: Sequence[ScalingRow]) -> dict[str, list[float]]:
    return {
        "efficiency": [row.efficiency for row in rows],
        "waits for links": [row.outcome.figures["communication"] for row in rows],
        "MFU": [row.outcome.mfu for row in rows],
    }


def _curves(rows: Sequence[ScalingRow]) -> Markup:
    """Draw efficiency, share of waiting and MFU over the number of devices, on a logarithmic axis."""
    series = _series(rows)
    across = Axis(0.0, max(1.0, math.log2(rows[-1].devices)), LEFT, RIGHT - 20)
    up = Axis(0.0, max(1.0, *(value for values in series.values() for value in values)), _BOTTOM, _TOP)
    xs = [across(math.log2(row.devices)) for row in rows]
    marks = [*along_y(up, "", "{:.0%}".format)]
    marks += [text(x, _BOTTOM + 18, str(row.devices), class_="mid") for row, x in zip(rows, xs, strict=True)]
    for number, (name, values) in enumerate(series.items()):
        points = [(x, up(value)) for x, value in zip(xs, values, strict=True)]
        marks += paths([Stroke(f"curve s{number}", path(points), name)])
        for row, (x, y), value in zip(rows, points, values, strict=True):
            title = tag("title", f"{name} on {row.devices}: {value:.1%}")
            marks.append(tag("circle", title, cx=x, cy=y, r=3.5, class_=f"t{number}"))
    return figure(_BOTTOM + 30, "efficiency, waiting and MFU over devices", marks)


def _scaling(rows: Sequence[ScalingRow]) -> list[tuple[str, ...]]:
    cells = list[tuple[str, ...]]()
    for row in rows:
        figures = row.outcome.figures
        values = (duration(figures["step"]), f"{row.outcome.per_s:.4g}", f"{row.speedup:.2f}", f"{row.efficiency:.1%}")
        shares = (f"{figures['communication']:.1%}", f"{row.outcome.mfu:.1%}")
        cells.append((str(row.devices), *values, *shares, "no" if row.outcome.problems else "yes"))
    return cells


def _outcome(one: Outcome) -> tuple[str, ...]:
    figures = one.figures
    values = (size(figures["memory"]), duration(figures["step"]), f"{one.per_s:.4g}", f"{one.mfu:.1%}")
    last = (f"{figures['goodput']:.2%}", f"{one.days:.4g}", f"{one.cost:,.0f}" if one.cost else "-")
    return (one.layout.name, *values, *last, "yes" if one.layout.runs_today else "no")
