"""One thing that goes wrong: what, when and where, as a regression's YAML file has it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.system import failpoints

POINTS = tuple(point for point in failpoints.POINTS if point != "sync")
"""The failpoints that a simulated process comes to; its disk has no file system under it."""
AT_POINTS = ("kill", "stop", "raise")
"""What happens to the process that comes to a failpoint; what happens at a moment is in `kinds`."""


@dataclass(frozen=True, slots=True)
class SimFault:
    """One fault: what, when (seconds, or from then on the n-th time that anybody comes to a failpoint), where, and for
    how long. Seconds are counted from the job's start, or from when it has applied `step` steps."""

    kind: str
    at_s: float = 0.0
    point: str = ""
    nth: int = 0
    node: int = 0
    """The node, counted from 0; -1: that of the leader, whichever that is then."""
    rank: int = 0
    """The worker of that node."""
    other: int = 0
    """The other end of a cut."""
    for_s: float = 0.0
    step: int = 0
