"""What faults see of the job that they are done to: no act needs to know how a job is run.

`chaos.real.job.Job` is both of these. An act that strikes at once gets the first; failpoints, whose faults come later
by themselves, record them when they come.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from chaos.real.acts.outcome import Struck, Undo
from chaos.real.history_tail import Followed
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due
from chaos.services.surroundings import Surroundings
from chaos.services.torchrun_node import Node


class JobView(Protocol):
    """A running job, as acts see it."""

    folder: Path
    nodes: list[Node]
    around: Surroundings
    followed: Followed
    """What its histories have said so far."""
    lost: list[Node]
    """Nodes that have ended and stay away until they are started."""
    damaged: set[str]
    """Commits of which a file was spoilt."""
    draws: random.Random

    def on_event(self, text: str, /) -> None:
        """Show a line to the person who watches the run."""


class JobLog(JobView, Protocol):
    """A running job that takes note of faults which come by themselves."""

    scenario: Scenario
    come_within_s: float
    """How long a healthy job may take to come to a failpoint before that is given up."""

    def note(self, fault: Due, done: Struck, at: float) -> None:
        """Record a fault that came at a time (unix seconds)."""

    def record(self, op: str, *, t: float | None = None, **fields: object) -> None:
        """Append a line to the executor's own history."""

    def undo_after(self, seconds: float, kind: str, undo: Undo) -> None:
        """Undo a fault of this kind when so many seconds have passed."""


Act = Callable[[JobView, Due], Struck | None]
"""Does a fault and returns what it struck; None if nothing is there to be struck now."""
