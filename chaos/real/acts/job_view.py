"""The view that acts have of their job: no act needs to know how a job is run; and the targets of a fault in it.

`chaos.real.job.Job` implements both protocols. Immediate acts get the first; failpoints, whose faults happen later,
record them when they do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos.real.acts.effects import Effect, gone, stopped
from chaos.real.history_tail import Followed
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due
from chaos.services.surroundings import Surroundings
from chaos.services.torchrun_node import Node

Undo = Callable[[], "list[int] | None"]
"""Undoes a fault and returns the processes that this started or ended; None if it must be retried."""

_BY_SIGNAL = {"SIGKILL": gone, "SIGTERM": gone, "SIGSTOP": stopped}


@dataclass(frozen=True, slots=True)
class Struck:
    """An injected fault: processes and nodes hit, and further fields to record."""

    pids: list[int]
    nodes: list[Node] = field(default_factory=list)
    signal: str | None = None
    undo: Undo | None = None
    recorded: dict[str, object] = field(default_factory=dict)
    effect: Effect | None = None
    """Observes the effect; optional if a signal and its processes imply it."""

    def __post_init__(self) -> None:
        if self.effect is None and (self.signal not in _BY_SIGNAL or not self.pids):
            raise ValueError("a fault needs an effect, or a signal and the processes that it hit: what proves it?")

    @property
    def proof(self) -> Effect:
        if self.effect is not None:
            return self.effect
        return _BY_SIGNAL[str(self.signal)](self.pids)


class JobView(Protocol):
    """A running job, as acts see it."""

    folder: Path
    nodes: list[Node]
    around: Surroundings
    followed: Followed
    """The current state, from its histories."""
    lost: list[Node]
    """Nodes that have ended and stay down until they are started."""
    damaged: set[str]
    """Commits with a damaged file."""
    draws: random.Random

    def on_event(self, text: str, /) -> None:
        """Show a line to the user."""


class JobLog(JobView, Protocol):
    """A running job that records faults which happen by themselves."""

    scenario: Scenario
    come_within_s: float
    """Seconds within which a healthy job must reach a failpoint before the fault is given up."""

    def note(self, fault: Due, done: Struck, at: float) -> None:
        """Record a fault that happened at `at` (unix seconds)."""

    def record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        """Append a line to the executor's own history."""

    def undo_after(self, seconds: float, kind: str, undo: Undo) -> None:
        """Undo a fault of this kind after `seconds`."""


Act = Callable[[JobView, Due], Struck | None]
"""Injects a fault and returns what it hit; None if there is no target now."""


def targets(job: JobView, fault: Due) -> list[Node]:
    """Return the nodes that a fault hits: by number, or by current role; none if no node has it."""
    up = [node for node in job.nodes if node.is_up]
    if isinstance(fault.target, int):
        return [job.nodes[fault.target]]
    in_need = ("leader", "writer", "other")
    leader = next((n for n in up if fault.target in in_need and job.followed.pids.get(0) in n.pids()), None)
    if fault.target in ("leader", "writer"):
        return [leader] if leader else []
    if fault.target == "other":
        others = [node for node in reversed(up) if node is not leader]
        return others[:1] if leader else []
    if fault.target == "lost":
        return job.lost[:1]
    sizes = {"one": 1, "minority": max(1, (len(up) - 1) // 2), "majority": len(up) // 2 + 1}
    return sorted(
        job.draws.sample(up, min(len(up), sizes.get(str(fault.target), len(up)))), key=lambda node: node.number
    )
