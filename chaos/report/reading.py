"""Read history lines that have the required fields; other lines are counted and skipped, so torn runs can be drawn."""

from __future__ import annotations

import math
from collections import defaultdict

from chaos.judge.evidence.run_files import Evidence, Line


class Reader:
    """Yields lines with a finite time and integers for `keys`; `num_left_out` counts the others."""

    def __init__(self, run: Evidence) -> None:
        self.run = run
        self._by_op: dict[object, list[Line]] = defaultdict(list)
        self._left_out: set[int] = set()
        times = []
        for line in (line for process in run.processes for line in process):
            if is_number(line.get("t")):
                self._by_op[line["op"]].append(line)
                times.append(time_of(line))
            else:
                self._left_out.add(id(line))
        self.began, self.ended = min(times, default=0.0), max(times, default=0.0)

    @property
    def num_left_out(self) -> int:
        return len(self._left_out)

    def of(self, op: str, *keys: str) -> list[Line]:
        """Return an operation's lines in order of time."""
        sound = []
        for line in self._by_op[op]:
            if all(is_whole(line.get(key)) for key in keys):
                sound.append(line)
            else:
                self._left_out.add(id(line))
        return sorted(sound, key=time_of)

    def at(self, line: Line) -> float:
        """Return a line's time in seconds since the run began."""
        return time_of(line) - self.began


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def time_of(line: Line) -> float:
    time = line["t"]
    assert isinstance(time, int | float), "only called for lines with a time"
    return time


def pids_of(line: Line) -> list[int]:
    pids = line.get("pids")
    return [pid for pid in pids if isinstance(pid, int)] if isinstance(pids, list) else []
