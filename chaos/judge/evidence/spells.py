"""The window of a fault: from its start until all its consequences must be over; it explains nothing later.

A run states how long after a fault's own end that may take (`patience_s` of its `scenario` line): leases expire, peers
time out, processes start. Each fault has its own window, so that in a soak, where the next fault always comes earlier,
a fault of an hour ago explains nothing. The undoing of a fault also has a window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from chaos.judge.evidence.clocks import TOLERANCE_S
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    number,
    once,
    scenario_field,
)

PATIENCE_S = 300.0
"""Default for runs that do not state it."""
EARLY_S = TOLERANCE_S
"""Seconds before a fault at which its consequences may be stamped: smaller clock differences are not corrected."""


@dataclass(frozen=True, slots=True)
class Spells:
    """Time windows by start, which may overlap, with their faults and undoings."""

    lines: tuple[Line, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    furthest: tuple[float, ...]
    """Latest end among each window and those before it."""

    def at(self, moment: float) -> list[Line]:
        """Return the faults and undoings whose windows contain a moment, in order of time."""
        first, end = bisect_left(self.furthest, moment), bisect_right(self.begins, moment)
        return [self.lines[place] for place in range(first, end) if self.ends[place] >= moment]

    def quiet_s(self, since: float, until: float) -> float:
        """Return the longest part of an interval outside all windows."""
        quiet_s, at = 0.0, since
        for place in range(bisect_left(self.furthest, since), bisect_right(self.begins, until)):
            quiet_s, at = max(quiet_s, self.begins[place] - at), max(at, self.ends[place])
        return max(quiet_s, until - at)


def answering_s(run: Evidence, since: float, until: float) -> float:
    """Return how much of an interval its faults take up: each one's duration and one recovery."""
    recovery_s = scenario_field(run, "recovery_s")
    if not isinstance(recovery_s, int | float):
        return 0.0
    taken_s, at = 0.0, since
    faults, times = _faults_by_time(run)
    for place in range(bisect_right(times, since), bisect_left(times, until)):
        begin, end = max(at, times[place]), min(until, over_at(faults[place]) + recovery_s)
        taken_s, at = taken_s + max(0.0, end - begin), max(at, end)
    return taken_s


@once
def _faults_by_time(run: Evidence) -> tuple[list[Line], list[float]]:
    faults = sorted(run.of("fault"), key=lambda line: number(line, "t"))
    return faults, [number(line, "t") for line in faults]


def patience_of(run: Evidence) -> float:
    """Return for how many seconds after its end a fault may have consequences."""
    patience_s = scenario_field(run, "patience_s")
    return float(patience_s) if isinstance(patience_s, int | float) else PATIENCE_S


@once
def spells_of(run: Evidence) -> Spells:
    """Return the windows of a run's faults and undoings."""
    lines = sorted([*run.of("fault"), *run.of("undo")], key=lambda line: number(line, "t"))
    ends = [spell_end(run, line) for line in lines]
    begins = tuple(number(line, "t") - EARLY_S for line in lines)
    return Spells(tuple(lines), begins, tuple(ends), tuple(accumulate(ends, max)))


def spell_end(run: Evidence, line: Line) -> float:
    """Return when all consequences of a fault must be over."""
    return over_at(line) + patience_of(run)


def over_at(line: Line) -> float:
    """Return when a fault is over, or what it ended may be back."""
    seconds = line.get("for_s")
    return number(line, "t") + (float(seconds) if isinstance(seconds, int | float) else 0.0)
