"""Heat maps of ranks: seconds per step by phase in the newest world, and each rank's compute time over steps.

With many ranks, neighbours share a row that shows the slowest of them, so that averaging cannot hide a slow rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from markupsafe import Markup

from elastic_train.drawing.page import NothingToDraw
from elastic_train.drawing.svg import RIGHT, figure, rect, text
from elastic_train.insight.phases import PHASES
from elastic_train.runs.story import Phases, Story

_MOST_ROWS, _MOST_COLUMNS = 64, 120
_LEFT, _TOP, _ROW = 130.0, 26.0, 16.0
_COMPUTE = (PHASES.index("forward"), PHASES.index("backward"))
NOTABLE = 0.5
"""Excess over the median compute time, as a fraction, that is drawn in full colour."""


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
    width = (RIGHT - _LEFT) / len(PHASES)
    parts = [text(_LEFT + (p + 0.5) * width, _TOP - 8, name, class_="mid") for p, name in enumerate(PHASES)]
    for row, group in enumerate(groups):
        y = _TOP + row * _ROW
        parts.append(text(_LEFT - 8, y + 12, _name(group, world.hosts), class_="end"))
        for place, name in enumerate(PHASES):
            what = f"{_name(group, {})}: {name} {rows[row][place] * 1e3:.2f} ms a step"
            corners = ((_LEFT + place * width, y), (_LEFT + (place + 1) * width - 1, y + _ROW - 1))
            parts.append(rect(*corners, what, class_="heat", fill_opacity=_opacity(rows[row][place] / most)))
    label = f"seconds of a step by phase and rank, term {world.term}"
    return figure(_TOP + len(groups) * _ROW + 8, label, parts)


def compute_figure(story: Story) -> Markup:
    """Draw ranks over steps: each one's compute time relative to the median rank's."""
    windows = [(world, window) for world in story.worlds for window in world.phases]
    most_ranks = max((len(window.rows) for _, window in windows), default=0)
    if most_ranks < 2:
        raise NothingToDraw("no world of two ranks or more has phases")
    columns = windows[:: -(-len(windows) // _MOST_COLUMNS)]
    groups, width = _groups(most_ranks), (RIGHT - _LEFT) / len(columns)
    parts = [
        text(_LEFT - 8, _TOP + row * _ROW + 12, _name(group, {}), class_="end") for row, group in enumerate(groups)
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
                (_LEFT + column * width, _TOP + row * _ROW),
                (_LEFT + (column + 1) * width - 0.5, _TOP + (row + 1) * _ROW - 1),
            )
            parts.append(rect(*corners, what, class_="heat", fill_opacity=_opacity(excess / NOTABLE)))
    ends = (columns[0][1].step, columns[-1][1].step)
    bottom = _TOP + len(groups) * _ROW
    parts += [text(_LEFT, bottom + 14, f"step {ends[0]}"), text(RIGHT, bottom + 14, f"step {ends[1]}", class_="end")]
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
