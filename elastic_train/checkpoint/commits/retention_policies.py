"""Retention policies: each names commits worth keeping; a commit stays if any wants it. No I/O.

A policy sees all commits, newest first. A policy over periods wants the first commit of each, so what it once wanted it
always wants, however many others are deleted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.config.recipe import parse_best
from elastic_train.core.lineage import cut, place_of
from elastic_train.errors import ConfigError


class Candidate:
    """A commit whose record is read on first use; None if it cannot be read."""

    def __init__(
        self, key: str, step: int, read: Callable[[], CommitRecord | None], newest: CommitRecord | None = None
    ) -> None:
        self.key = key
        self.step = step
        self._read = read
        self._newest = newest

    @functools.cached_property
    def record(self) -> CommitRecord | None:
        return self._read()

    @functools.cached_property
    def is_of_lineage(self) -> bool:
        """True if this commit is the newest or its ancestor; no search falls back to any other.

        The commit of a process that left alone, in a term that applied nothing, is recognised by its record.
        """
        newest, place = self._newest, place_of(self.key)
        if newest is None or self.key == newest.key or place is None:
            return True
        term = next((i.term for i in newest.intervals if i.lo < self.step <= i.hi), None)
        if term is None or term >= place[0]:
            return term == place[0]
        return self.record is not None and self.record.intervals == cut(newest.intervals, self.step)


class Policy(Protocol):
    """A reason to keep commits."""

    def wanted(self, commits: Sequence[Candidate]) -> Iterable[str]:
        """Return the keys of the commits to keep, given all, newest first."""


@dataclass(frozen=True, slots=True)
class Last:
    """Keep the newest `num` commits of the lineage, and everything newer than the last of them.

    Commits outside the lineage do not count, or the only intact commit could be deleted.
    """

    num: int

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError(f"the number of last commits to keep must be at least 1, not {self.num}")

    def wanted(self, commits: Sequence[Candidate]) -> Iterator[str]:
        num_left = self.num
        for commit in commits:
            if num_left == 0:
                return
            yield commit.key
            num_left -= commit.is_of_lineage


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Keep the first commit at or after every multiple of `num` steps."""

    num: int

    def wanted(self, commits: Sequence[Candidate]) -> Iterator[str]:
        return _firsts(commits, lambda commit: commit.step // self.num or None)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Keep the first commit of every period of `seconds`, by its record's time."""

    seconds: float

    def wanted(self, commits: Sequence[Candidate]) -> Iterator[str]:
        return _firsts(commits, lambda commit: int(commit.record.created_at // self.seconds) if commit.record else None)


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the commit with the best value of a metric, the first of equal ones. Written `min loss`, `max macro_f1`."""

    metric: str
    is_higher_better: bool

    @classmethod
    def parse(cls, text: str) -> Best:
        metric, is_higher_better = parse_best(text)
        return cls(metric, is_higher_better)

    def wanted(self, commits: Sequence[Candidate]) -> list[str]:
        best: tuple[float, str] | None = None
        for commit in reversed(commits):
            value = commit.record.metrics.get(self.metric) if commit.record else None
            rank = None if value is None else -value if self.is_higher_better else value
            if rank is not None and (best is None or rank < best[0]):
                best = rank, commit.key
        return [best[1]] if best else []


@dataclass(frozen=True, slots=True)
class Retention:
    """Joined policies; with a budget in bytes, what fits of the wanted commits, and of the newest."""

    policies: tuple[Policy, ...]
    budget: int | None = None

    @classmethod
    def of(
        cls,
        *,
        last: int,
        every_steps: int | None = None,
        every_s: float | None = None,
        best: str | None = None,
        budget: int | None = None,
    ) -> Retention:
        """Join the given policies, a budget replacing `last`; raise ConfigError if one is invalid."""
        policies: list[Policy] = [] if budget else [Last(last)]
        policies += [EverySteps(every_steps)] if every_steps else []
        policies += [EverySeconds(every_s)] if every_s else []
        policies += [Best.parse(best)] if best else []
        return cls(tuple(policies), budget)

    def unwanted(self, commits: Sequence[Candidate], sure: Collection[str]) -> list[str]:
        """Return the keys to delete, oldest first; those in `sure` stay, and count towards the budget."""
        wanted = {*sure, *(key for policy in self.policies for key in policy.wanted(commits))}
        if self.budget is not None:
            wanted = self._fitting(commits, sure, wanted, self.budget)
        return [commit.key for commit in reversed(commits) if commit.key not in wanted]

    def _fitting(
        self, commits: Sequence[Candidate], sure: Collection[str], wanted: Collection[str], budget: int
    ) -> set[str]:
        fitting = set(sure)
        left = budget - sum(_size(commit) for commit in commits if commit.key in fitting)
        # stable: newest first in each
        for commit in sorted(commits, key=lambda commit: (commit.key not in wanted, not commit.is_of_lineage)):
            if commit.key not in fitting and _size(commit) <= left:
                fitting.add(commit.key)
                left -= _size(commit)
        return fitting


def _firsts(commits: Sequence[Candidate], period_of: Callable[[Candidate], int | None]) -> Iterator[str]:
    """Yield the first commit of the lineage in every period; commits with period None are skipped."""
    seen: set[int] = set()
    for commit in reversed(commits):
        period = period_of(commit)
        if period is not None and period not in seen and commit.is_of_lineage:
            seen.add(period)
            yield commit.key


def _size(commit: Candidate) -> int:
    return commit.record.num_bytes if commit.record else 0
