"""Lineage: the order of commits, the chain from one to its ancestors, and the proof that the chain covers every step.

Commits are ordered by (term, step), never by time: a late record of an older term sorts below everything that a newer
world has published, so nothing newer ever has it as an ancestor. Every commit accounts for an interval of applied
steps; the intervals of a lineage must tile [0, T) with no gap and no overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_train.order import Cursor

COMMITS = "commits/"
_KEY = re.compile(r"commits/(\d{8,})-(\d{12,})\.json")


@dataclass(frozen=True, slots=True)
class CommitRef:
    """What the lineage needs to know of a commit; `parent` is the digest of the commit that it continues."""

    term: int
    step: int
    key: str
    digest: str
    parent: str | None
    cursor: Cursor

    @property
    def place(self) -> tuple[int, int]:
        """Where the commit stands in the order of all commits."""
        return self.term, self.step


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
    """Return the (term, step) that a key names, None if it is no record's key; the inverse of `commit_key`."""
    match = _KEY.fullmatch(key)
    place = (int(match[1]), int(match[2])) if match else None
    return place if place and commit_key(*place) == key else None


def head_of(commits: Iterable[CommitRef]) -> CommitRef | None:
    """Return the newest commit by (term, step)."""
    return max(commits, key=lambda commit: commit.place, default=None)


def ancestors(commit: CommitRef, by_digest: Mapping[str, CommitRef]) -> Iterator[CommitRef]:
    """Yield the commit's ancestors, nearest first, as far as they are known.

    A parent that does not come before its child ends the walk with ValueError: such a chain was not made by us.
    """
    while commit.parent is not None and commit.parent in by_digest:
        parent = by_digest[commit.parent]
        if parent.place >= commit.place or parent.step > commit.step:
            raise ValueError(f"{commit.key} names {parent.key} as its parent, which does not come before it")
        yield parent
        commit = parent


def extend(intervals: Sequence[Interval], term: int, lo: int, hi: int) -> tuple[Interval, ...]:
    """Append the steps [lo, hi) of a term; an adjoining interval of the same term grows."""
    if intervals and intervals[-1].term == term and intervals[-1].hi == lo:
        return (*intervals[:-1], Interval(term, intervals[-1].lo, hi))
    return (*intervals, Interval(term, lo, hi))


def cut(intervals: Sequence[Interval], step: int) -> tuple[Interval, ...]:
    """Return the part of a lineage before a step."""
    return tuple(Interval(i.term, i.lo, min(i.hi, step)) for i in intervals if i.lo < step)


def tiling_problems(intervals: Sequence[Interval], total: int) -> list[str]:
    """Describe every gap and overlap that keeps the intervals, oldest first, from tiling [0, total)."""
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
