"""Figures over a run's time: samples/s, MFU, time by use, and duration of saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from elastic_train.drawing.page import NothingToDraw
from elastic_train.drawing.svg import (
    LEFT,
    RIGHT,
    Axis,
    Point,
    Stroke,
    along_x,
    along_y,
    figure,
    path,
    paths,
    rect,
    seconds_in,
    tag,
    text,
    time_axis,
    titled,
)
from elastic_train.runs.goodput import KINDS, MEANINGS
from elastic_train.runs.report import RunReport
from elastic_train.runs.story import Saved, Story
from elastic_train.system.wording import duration

_TOP, _BOTTOM = 30.0, 230.0
_MOST_POINTS = 400
_BAR, _ROW, _NAMES = 22.0, 34.0, 200.0


def throughput_figure(reports: Sequence[RunReport]) -> Markup:
    """Draw samples/s over each run's time; bands last from a world's last step to the next one's first."""
    known = [(place, report) for place, report in enumerate(reports) if report.story.kept]
    if not known:
        raise NothingToDraw("no history has a step that counts")
    rates = {place: _rates(report.story) for place, report in known}
    return _over_time(known, rates, "samples/s", "samples a second")


def mfu_figure(reports: Sequence[RunReport]) -> Markup:
    """Draw MFU over time: per step for the ranks it had, and over all time, including gaps between worlds."""
    shares = {
        place: [(at, 100 * known.mfu(rate, 1)) for at, rate in _rates(report.story, for_each_rank=True)]
        for place, report in enumerate(reports)
        if (known := report.utilisation) is not None and report.mfu is not None
    }
    if not shares:
        raise NothingToDraw("no run has known FLOPs per sample, a known peak of its devices and a step that counts")
    return _over_time(
        [(place, reports[place]) for place in shares], shares, "MFU, %", "model FLOP/s utilisation, in per cent,"
    )


def _over_time(
    known: Sequence[tuple[int, RunReport]],
    rates: Mapping[int, Sequence[tuple[float, float]]],
    label: str,
    what_it_is: str,
) -> Markup:
    """Draw a rate of each run, keyed by its index, above bands for the time lost between its worlds."""
    until = max(report.story.ended - report.story.began for _, report in known)
    most = max((rate for points in rates.values() for _, rate in points), default=1.0)
    axis, unit = time_axis(until)
    unit_s, height = seconds_in(unit), Axis(0.0, 1.05 * most, _BOTTOM, _TOP)
    parts = [*along_x(axis, _TOP, _BOTTOM, unit), *along_y(height, label)]
    for _, report in known:
        for change in report.changes:
            if change.rto_s is not None:
                lo = change.at - report.story.began
                corners = ((axis(lo / unit_s), _TOP), (axis((lo + change.rto_s) / unit_s), _BOTTOM))
                what = f"{report.name}: {change.cause}, {change.rto_s:.1f} s to the next step, term {change.term}"
                parts.append(rect(*corners, what, class_="band"))
    for place, report in reversed(known):
        points: list[Point] = [(axis(at / unit_s), height(rate)) for at, rate in rates[place]]
        points = points if len(points) > 1 else [points[0], (points[0][0] + 2.0, points[0][1])]
        parts += paths([Stroke(f"curve s{place % 8}", path(points), report.name)])
    return figure(_BOTTOM + 34, f"{what_it_is} over time of {len(known)} runs", parts)


def _rates(story: Story, *, for_each_rank: bool = False) -> list[tuple[float, float]]:
    """Return (seconds since the run began, samples/s) in intervals of equal length, 0 where no step was applied."""
    until = max(story.ended - story.began, 1e-6)
    spells = min(_MOST_POINTS, max(1, len(story.kept) // 2))
    samples = [0.0] * spells
    for world in story.worlds:
        size = (world.size or 1) if for_each_rank else 1
        for step in world.kept:
            samples[min(spells - 1, int(spells * (step.at - story.began) / until))] += step.num_samples / size
    length = until / spells
    return [((place + 0.5) * length, count / length) for place, count in enumerate(samples)]


def goodput_figure(reports: Sequence[RunReport]) -> Markup:
    """Draw one bar per run with the shares of its time by use."""
    known = [report for report in reports if report.seconds > 0]
    if not known:
        raise NothingToDraw("no run has a history that says how long it took")
    parts, y = list[Markup](), 8.0
    axis = Axis(0.0, 1.0, _NAMES + 8, RIGHT)
    for report in known:
        shown = report.name if len(report.name) <= 28 else "…" + report.name[-27:]
        parts.append(text(_NAMES, y + _BAR - 7, shown, class_="end"))
        parts += _bar(report, axis, y)
        y += _ROW
    return figure(y, "what the time of each run was spent on", parts)


def _bar(report: RunReport, axis: Axis, y: float) -> Iterable[Markup]:
    lo = 0.0
    for place, kind in enumerate(KINDS):
        share = report.spent[kind] / report.seconds
        if share > 0:
            what = f"{report.name}: {MEANINGS[kind]}: {duration(report.spent[kind])}, {share:.1%}"
            yield rect((axis(lo), y), (axis(lo + share), y + _BAR), what, class_=f"t{place % 8}")
            lo += share


def saves_figure(reports: Sequence[RunReport]) -> Markup:
    """Draw the time to publish each commit, and the time that training waited for it."""
    known = [(place, report, _saves(report)) for place, report in enumerate(reports)]
    most = max((max(saved.seconds, saved.stall_s) for _, _, saves in known for saved in saves), default=None)
    if most is None:
        raise NothingToDraw("no history has a commit")
    last = max(saved.step for _, _, saves in known for saved in saves)
    axis, height = Axis(0.0, float(last), apart=1.0), Axis(0.0, 1.05 * most or 1.0, _BOTTOM, _TOP)
    parts = [*along_x(axis, _TOP, _BOTTOM, "step"), *along_y(height, "seconds")]
    for place, report, saves in known:
        for saved in saves[:: -(-len(saves) // _MOST_POINTS) or 1]:
            what = f"{report.name}: step {saved.step}: {saved.seconds:.2f} s, training waited {saved.stall_s:.3f} s"
            x, colour = axis(saved.step), f"t{place % 8}"
            parts.append(titled("circle", what, cx=x, cy=height(saved.seconds), r=3.0, class_=colour))
            parts.append(tag("line", x1=x, x2=x, y1=height(0.0), y2=height(saved.stall_s), class_="stall"))
    parts.append(text(LEFT, 14, "a dot: until published; a bar: how long training waited", class_="faint"))
    return figure(_BOTTOM + 34, "seconds of every commit, and how long training waited", parts)


def _saves(report: RunReport) -> list[Saved]:
    return [saved for world in report.story.worlds for saved in world.saves]
