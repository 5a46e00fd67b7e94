"""Figures of a run's report, as SVG: over time, over steps, and heat maps of ranks.

Curves of one metric over steps are drawn for all runs: kept steps as lines, rolled-back steps dashed, faults as rules.
A curve is interrupted at non-finite values. Of several runs, the first is drawn last, above the others.

Heat maps show seconds per step by phase in the newest world, and each rank's compute time over steps. With many ranks,
neighbours share a row that shows the slowest of them, so that averaging cannot hide a slow rank.
"""

from __future__ import annotations

import math
import statistics
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
    curve,
    figure,
    num,
    path,
    paths,
    rect,
    seconds_in,
    tag,
    text,
    time_axis,
    titled,
    value_axis,
)
from elastic_train.insight.phases import PHASES
from elastic_train.runs.goodput import KINDS, MEANINGS
from elastic_train.runs.report import Curve, RunReport
from elastic_train.runs.story import Phases, Saved, Story
from elastic_train.system.wording import duration

_TOP, _BOTTOM = 30.0, 230.0
_MOST_POINTS = 400
_BAR, _ROW, _NAMES = 22.0, 34.0, 200.0
LOSS = "train/loss"
_MOST_ROWS, _MOST_COLUMNS = 64, 120
_MAP_LEFT, _MAP_TOP, _MAP_ROW = 130.0, 26.0, 16.0
_COMPUTE = (PHASES.index("forward"), PHASES.index("backward"))
NOTABLE = 0.5
"""Excess over the median compute time, as a fraction, that is drawn in full colour."""


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
            place = int(spells * (step.at - story.began) / until)  # below 0 by the clock of another leader
            samples[min(spells - 1, max(0, place))] += step.num_samples / size
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


def curve_figure(reports: Sequence[RunReport], metric: str) -> Markup:
    """Draw a metric of all runs that have it; raises NothingToDraw if none has a number."""
    curves = [(place, report, report.curves[metric]) for place, report in enumerate(reports) if metric in report.curves]
    gone = [losses for _, report, _ in curves for losses in _given_up(report)] if metric == LOSS else []
    values = [value for _, _, points in curves for _, value in points if math.isfinite(value)]
    values += [value for losses in gone for _, value in losses]
    if not values:
        raise NothingToDraw(f"no step has a number for {metric}")
    last = max(step for points in [*(points for _, _, points in curves), *gone] for step, _ in points)
    axis, height = Axis(0.0, float(last), apart=1.0), value_axis(min(values), max(values), _BOTTOM, _TOP)
    parts = [*along_x(axis, _TOP, _BOTTOM, "step"), *along_y(height, metric)]
    for _, report, _ in curves:
        parts += paths(_rules(report, axis))
    parts += paths([stroke for losses in gone for stroke in curve(losses, axis, height, "given up", "curve gone")])
    for place, report, points in reversed(curves):
        parts += paths(curve(points, axis, height, f"{report.name}: {metric}", f"curve s{place % 8}"))
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


def phases_figure(story: Story) -> Markup:
    """Draw ranks by phase, in seconds per step of the newest world with phases; darker means longer."""
    world = next((world for world in reversed(story.worlds) if world.phases), None)
    if world is None:
        raise NothingToDraw("the histories have no phases of ranks")
    windows = _alike(world.phases)
    num = sum(window.steps for window in windows)
    ranks = len(windows[-1].rows)
    cells = [
        [sum(window.rows[rank][place] for window in windows) / num for place in range(len(PHASES))]
        for rank in range(ranks)
    ]
    groups = _groups(ranks)
    rows = [[max(cells[rank][place] for rank in group) for place in range(len(PHASES))] for group in groups]
    most = max(max(row) for row in rows) or 1.0
    width = (RIGHT - _MAP_LEFT) / len(PHASES)
    parts = [text(_MAP_LEFT + (p + 0.5) * width, _MAP_TOP - 8, name, class_="mid") for p, name in enumerate(PHASES)]
    for row, group in enumerate(groups):
        y = _MAP_TOP + row * _MAP_ROW
        parts.append(text(_MAP_LEFT - 8, y + 12, _name(group, world.hosts), class_="end"))
        for place, name in enumerate(PHASES):
            what = f"{_name(group, {})}: {name} {rows[row][place] * 1e3:.2f} ms a step"
            corners = ((_MAP_LEFT + place * width, y), (_MAP_LEFT + (place + 1) * width - 1, y + _MAP_ROW - 1))
            parts.append(rect(*corners, what, class_="heat", fill_opacity=_opacity(rows[row][place] / most)))
    label = f"seconds of a step by phase and rank, term {world.term}"
    return figure(_MAP_TOP + len(groups) * _MAP_ROW + 8, label, parts)


