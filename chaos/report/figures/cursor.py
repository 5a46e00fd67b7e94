"""The cursor over time: the steps applied by each term, the commits, and the cost of each fault.

A fault's cost is a rectangle: its width is the RTO (seconds to the next applied step), its height the RPO (applied
steps that the next world rolled back and recomputed).
"""

from __future__ import annotations

from collections import Counter, defaultdict

from markupsafe import Markup

from chaos.judge.evidence.recovery_cost import Recovery
from chaos.report.figures.lanes import bands, describe
from chaos.report.story import Branch, Story, Struck
from elastic_train.drawing.svg import (
    MOST_TITLED,
    RIGHT,
    Axis,
    Point,
    Stroke,
    along_x,
    along_y,
    boxes,
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
)

_TOP, _BOTTOM = 30.0, 310.0
_LABELLED = 12
_APART = 4
_LETTER = 7.0
"""Approximate width of a letter."""


def cursor_figure(story: Story) -> Markup:
    """Draw steps over seconds."""
    axis, unit = time_axis(story.until)
    unit_s, height = seconds_in(unit), Axis(0.0, float(story.furthest), _BOTTOM, _TOP, apart=1.0)
    restored = {branch.term: branch.lo for branch in story.branches}
    parts = [
        *along_x(axis, _TOP, _BOTTOM, unit),
        *along_y(height, "step"),
        *bands(story.faults, axis, unit_s, _TOP, _BOTTOM),
    ]
    parts += paths([stroke for branch in story.branches for stroke in _curves(branch, axis, unit_s, height)])
    parts += _prices(story, restored, axis, unit_s, height)
    shared: Counter[int] = Counter()
    for fault in story.faults:
        if fault.cost is not None and fault.cost.term in restored and len(story.faults) <= _LABELLED:
            what, x = _say(fault.cost), axis(fault.until / unit_s) + 4
            y = height(restored[fault.cost.term]) + 13 * (1 + shared[fault.cost.term])
            is_wide = x + _LETTER * len(what) > RIGHT
            parts.append(text(RIGHT if is_wide else x, y, what, class_="end faint halo" if is_wide else "faint halo"))
            shared[fault.cost.term] += 1
    parts += _commits(story, axis, unit_s, height)
    label = f"steps applied over time in {len(story.branches)} terms, with {len(story.commits)} commits"
    return figure(_BOTTOM + 34, label, parts)


def _curves(branch: Branch, axis: Axis, unit_s: float, height: Axis) -> list[Stroke]:
    """Draw kept steps in the term's colour, and then the rolled-back ones."""
    began = (branch.formed_at, branch.lo)
    places = [began, *((applied.at, applied.step) for applied in branch.steps)]
    points = [(axis(time / unit_s), height(step), step) for time, step in places]
    kept: list[Point] = [(x, y) for x, y, step in points if step <= branch.cut]
    gone: list[Point] = [*kept[-1:], *((x, y) for x, y, step in points if step > branch.cut)]
    title = f"term {branch.term}, {branch.world} ranks: steps {branch.lo + 1} to {branch.hi}"
    parts = [Stroke(f"curve s{branch.term % 8}", path(kept), title)] if kept else []
    if branch.hi > branch.cut:
        lost = f"{title}; those after {branch.cut} were lost"
        parts.append(Stroke("curve gone", path(gone), lost))
    return parts


def _prices(story: Story, restored: dict[int, int], axis: Axis, unit_s: float, height: Axis) -> list[Markup]:
    """Draw each recovery as a rectangle, RTO wide and RPO high."""
    drawn: list[tuple[Point, Point, Struck, Recovery]] = []
    for fault in story.faults:
        if fault.cost is not None and fault.cost.term in restored:
            step = restored[fault.cost.term]
            bottom, lost = height(step), height(step + fault.cost.rpo_steps)
            lo, hi = axis(fault.at / unit_s), axis(fault.until / unit_s)
            drawn.append(((lo, min(lost, bottom - 3)), (hi, bottom), fault, fault.cost))
    if len(drawn) > MOST_TITLED:
        rects = {
            (round(x), round(y), max(1, round(hi - x)), max(1, round(bottom - y))) for (x, y), (hi, bottom), *_ in drawn
        }
        return [tag("path", class_="price", d=boxes(sorted(rects)))]
    return [
        rect(
            *(lo, hi, describe(fault)),
            class_="price",
            data_rpo=str(cost.rpo_steps),
            data_rto=f"{cost.rto_s:.3f}",
        )
        for lo, hi, fault, cost in drawn
    ]


def _say(cost: Recovery) -> str:
    steps = f"{cost.rpo_steps} {'step' if cost.rpo_steps == 1 else 'steps'}, " if cost.rpo_steps else ""
    return f"{steps}{cost.rto_s:.1f} s"


def _commits(story: Story, axis: Axis, unit_s: float, height: Axis) -> list[Markup]:
    """Draw commits as dots, hollow if the final state does not descend from them; touching commits share a dot."""
    together: dict[tuple[bool, int, int], list[str]] = defaultdict(list)
    places: dict[tuple[bool, int, int], Point] = {}
    for commit in story.commits:
        x, y = axis(commit.at / unit_s), height(commit.step)
        key = (commit.is_kept, int(x / _APART), int(y / _APART))
        places.setdefault(key, (x, y))
        together[key].append(f"commit of step {commit.step}, term {commit.term}, {commit.at:.1f} s\n{commit.key}")
    return [
        titled(
            "circle",
            titles[0] if len(titles) == 1 else f"{titles[0]}\nand {len(titles) - 1} more here",
            cx=num(places[key][0]),
            cy=num(places[key][1]),
            r=3.0,
            class_="commit" if key[0] else "commit dead",
            data_commits=len(titles),
        )
        for key, titles in together.items()
    ]
