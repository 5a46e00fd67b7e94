"""Fault windows: from a fault to when all that it leads to has to be over; what comes later is not of its doing.

A run says how long that may take (`patience_s` of its `scenario` line): leases that end, peers that are waited for,
processes that are started. Faults that come before the one before is over are of one window.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    number,
    once,
    scenario_field,
)

PATIENCE_S = 300.0
"""For a run that does not say."""


@dataclass(frozen=True, slots=True)
class FaultWindows:
    """Disjoint intervals of time, in order."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]

    def since(self, moment: float) -> float:
        """Return when the window began that a moment is in; the moment itself if it is in none."""
        place = bisect_right(self.begins, moment) - 1
        return self.begins[place] if place >= 0 and moment <= self.ends[place] else moment

    def until(self, moment: float) -> float:
        """Return when the window ends that a moment is in; the moment itself if it is in none."""
        place = bisect_right(self.begins, moment) - 1
        return max(moment, self.ends[place]) if place >= 0 else moment


def patience_of(run: Evidence) -> float:
    """Return for how many seconds a fault that is over may still have consequences."""
    patience_s = scenario_field(run, "patience_s")
    return float(patience_s) if isinstance(patience_s, int | float) else PATIENCE_S


@once
def fault_windows_of(run: Evidence) -> FaultWindows:
    """Return the windows of a run's faults and of what was done to undo them."""
    patience_s, begins, ends = patience_of(run), list[float](), list[float]()
    for line in sorted([*run.of("fault"), *run.of("undo")], key=lambda line: number(line, "t")):
        begin, end = number(line, "t"), over_at(line) + patience_s
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return FaultWindows(tuple(begins), tuple(ends))


def over_at(line: Line) -> float:
    """Return when a fault is over, or when what it ended may be back."""
    seconds = line.get("for_s")
    return number(line, "t") + (float(seconds) if isinstance(seconds, int | float) else 0.0)
