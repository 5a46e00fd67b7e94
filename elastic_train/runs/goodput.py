"""Compute a run's time by use, and the cost of each change of its world: pure functions of a story.

The kinds of time tile the interval from the start of the first process to the last line: each second belongs to one
kind, except those between a finished job and its restart. Productive time is that of kept steps, without their waits
for saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.runs.story import Story, World

KINDS = ("steps", "given up", "saves", "validation", "starting", "recovering", "stopped", "ending")
MEANINGS = {
    "steps": "steps that count",
    "given up": "steps that a fault undid: computed again, or dropped with a world that stopped",
    "saves": "steps that waited for a save",
    "validation": "validating",
    "starting": "from a process's start to its first step, libraries and state included",
    "recovering": "from the last step of a world to the next one's first, without computing it",
    "stopped": "the job was not done, and no process ran it",
    "ending": "after the last step: last commit, last validation, result",
}
PLANNED = ("joined",)
"""Causes of a new world that are not faults."""


@dataclass(frozen=True, slots=True)
class Change:
    """A world that followed another: its cause and cost; seconds are None if the history lacks them.

    `rto_s` is from the last applied step before to the first one after; `steps_lost` had to be recomputed.
    """

    at: float
    term: int
    cause: str
    step: int
    size_before: int
    size: int
    steps_lost: int
    rto_s: float | None
    detect_s: float | None
    form_s: float | None
    restore_s: float | None
    follows_end: bool = False
    """True if the world before had finished the job, so that this one is a restart by a user."""

    @property
    def is_fault(self) -> bool:
        return self.cause not in PLANNED and not self.follows_end


def time_spent(story: Story) -> dict[str, float]:
    """Return the seconds of each kind of time; all 0 for a run without a history."""
    spent = dict.fromkeys(KINDS, 0.0)
    clock = story.began
    for place, world in enumerate(story.worlds):
        is_fresh = place == 0 or world.cause == "start"
        if is_fresh and place:
            if not _is_done(story.worlds[:place]):
                spent["stopped"] += max(0.0, world.started_at - clock)
            clock = max(clock, world.started_at)
        getting_there = "starting" if is_fresh else "recovering"
        spent[getting_there] += max(0.0, world.restored_at - clock)
        clock = max(clock, world.restored_at)
        clock = _add_steps(spent, world, clock, getting_there)
        if world.status is not None or world is story.worlds[-1]:
            spent["ending"] += max(0.0, world.ended_at - clock)
            clock = max(clock, world.ended_at)
    return spent


def _add_steps(spent: dict[str, float], world: World, clock: float, getting_there: str) -> float:
    """Add the time of a world's steps and of the gaps between them; return the time at which the last was applied."""
    if not world.steps:
        return clock
    kept = sum(step.seconds for step in world.kept)
    gone = sum(step.seconds for step in world.given_up)
    passed = max(0.0, world.steps[-1].at - clock)
    stall = min(kept, sum(saved.stall_s for saved in world.saves if saved.step <= world.cut))
    spent["steps"] += kept - stall
    spent["saves"] += stall
    spent["given up"] += gone
    validation = min(world.validation_s, max(0.0, passed - kept - gone))
    spent["validation"] += validation
    spent[getting_there] += max(0.0, passed - kept - gone - validation)
    return max(clock, world.steps[-1].at)


def goodput(spent: dict[str, float]) -> float | None:
    """Return the share of time in kept steps; None before any time has passed."""
    total = sum(spent.values())
    return spent["steps"] / total if total > 0 else None


def changes(story: Story) -> list[Change]:
    """Return every world except the first, with its cost."""
    found = []
    for place, world in enumerate(story.worlds[1:], start=1):
        before = story.worlds[:place]
        last_at = max((old.steps[-1].at for old in before if old.steps), default=None)
        first_at = world.steps[0].at if world.steps else None
        found.append(
            Change(
                at=last_at or before[-1].ended_at,
                term=world.term,
                cause=world.cause,
                step=world.lo,
                size_before=before[-1].size,
                size=world.size,
                steps_lost=_lost(before, world),
                rto_s=max(0.0, first_at - last_at) if first_at is not None and last_at is not None else None,
                detect_s=_seconds(world, "detect_s"),
                form_s=_seconds(world, "form_s"),
                restore_s=_seconds(world, "restore_s"),
                follows_end=world.cause == "start" and _is_done(before),
            )
        )
    return found


def _lost(before: Sequence[World], world: World) -> int:
    """Return how many applied steps, not rolled back before, a world did not continue."""
    standing = before[-1].lo
    for old in before:
        standing = old.hi if old.steps else min(standing, old.lo)
    return max(0, standing - world.lo)


def _is_done(worlds: Sequence[World]) -> bool:
    """Return True if the job was done when the last of these worlds that did anything ended."""
    return next((world.status for world in reversed(worlds) if world.steps or world.status), None) == "done"


def _seconds(world: World, key: str) -> float | None:
    value = world.resumed.get(key)
    return float(value) if isinstance(value, int | float) else None
