"""Curves of one metric over steps, for all runs: kept steps as lines, rolled-back steps dashed, faults as rules.

A curve is interrupted at non-finite values. Of several runs, the first is drawn last, above the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from elastic_train.drawing.page import NothingToDraw
from elastic_train.drawing.svg import Axis, Point, Stroke, along_x, along_y, figure, num, path, paths
from elastic_train.runs.report import Curve, RunReport

_TOP, _BOTTOM = 30.0, 230.0
LOSS = "train/loss"


def curve_figure(reports: Sequence[RunReport], metric: str) -> Markup:
    """Draw a metric of all runs that have it; raises NothingToDraw if none has a number."""
    curves = [(place, report, report.curves[metric]) for place, report in enumerate(reports) if metric in report.curves]
    gone = [losses for _, report, _ in curves for losses in _given_up(report)] if metric == LOSS else []
    values = [value for _, _, curve in curves for _, value in curve if math.isfinite(value)]
    values += [value for losses in gone for _, value in losses]
    if not values:
        raise NothingToDraw(f"no step has a number for {metric}")
    last = max(step for curve in [*(curve for _, _, curve in curves), *gone] for step, _ in curve)
    axis, height = Axis(0.0, float(last), apart=1.0), _height(min(values), max(values))
    parts = [*along_x(axis, _TOP, _BOTTOM, "step"), *along_y(height, metric)]
    for _, report, _ in curves:
        parts += paths(_rules(report, axis))
    parts += paths([stroke for losses in gone for stroke in _drawn(losses, axis, height, "given up", "curve gone")])
    for place, report, curve in reversed(curves):
        parts += paths(_drawn(curve, axis, height, f"{report.name}: {metric}", f"curve s{place % 8}"))
    return figure(_BOTTOM + 34, f"{metric} over steps of {len(curves)} runs", parts)


def _given_up(report: RunReport) -> list[Curve]:
    """Return the losses of rolled-back steps, by world."""
    lost = ([(s.step, s.loss) for s in world.given_up if s.loss is not None] for world in report.story.worlds)
    return [losses for losses in lost if losses]


def _rules(report: RunReport, axis: Axis) -> list[Stroke]:
    """Draw a rule at the start of each world that followed another."""
    return [
        Stroke(
            "rule-fault" if change.is_fault else "rule-change",
            f"M{num(axis(change.step))} {num(_TOP)}V{num(_BOTTOM)}",
            f"{report.name}: term {change.term} from step {change.step}, {change.cause}: {change.size_before} to "
            f"{change.size} ranks, {change.steps_lost} steps lost",
        )
        for change in report.changes
    ]


def _drawn(curve: Curve, axis: Axis, height: Axis, title: str, class_: str) -> list[Stroke]:
    strokes = []
    for is_finite, group in groupby(curve, key=lambda point: math.isfinite(point[1])):
        points: list[Point] = [(axis(step), height(value)) for step, value in group] if is_finite else []
        if points:
            points = points if len(points) > 1 else [points[0], (points[0][0] + 2.0, points[0][1])]
            strokes.append(Stroke(class_, path(points), title))
    return strokes


def _height(lo: float, hi: float) -> Axis:
    margin = 0.05 * (hi - lo) or 0.05 * abs(hi) or 0.5
    return Axis(lo - margin, hi + margin, _BOTTOM, _TOP)
