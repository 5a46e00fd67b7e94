"""The lineage: the steps that led to the final state, by the term that applied them, and the discarded branches."""

from __future__ import annotations

from collections import defaultdict

from markupsafe import Markup

from chaos.report.story import Branch, Published, Story
from elastic_train.drawing.svg import LEFT, RIGHT, Axis, Stroke, along_x, boxes, figure, num, paths, tag, text

_TOP, _BAR, _FIRST, _ROW = 24.0, 16.0, 66.0, 20.0
_MOST_ROWS = 16
_LABELLED, _NUMBER = 12, 24.0
_APART = 4


def lineage_figure(story: Story) -> Markup:
    """Draw the trunk from step 0 to the end, and below it the rolled-back branches."""
    axis = Axis(0.0, float(story.furthest), apart=1.0)
    dead = [branch for branch in story.branches if branch.hi > branch.cut]
    is_labelled = len(dead) <= _LABELLED
    rows = _pack(dead, axis, 210.0 if is_labelled else 4.0)
    bottom = _FIRST + _ROW * max(1, max(rows.values(), default=0) + 1)
    parts = along_x(axis, _TOP, bottom, "step")
    kept = [branch for branch in story.branches if branch.cut > branch.lo]
    parts += paths([_trunk(branch, axis) for branch in kept])
    parts += [_number(branch, axis) for branch in kept if axis(branch.cut) - axis(branch.lo) >= _NUMBER]
    parts += paths([_branch(branch, axis, _FIRST + _ROW * rows[branch.term]) for branch in dead])
    parts += _commits([commit for commit in story.commits if commit.is_kept], axis, y=_TOP + _BAR / 2)
    for branch in dead:
        own = [commit for commit in story.commits if not commit.is_kept and commit.term == branch.term]
        parts += _commits(own, axis, y=_FIRST + _ROW * rows[branch.term])
    parts += [_label(branch, axis, _FIRST + _ROW * rows[branch.term]) for branch in dead if is_labelled]
    if not dead:
        parts.append(text(LEFT, _FIRST + 8, "no dead branch: no applied step was lost", class_="faint"))
    return figure(bottom + 34, f"lineage of {len(story.branches)} terms with {len(dead)} dead branches", parts)


def _trunk(branch: Branch, axis: Axis) -> Stroke:
    lo, hi = axis(branch.lo), axis(branch.cut)
    title = f"term {branch.term}, {branch.world} ranks: steps {branch.lo + 1} to {branch.cut} are in the lineage"
    return Stroke(f"t{branch.term % 8}", boxes([(lo, _TOP, max(1.0, hi - lo), _BAR)]), title)


def _number(branch: Branch, axis: Axis) -> Markup:
    return text((axis(branch.lo) + axis(branch.cut)) / 2, _TOP - 6, str(branch.term), class_="mid")


def _branch(branch: Branch, axis: Axis, y: float) -> Stroke:
    """Draw the rolled-back steps of a term, starting where they leave the lineage."""
    lo, hi = axis(branch.cut), max(axis(branch.hi), axis(branch.cut) + 3)
    drawn = f"M{num(lo)} {num(_TOP + _BAR)}V{num(y)}H{num(hi)}"
    return Stroke("dead-branch", drawn, f"{_say(branch)}, {branch.cut + 1} to {branch.hi}")


def _label(branch: Branch, axis: Axis, y: float) -> Markup:
    """Draw a branch's label next to it or, at the figure's edge, above it."""
    what, end = _say(branch), max(axis(branch.hi), axis(branch.cut) + 3)
    if end + 7.0 * len(what) <= RIGHT:
        return text(end + 6, y + 4, what, class_="faint halo")
    return text(RIGHT, y - 4, what, class_="end faint halo")


def _say(branch: Branch) -> str:
    num_steps = branch.hi - branch.cut
    return f"term {branch.term}: {num_steps} {'step' if num_steps == 1 else 'steps'} given up"


def _pack(dead: list[Branch], axis: Axis, apart: float) -> dict[int, int]:
    """Assign each discarded branch a row where it overlaps no other, including labels; the last row takes the rest."""
    ends: list[float] = []
    rows: dict[int, int] = {}
    for branch in dead:
        lo = axis(branch.cut)
        row = next((row for row, end in enumerate(ends) if end < lo), len(ends))
        row = min(row, _MOST_ROWS - 1)
        ends[row : row + 1] = [axis(branch.hi) + apart]
        rows[branch.term] = row
    return rows


def _commits(commits: list[Published], axis: Axis, y: float) -> list[Markup]:
    together: dict[int, list[Published]] = defaultdict(list)
    for commit in commits:
        together[int(axis(commit.step) / _APART)].append(commit)
    return [
        tag(
            "circle",
            tag("title", f"{group[0].key}" + (f"\nand {len(group) - 1} more here" if len(group) > 1 else "")),
            cx=axis(group[0].step),
            cy=y,
            r=3.0,
            class_="commit" if group[0].is_kept else "commit dead",
        )
        for group in together.values()
    ]
