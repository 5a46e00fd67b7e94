"""Coverage of faults: which kinds hit which phases of the job and which failpoints, and which never did.

The possible kinds and points are in the executor's `scenario` line (`kinds`, `points`, `point_kinds`); without them,
only the faults that happened are known. The phase follows from the times in the histories.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.judge.evidence.run_files import whole
from chaos.report.reading import Reader, is_number
from chaos.report.story import Story, Struck

MOMENTS = ("before the first world", "forming", "restoring", "computing", "committing", "recovering")
"""Phases of a job at the time of a fault; `recovering` is from an earlier fault to the next applied step."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Grid:
    """Number of faults by (row, column); `is_listed` is True if the evidence names all possible rows and columns."""

    rows: Sequence[str]
    columns: Sequence[str]
    hits: Counter[tuple[str, str]]
    is_listed: bool

    @property
    def never(self) -> list[tuple[str, str]]:
        return [(row, column) for row in self.rows for column in self.columns if not self.hits[row, column]]


def moments_grid(reader: Reader, story: Story) -> Grid:
    """Return the faults by kind and phase of the job, except those at failpoints, which are in the other grid."""
    listed = _listed(reader, "kinds")
    during = {"committing": _commits(reader), "restoring": _restores(reader), "forming": _forms(reader)}
    during["recovering"] = [(fault.at, fault.until) for fault in story.faults if fault.cost]
    merged = {name: _merged(intervals) for name, intervals in during.items()}
    faults = [fault for fault in story.faults if not fault.point]
    hits = Counter((fault.kind, _moment(fault, story, merged)) for fault in faults)
    kinds = dict.fromkeys([*listed, *sorted(kind for kind, _ in hits)])
    return Grid(list(kinds), MOMENTS, hits, bool(listed))


def points_grid(reader: Reader, story: Story) -> Grid:
    """Return the faults by failpoint and kind."""
    is_script = bool(reader.of("script"))  # a user's script has no failpoints
    points, kinds = ([], []) if is_script else (_listed(reader, "points"), _listed(reader, "point_kinds"))
    hits = Counter((fault.point, fault.kind) for fault in story.faults if fault.point)
    rows = dict.fromkeys([*points, *sorted(point for point, _ in hits)])
    columns = dict.fromkeys([*kinds, *sorted(kind for _, kind in hits)])
    return Grid(list(rows), list(columns), hits, bool(points and kinds))


def _moment(fault: Struck, story: Story, during: dict[str, list[Interval]]) -> str:
    if not story.branches or fault.at < story.branches[0].formed_at:
        return MOMENTS[0]
    return next((name for name, intervals in during.items() if _is_inside(fault.at, intervals)), "computing")


def _is_inside(time: float, intervals: list[Interval]) -> bool:
    """Return True if a time is within one of several disjoint intervals; a fault is not within its own recovery."""
    place = bisect_left(intervals, (time, time))
    return place > 0 and time <= intervals[place - 1][1]


def _merged(intervals: list[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    merged: list[Interval] = []
    for lo, hi in sorted(intervals):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def _commits(reader: Reader) -> list[Interval]:
    lines = [line for line in reader.of("commit") if is_number(line.get("seconds"))]
    return [(reader.at(line) - float(str(line["seconds"])), reader.at(line)) for line in lines]


def _restores(reader: Reader) -> list[Interval]:
    formed = {whole(line, "term"): reader.at(line) for line in reversed(reader.of("form", "term"))}
    ends = [(whole(line, "term"), reader.at(line)) for line in reader.of("restore", "term")]
    return [(formed[term], end) for term, end in ends if term in formed]


def _forms(reader: Reader) -> list[Interval]:
    lines = [line for line in reader.of("form") if is_number(line.get("sealed_at"))]
    # `sealed_at` is from the leader's clock, which may be ahead.
    return [(min(float(str(line["sealed_at"])) - reader.began, reader.at(line)), reader.at(line)) for line in lines]


def _listed(reader: Reader, key: str) -> list[str]:
    """Return a list from the executor's first line; empty if it has none."""
    value = next((line.get(key) for line in reader.of("scenario")), None)
    return [str(item) for item in value] if isinstance(value, list) else []
