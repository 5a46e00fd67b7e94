"""The training time of each node, one row each, coloured by term; many nodes share rows, shaded by their fraction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from chaos.report.lanes import Lane, Span
from chaos.report.story import Story, Struck
from elastic_train.drawing.svg import (
    LEFT,
    RIGHT,
    Axis,
    along_x,
    boxes,
    figure,
    num,
    rect,
    seconds_in,
    tag,
    text,
    time_axis,
    titled,
)

TOP = 46.0
_MOST_ROWS, _MOST_SPANS, _MOST_CROSSES = 48, 2000, 150
_TRACK, _PAD = 9.0, 7.0
_STRIP, _STRIP_ROWS, _MOST_HIGH, _COLUMNS = 288.0, 96, 14.0, 490
_LEVELS = 4

Cell = tuple[int, int]
"""A term, and the fraction of processes that train in it, as a level from 1 to _LEVELS."""


def is_strip(story: Story) -> bool:
    """Return True if there are too many lanes, or spans in them, to draw each separately."""
    return len(story.lanes) > _MOST_ROWS or sum(len(lane.spans) for lane in story.lanes) > _MOST_SPANS


def lanes_figure(story: Story) -> Markup:
    """Draw each node's time in each term's world, and the faults."""
    axis, unit = time_axis(story.until)
    unit_s = seconds_in(unit)
    if not is_strip(story):
        parts, bottom, row_of = _rows(story.lanes, axis, unit_s)
    else:
        parts, bottom, row_of = _strip(story.lanes, axis, story.until)
    crosses = [(axis(fault.at / unit_s), row_of[fault.node]) for fault in story.faults if fault.node in row_of]
    drawn = sorted({(round(x), round(y, 1)) for x, y in crosses})
    arm = 4 if len(drawn) <= _MOST_CROSSES else 1
    struck = "".join(
        f"M{x - arm} {num(y - arm)}l{2 * arm} {2 * arm}m0 {-2 * arm}l{-2 * arm} {2 * arm}" for x, y in drawn
    )
    return figure(
        bottom + 34,
        f"{len(story.lanes)} lanes over time, coloured by term, with {len(story.faults)} faults",
        [
            *along_x(axis, TOP, bottom, unit),
            *bands(story.faults, axis, unit_s, TOP, bottom),
            *parts,
            *([tag("path", class_="cross", d=struck)] if struck else []),
            *marks(story.faults, axis, unit_s, TOP),
        ],
    )


def _rows(lanes: Sequence[Lane], axis: Axis, unit_s: float) -> tuple[list[Markup], float, dict[int, float]]:
    parts: list[Markup] = []
    row_of: dict[int, float] = {}
    y = TOP
    for lane in lanes:
        height = len(lane.tracks) * (_TRACK + 1)
        middle = y + _PAD / 2 + height / 2
        parts.append(text(LEFT - 8, middle + 4, lane.name, class_="end"))
        parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=y + height + _PAD, y2=y + height + _PAD, class_="grid"))
        for place, track in enumerate(lane.tracks):
            top = y + _PAD / 2 + place * (_TRACK + 1)
            parts += [_span(lane, span, axis, unit_s, top) for span in track]
        if lane.node is not None:
            row_of[lane.node] = middle
        y += height + _PAD
    return parts, y, row_of


def _span(lane: Lane, span: Span, axis: Axis, unit_s: float, top: float) -> Markup:
    title = (
        f"term {span.term} ({span.cause}): rank {span.rank}, process {span.pid}, {lane.name}\n"
        f"{span.lo:.1f} s to {span.hi:.1f} s"
    )
    lo, hi = axis(span.lo / unit_s), axis(span.hi / unit_s)
    return rect((lo, top), (hi, top + _TRACK), title, class_=f"t{span.term % 8}")


def _strip(lanes: Sequence[Lane], axis: Axis, until: float) -> tuple[list[Markup], float, dict[int, float]]:
    per_row = -(-len(lanes) // _STRIP_ROWS)
    rows = [lanes[lo : lo + per_row] for lo in range(0, len(lanes), per_row)]
    height = min(_MOST_HIGH, _STRIP / len(rows))
    places: dict[Cell, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(rows):
        for cell, lo, hi in _runs(_cells(row, until)):
            places[cell][lo, hi].append(number)
    width = (axis.end - axis.start) / _COLUMNS
    parts: list[Markup] = []
    for (term, level), runs in sorted(places.items()):
        drawn = [
            (LEFT + lo * width, TOP + first * height, (hi - lo) * width, count * height)
            for (lo, hi), numbers in sorted(runs.items())
            for first, count in _consecutive(numbers)
        ]
        share = f"{100 * (level - 1) // _LEVELS} to {100 * level // _LEVELS} %"
        title = f"term {term}: {share} of a row's processes train in it"
        parts.append(titled("path", title, class_=f"t{term % 8} level{level}", d=boxes(drawn)))
    labels = range(0, len(rows), math.ceil(_MOST_HIGH / height) * (3 if len(rows) > 20 else 1))
    names = [text(LEFT - 8, TOP + row * height + 10, rows[row][0].name, class_="end") for row in labels]
    row_of = {
        lane.node: TOP + (place // per_row + 0.5) * height for place, lane in enumerate(lanes) if lane.node is not None
    }
    return [*parts, *names], TOP + len(rows) * height, row_of


def _cells(row: Sequence[Lane], until: float) -> list[Cell | None]:
    """Return, per column of time, the term in which most processes of a row train, and their fraction as a level."""
    counts: dict[int, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(_COLUMNS, np.int64))
    for lane in row:
        for span in lane.spans:
            lo = min(_COLUMNS - 1, int(_COLUMNS * span.lo / (until or 1.0)))
            counts[span.term][lo : max(lo + 1, int(_COLUMNS * span.hi / (until or 1.0)))] += 1
    terms = sorted(counts)
    table = np.stack([counts[term] for term in terms])
    most, size = table.argmax(axis=0), sum(len(lane.tracks) for lane in row)
    numbers = table.max(axis=0)
    levels = np.minimum(_LEVELS, -(-_LEVELS * numbers // size))
    return [(terms[int(which)], int(level)) if level else None for which, level in zip(most, levels, strict=True)]


def _runs(cells: Sequence[Cell | None]) -> Iterator[tuple[Cell, int, int]]:
    lo = 0
    for cell, group in groupby(cells):
        hi = lo + len(list(group))
        if cell is not None:
            yield cell, lo, hi
        lo = hi


def _consecutive(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        stretch = [number for _, number in group]
        yield stretch[0], len(stretch)


_MOST_NAMED = 4
_LABELLED, _NAME_ROWS = 24, 3


def bands(faults: Sequence[Struck], axis: Axis, unit_s: float, top: float, bottom: float) -> list[Markup]:
    """Return the bands of all faults: from each fault to the next applied step.

    Faults closer than two units of width share a band, whose title has their number, so that long runs stay small.
    """
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
