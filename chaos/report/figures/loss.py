"""The loss of the faulted run's lineage compared with the fault-free run, and the steps where they differ."""

from __future__ import annotations

import math

from markupsafe import Markup

from chaos.report.story import Story
from elastic_train.drawing.svg import Axis, along_x, along_y, curve, figure, paths, tag, value_axis

_TOP, _BOTTOM = 30.0, 250.0
_MOST_MARKS = 300


def loss_figure(story: Story, reference: Story | None) -> Markup:
    """Draw the losses of kept and rolled-back steps over those of the reference."""
    kept, gone = losses_of(story), _given_up(story)
    expected = losses_of(reference) if reference else {}
    shown = [loss for losses in (kept, expected) for loss in losses.values() if math.isfinite(loss)]
    if not shown:
        raise ValueError("no step has a loss that is a number")
    axis, height = Axis(0.0, float(story.furthest), apart=1.0), value_axis(min(shown), max(shown), _BOTTOM, _TOP)
    parts = [*along_x(axis, _TOP, _BOTTOM, "step"), *along_y(height, "loss")]
    parts += paths(curve(expected.items(), axis, height, "without faults", "reference"))
    parts += paths(
        [piece for losses in gone for piece in curve(losses.items(), axis, height, "given up", "curve gone")]
    )
    parts += paths(curve(kept.items(), axis, height, "with faults", "curve ink"))
    differing = [step for step, loss in kept.items() if step in expected and not _equal(loss, expected[step])]
    for step in differing[:: -(-len(differing) // _MOST_MARKS) or 1]:
        y = height(kept[step]) if math.isfinite(kept[step]) else _TOP
        title = f"step {step}: {kept[step]}, without faults {expected[step]}"
        parts.append(tag("circle", tag("title", title), cx=axis(step), cy=y, r=3.5, class_="differs"))
    return figure(_BOTTOM + 34, "loss of the faulted run over the fault-free one", parts)


def losses_of(story: Story) -> dict[int, float]:
    """Return the loss of each step of the lineage that a history records."""
    return {
        applied.step: applied.loss
        for branch in story.branches
        for applied in branch.steps
        if branch.lo < applied.step <= branch.cut
    }


def compared(story: Story, reference: Story | None) -> str:
    """Describe the number of steps whose losses differ."""
    if reference is None:
        return "There is no run without faults to compare with"
    kept, expected = losses_of(story), losses_of(reference)
    both = [step for step in kept if step in expected]
    differing = sum(not _equal(kept[step], expected[step]) for step in both)
    return f"{differing} of {len(both)} steps have another loss than without faults"


def _given_up(story: Story) -> list[dict[int, float]]:
    return [
        {applied.step: applied.loss for applied in branch.steps if applied.step > branch.cut}
        for branch in story.branches
        if branch.hi > branch.cut
    ]


def _equal(loss: float, other: float) -> bool:
    return loss == other or (math.isnan(loss) and math.isnan(other))
