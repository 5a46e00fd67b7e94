"""A plan as one HTML page that needs nothing but itself: no script, no network; figures are SVG with tooltips.

A pure function of the report. Colours are classes, so that one style sheet has a light and a dark half (decision 0019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from elastic_train.planning.report import Report
from elastic_train.planning.search import Outcome, ScalingRow
from elastic_train.system.wording import duration, size

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 260, 64, 34, 14
_STYLE = """
:root { --paper:#fff; --ink:#1d2127; --faint:#626b77; --grid:#e4e7eb; --panel:#f6f7f9; --bad:#c0262d;
  --t0:#2f6fb5; --t1:#d9822b; --t2:#2b9a76; --t3:#7a5195; --t4:#c85a9e; --t5:#8f8a1d; --t6:#4fb0d6; --t7:#a0522d; }
@media (prefers-color-scheme: dark) { :root { --paper:#14171c; --ink:#e3e6ea; --faint:#9aa4b1; --grid:#2b313a;
  --panel:#1c2128; --bad:#ff6b6b; --t0:#6aa9ec; --t1:#f0a457; --t2:#56c9a3; --t3:#b18fd0; --t4:#e58bc1; --t5:#c9c452;
  --t6:#8bd3f0; --t7:#cf8a63; } }
body { margin:0 auto; padding:1rem 2rem 3rem; max-width:72rem; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui,"DejaVu Sans",sans-serif; }
h1 { font-size:1.5rem; } h2 { font-size:1.15rem; border-top:1px solid var(--grid); padding-top:1rem; }
.bad { color:var(--bad); } .faint { color:var(--faint); font-size:.85rem; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
th,td { text-align:left; padding:.25rem .7rem .25rem 0; border-bottom:1px solid var(--grid); vertical-align:top; }
th { color:var(--faint); font-weight:500; font-size:.85rem; }
svg { width:100%; height:auto; max-width:60rem; font:12px system-ui,sans-serif; fill:var(--ink); }
svg .axis { stroke:var(--grid); } svg .end { text-anchor:end; } svg .mid { text-anchor:middle; }
""" + "".join(
    f".c{number} {{ fill:var(--t{number}); }} "
    f"polyline.c{number} {{ fill:none; stroke:var(--t{number}); stroke-width:2; }} "
    for number in range(8)
)


def render(report: Report) -> str:
    """Return the page."""
    model, own = report.job.model, report.own
    title = f"Plan of {model.name} on {report.job.cluster.name}"
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in report.lines())]
    fitting = [one for one in [own, *report.best] if one.memory is not None]
    body += ["<h2>Memory of a device</h2>", _memory_bars(fitting, report.job.cluster.device.usable_bytes)]
    for heading, rows in (("the run's global batch", report.strong), ("as many lanes a device", report.weak)):
        if rows:
            body += [f"<h2>Scaling with {heading}</h2>", _curves(rows), _scaling_table(rows, model.amount)]
    body += ["<h2>Where a step's time goes</h2>", _time_bars(report.strong)]
    body += [f"<h2>The best by {escape(report.by)}</h2>", _outcomes(report.best, model.amount)]
    if report.refused:
        reasons = [("; ".join(names), why) for why, names in report.refused_by_reason().items()]
        body += ["<h2>Out of the question</h2>", _table(("layouts", "why"), reasons)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="color-scheme" content="light dark"><style>{_STYLE}</style></head>\n<body>'
        + "\n".join(body)
        + "</body></html>\n"
    )


def _memory_bars(outcomes: Sequence[Outcome], room: float) -> str:
    rows = []
    for number, one in enumerate(outcomes):
        assert one.memory is not None, "bars are of what was worked out"
        name = "this configuration" if number == 0 else one.layout.name
        rows.append((name, list(one.memory.parts.items())))
    return _bars(rows, size, room, "what a device has to use")


def _time_bars(rows: Sequence[ScalingRow]) -> str:
    shown = []
    for row in rows:
        step = row.outcome.step
        assert step is not None, "a row of scaling was worked out"
        parts = [("computes", step.compute_s), ("computes again", step.recompute_s), ("pipeline bubble", step.bubble_s)]
        parts += [("tensor and pipeline links", step.tensor_s), ("exchange", step.exchange_s)]
        shown.append((f"{row.devices} devices", [*parts, ("update", step.update_s), ("tables", step.tables_s)]))
    return _bars(shown, duration)


def _bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    said: Callable[[float], str],
    limit: float | None = None,
    limit_name: str = "",
) -> str:
    """Draw one bar of parts for each row; a limit is a line."""
    if not rows:
        return ""
    most = max(sum(value for _, value in parts) for _, parts in rows)
    scale = (_WIDTH - 260) / max(most, min(limit or 0.0, most * 1.5), 1e-12)
    marks, y = list[str](), 6
    for name, parts in rows:
        x = 250.0
        marks.append(f'<text class="end" x="244" y="{y + 13}">{escape(name)}</text>')
        for number, (part, value) in enumerate(parts):
            if value > 0:
                tip = f"<title>{escape(part)}: {said(value)}</title>"
                place = f'x="{x:.1f}" y="{y}" width="{max(0.5, value * scale):.1f}" height="17"'
                marks.append(f'<rect class="c{number % 8}" {place}>{tip}</rect>')
                x += value * scale
        y += 24
    if limit is not None and limit <= most * 1.5:
        x = 250 + limit * scale
        marks.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y}" stroke="var(--bad)" stroke-dasharray="4 3">'
            f"<title>{escape(limit_name)}: {said(limit)}</title></line>"
        )
    legend = " · ".join(
        f'<span style="color:var(--t{number % 8})">■</span> {escape(part)}'
        for number, (part, _) in enumerate(rows[0][1])
    )
    return f'<svg viewBox="0 0 {_WIDTH} {y}" role="img">{"".join(marks)}</svg><p class="faint">{legend}</p>'


def _curves(rows: Sequence[ScalingRow]) -> str:
    """Draw efficiency, share of waiting and MFU over the number of devices, on a logarithmic axis."""
    series = {
        "efficiency": [row.efficiency for row in rows],
        "waits for links": [row.outcome.figures["communication"] for row in rows],
        "MFU": [row.outcome.mfu for row in rows],
    }
    last = max(1.0, math.log2(rows[-1].devices))
    xs = [_LEFT + (_WIDTH - _LEFT - 20) * math.log2(row.devices) / last for row in rows]
    top = max(1.0, *(value for values in series.values() for value in values))

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top

    marks = list(_axes(rows, xs, y, top))
    for number, (name, values) in enumerate(series.items()):
        points = " ".join(f"{x:.1f},{y(value):.1f}" for x, value in zip(xs, values, strict=True))
        marks.append(f'<polyline class="c{number}" points="{points}"/>')
        for row, x, value in zip(rows, xs, values, strict=True):
            tip = f"{name} on {row.devices}: {value:.1%}"
            marks.append(
                f'<circle class="c{number}" cx="{x:.1f}" cy="{y(value):.1f}" r="3.5"><title>{tip}</title></circle>'
            )
    legend = " · ".join(f'<span style="color:var(--t{number})">■</span> {name}' for number, name in enumerate(series))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(marks)}</svg><p class="faint">{legend}</p>'


def _axes(rows: Sequence[ScalingRow], xs: Sequence[float], y: Callable[[float], float], top: float) -> Iterator[str]:
    for tick in range(5):
        value = top * tick / 4
        yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield f'<text class="end" x="{_LEFT - 6}" y="{y(value) + 4:.1f}">{value:.0%}</text>'
    for row, x in zip(rows, xs, strict=True):
        yield f'<text class="mid" x="{x:.1f}" y="{_HEIGHT - 12}">{row.devices}</text>'


def _scaling_table(rows: Sequence[ScalingRow], amount: str) -> str:
    head = ("devices", "step", f"{amount}/s", "speed-up", "efficiency", "waits", "MFU", "fits")
    cells = []
    for row in rows:
        figures = row.outcome.figures
        values = (duration(figures["step"]), f"{row.outcome.per_s:.4g}", f"{row.speedup:.2f}", f"{row.efficiency:.1%}")
        shares = (f"{figures['communication']:.1%}", f"{row.outcome.mfu:.1%}")
        cells.append((str(row.devices), *values, *shares, "no" if row.outcome.problems else "yes"))
    return _table(head, cells)


def _outcomes(outcomes: Sequence[Outcome], amount: str) -> str:
    head = ("layout", "memory", "step", f"{amount}/s", "MFU", "goodput", "days", "cost", "runs today")
    cells = []
    for one in outcomes:
        figures = one.figures
        values = (size(figures["memory"]), duration(figures["step"]), f"{one.per_s:.4g}", f"{one.mfu:.1%}")
        last = (f"{figures['goodput']:.2%}", f"{one.days:.4g}", f"{one.cost:,.0f}" if one.cost else "-")
        cells.append((one.layout.name, *values, *last, "yes" if one.layout.runs_today else "no"))
    return _table(head, cells) if cells else '<p class="bad">No layout fits.</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(one)}</th>" for one in head)
    lines = ("<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
