"""Faults in every figure with a time axis: a band from each fault to the next applied step.

Faults closer than two units of width share a band, whose title has their number, so that long runs stay small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from markupsafe import Markup

from chaos.report.story import Struck
from elastic_train.drawing.svg import RIGHT, Axis, rect, text

_MOST_NAMED = 4
_LABELLED, _NAME_ROWS = 24, 3


def bands(faults: Sequence[Struck], axis: Axis, unit_s: float, top: float, bottom: float) -> list[Markup]:
    together: dict[int, list[Struck]] = defaultdict(list)
    for fault in faults:
        together[int(axis(fault.at / unit_s) / 2)].append(fault)
    parts = []
    for group in together.values():
        lo = axis(min(fault.at for fault in group) / unit_s)
        hi = min(RIGHT, axis(max(fault.until for fault in group) / unit_s))
        parts.append(rect((lo, top), (max(hi, lo + 1.5), bottom), say(group), class_="band", data_faults=len(group)))
    return parts


def marks(faults: Sequence[Struck], axis: Axis, unit_s: float, y: float) -> list[Markup]:
    """Return a pointer for every fault, labelled with its kind where there is room."""
    parts: list[Markup] = []
    ordered = sorted(faults, key=lambda fault: fault.at)
    free = [0.0] * _NAME_ROWS
    for fault in ordered if len(ordered) <= _LABELLED else []:
        width = 6.4 * len(fault.kind)
        lo = min(axis(fault.at / unit_s) - 3, RIGHT - width)
        row = next((row for row in range(_NAME_ROWS) if lo >= free[row]), None)
        if row is not None:
            parts.append(text(lo, y - 9 - 12 * row, fault.kind, class_="fault-name"))
            free[row] = lo + width + 8
    places = sorted({round(axis(fault.at / unit_s)) for fault in ordered})
    pointers = "".join(f"M{x - 4} {y - 6}h8l-4 6z" for x in places)
    return [*parts, Markup('<path class="pointer" d="{}"/>').format(pointers)] if places else parts


def say(group: Sequence[Struck]) -> str:
    described = [describe(fault) for fault in group[:_MOST_NAMED]]
    more = [f"and {len(group) - _MOST_NAMED} more"] if len(group) > _MOST_NAMED else []
    return "\n".join([*described, *more])


def describe(fault: Struck) -> str:
    when = f"{fault.at:.1f} s" + (f", step {fault.step}" if fault.step is not None else "")
    if fault.cost is None:
        return f"{fault.name} ({when}): no newer world has applied a step after it"
    lost, named = fault.cost.rpo_steps, ("detect", "form", "restore", "warm")
    parts = (fault.cost.detect_s, fault.cost.form_s, fault.cost.restore_s, fault.cost.warm_s)
    split = ", ".join(f"{name} {part:.2f}" for name, part in zip(named, parts, strict=True) if part is not None)
    return f"{fault.name} ({when}): {lost} steps lost, {fault.cost.rto_s:.2f} s to the next step ({split})"
