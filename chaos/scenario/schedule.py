"""Fix when a scenario's faults come; steps are drawn from the seed alone.

A drawn step is in the middle of a commit interval, after the first commit, so that a kill loses applied steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.errors import ScenarioError
from chaos.scenario.model import Point, Scenario, Target

SMALLEST_INTERVAL = 4
"""Least commit interval in steps that has a drawn step apart from both commits."""


@dataclass(frozen=True, slots=True)
class Due:
    """A fault with a fixed time: a step, seconds, a failpoint, or seconds after the previous fault.

    A drawn step has a safe range within a commit interval of `interval` steps: if the job has passed it when the fault
    is due, the fault waits for the next interval.
    """

    kind: str
    target: Target | None
    step: int | None
    after_s: float | None
    interval: int | None = None
    for_s: float | None = None
    at_s: float | None = None
    point: Point | None = None
    is_healed: bool = False
    """Due once all earlier faults are undone, and the full world trains again."""
    job: int = 0
    """Index of the affected job, if there are several on Slurm."""

    def __str__(self) -> str:
        who = self.kind if self.target is None else f"{self.kind} {self.target}"
        if self.point is not None:
            return f"{who} at the {self.point.nth}. {self.point.name}"
        if self.at_s is not None:
            return f"{who} at {self.at_s:g} s"
        return f"{who} {f'{self.after_s:g} s later' if self.step is None else f'at step {self.step}'}"

    @property
    def is_drawn(self) -> bool:
        return self.interval is not None

    def has_come(self, seen_step: int) -> bool:
        """Return True if the job has reached the fault's step."""
        if self.step is None or seen_step < self.step:
            return self.step is None
        return self.interval is None or seen_step % self.interval in _middle(self.interval)


def schedule(scenario: Scenario, seed: int, total_steps: int, commit_every: int) -> list[Due]:
    """Fix every fault's time; drawn steps depend on the seed alone and increase."""
    problems = []
    if any(fault.within for fault in scenario.faults) and commit_every < SMALLEST_INTERVAL:
        problems.append(f"a commit every {commit_every} steps leaves none to lose; {SMALLEST_INTERVAL} are needed")
    rng = random.Random(seed)
    due: list[Due] = []
    for fault in scenario.faults:
        drawn = _draw(rng, fault.within, total_steps, commit_every) if fault.within and not problems else None
        step = drawn or fault.at_step
        due.append(
            Due(
                fault.kind,
                fault.node,
                step,
                fault.after_s,
                commit_every if fault.within else None,
                fault.for_s,
                fault.at_s,
                fault.at_point,
                job=fault.job,
            )
        )
        if step is not None and step >= total_steps:
            problems.append(f"{fault.kind} is due at step {step}, but the job has {total_steps} steps")
    if problems:
        raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in problems))
    return due


def _draw(rng: random.Random, within: tuple[float, float], total_steps: int, commit_every: int) -> int:
    """Draw a step from the middle of a commit interval that begins after the first commit."""
    lo, hi = (int(part * total_steps) for part in within)
    first, last = max(1, lo // commit_every), max(1, hi // commit_every - 1)
    return rng.randint(first, max(first, last)) * commit_every + rng.choice(_middle(commit_every))


def _middle(interval: int) -> range:
    """Return the offsets in a commit interval that are well apart from both commits.

    A kill comes some moments after its step was seen: just before a commit it could come after it.
    """
    margin = max(1, interval // 3)
    return range(margin, interval - margin)
