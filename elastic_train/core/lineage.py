"""Lineage: the order of commits, and the proof that a chain of them covers every step.

Commits are ordered by (term, step), never by time: a late record of an older term sorts below everything that a newer
world has published, so it never becomes an ancestor of anything newer. Every commit accounts for an interval of applied
steps; the intervals of a lineage must tile [0, T) without gap or overlap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

COMMITS, ATTEMPTS = "commits/", "data/"
_KEY = re.compile(r"commits/(\d{8,})-(\d{12,})\.json")


@dataclass(frozen=True, slots=True)
class Interval:
    """The applied steps [lo, hi) that one term added to a lineage."""

    term: int
    lo: int
    hi: int

    def __str__(self) -> str:
        return f"[{self.lo}, {self.hi}) of term {self.term}"


def commit_key(term: int, step: int) -> str:
    """Return the key of a commit's record; keys sort as commits do."""
    return f"{COMMITS}{term:08d}-{step:012d}.json"


def place_of(key: str) -> tuple[int, int] | None:
    """Return the (term, step) of a key, None if it is not a record's; the inverse of `commit_key`."""
    match = _KEY.fullmatch(key)
    place = (int(match[1]), int(match[2])) if match else None
    return place if place and commit_key(*place) == key else None


def extend(intervals: Sequence[Interval], term: int, lo: int, hi: int) -> tuple[Interval, ...]:
    """Append the steps [lo, hi) of a term, merged with an adjacent interval of the same term."""
    if intervals and intervals[-1].term == term and intervals[-1].hi == lo:
        return (*intervals[:-1], Interval(term, intervals[-1].lo, hi))
    return (*intervals, Interval(term, lo, hi))


def cut(intervals: Sequence[Interval], step: int) -> tuple[Interval, ...]:
    """Return the part of a lineage before a step."""
    return tuple(Interval(i.term, i.lo, min(i.hi, step)) for i in intervals if i.lo < step)


def parted_at(one: Sequence[Interval], other: Sequence[Interval]) -> int:
    """Return how many steps two lineages share."""
    step = min(one[-1].hi if one else 0, other[-1].hi if other else 0)
    while cut(one, step) != cut(other, step):
        step = max(i.lo for i in (*cut(one, step), *cut(other, step)))
    return step


def tiling_problems(intervals: Sequence[Interval], total: int) -> list[str]:
    """Return every gap and overlap that keeps the intervals, oldest first, from tiling [0, total)."""
    problems: list[str] = []
    done = 0
    before: Interval | None = None
    for interval in intervals:
        if interval.lo >= interval.hi:
            problems.append(f"{interval} holds no step")
        if interval.lo > done:
            problems.append(f"gap: steps [{done}, {interval.lo}) are in no interval before {interval}")
        if interval.lo < done:
            twice = f"[{interval.lo}, {min(done, interval.hi)})"
            problems.append(f"overlap: steps {twice} are in {interval} and before it, up to {before}")
        if before is not None and interval.term < before.term:
            problems.append(f"order: {interval} follows {before}, but terms only grow")
        done = max(done, interval.hi)
        before = interval
    if done < total:
        problems.append(f"gap: steps [{done}, {total}) are in no interval")
    if done > total:
        problems.append(f"overlap: the intervals end at {done}, beyond the last step {total}")
    return problems
