"""One fault: kind, time and place, as stored in a regression's YAML file."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.system import failpoints

POINTS = tuple(point for point in failpoints.POINTS if point != "sync")
"""Failpoints that a simulated process reaches; `sync` is missing because its disk has no file system."""
AT_POINTS = ("kill", "stop", "raise")
"""Effects at a failpoint; effects at a moment are in `kinds`."""


@dataclass(frozen=True, slots=True)
class SimFault:
    """One fault: kind, time (seconds; with `point`, then the n-th hit of that failpoint), place and duration. Seconds
    count from the start of the job, or from when it has applied `step` steps."""

    kind: str
    at_s: float = 0.0
    point: str = ""
    nth: int = 0
    node: int = 0
    """Index of the node; -1: the node that leads at the time."""
    rank: int = 0
    """Index of the worker on that node."""
    other: int = 0
    """The other end of a cut."""
    for_s: float = 0.0
    step: int = 0