def compute_figure(story: Story) -> Markup:
    """Draw ranks over steps: each one's compute time relative to the median rank's."""
    windows = [(world, window) for world in story.worlds for window in world.phases]
    most_ranks = max((len(window.rows) for _, window in windows), default=0)
    if most_ranks < 2:
        raise NothingToDraw("no world of two ranks or more has phases")
    columns = windows[:: -(-len(windows) // _MOST_COLUMNS)]
    groups, width = _groups(most_ranks), (RIGHT - _MAP_LEFT) / len(columns)
    parts = [
        text(_MAP_LEFT - 8, _MAP_TOP + row * _MAP_ROW + 12, _name(group, {}), class_="end")
        for row, group in enumerate(groups)
    ]
    for column, (world, window) in enumerate(columns):
        compute = [(row[_COMPUTE[0]] + row[_COMPUTE[1]]) / window.steps for row in window.rows]
        median = statistics.median(compute)
        for row, group in enumerate(groups):
            members = [rank for rank in group if rank < len(compute)]
            if not members:
                continue
            slowest = max(members, key=compute.__getitem__)
            excess = compute[slowest] / median - 1.0 if median > 0 else 0.0
            host = world.hosts.get(slowest)
            what = (
                f"rank {slowest}{f' on {host}' if host else ''}, steps to {window.step}, term {world.term}: "
                f"{compute[slowest] * 1e3:.1f} ms, {excess:+.0%} to the median"
            )
            corners = (
                (_MAP_LEFT + column * width, _MAP_TOP + row * _MAP_ROW),
                (_MAP_LEFT + (column + 1) * width - 0.5, _MAP_TOP + (row + 1) * _MAP_ROW - 1),
            )
            parts.append(rect(*corners, what, class_="heat", fill_opacity=_opacity(excess / NOTABLE)))
    ends = (columns[0][1].step, columns[-1][1].step)
    bottom = _MAP_TOP + len(groups) * _MAP_ROW
    parts += [
        text(_MAP_LEFT, bottom + 14, f"step {ends[0]}"),
        text(RIGHT, bottom + 14, f"step {ends[1]}", class_="end"),
    ]
    return figure(bottom + 24, f"computing of {most_ranks} ranks over steps, against the median", parts)


def _alike(windows: Sequence[Phases]) -> list[Phases]:
    """Return the windows with as many ranks as the last one; all windows of a world, except torn lines."""
    return [window for window in windows if len(window.rows) == len(windows[-1].rows)]


def _groups(num_ranks: int) -> list[range]:
    size = -(-num_ranks // _MOST_ROWS)
    return [range(lo, min(lo + size, num_ranks)) for lo in range(0, num_ranks, size)]


def _name(group: range, hosts: object) -> str:
    one = f"rank {group[0]}" if len(group) == 1 else f"ranks {group[0]}–{group[-1]}"
    host = hosts.get(group[0]) if isinstance(hosts, dict) else None
    return f"{one}, {str(host)[:10]}" if host and len(group) == 1 else one


def _opacity(share: float) -> str:
    """Return the opacity of a cell, never 0, so that every cell is visible."""
    return f"{0.06 + 0.94 * min(1.0, max(0.0, share)):.2f}"
