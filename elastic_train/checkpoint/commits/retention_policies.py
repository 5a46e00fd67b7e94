"""Retention policies: each names commits worth keeping; a commit stays if any wants it. No I/O.

A policy sees all commits, newest first. A policy over periods wants the first commit of each, so what it once wanted it
always wants, however many others are deleted.

Pins and holds: small objects next to the commits that protect one from retention.

A pin (`pins/<term>-<step>`) stays until it is removed. A hold (`holds/<term>-<step>/<until>-<unique>`) belongs to a
reader: it expires at the unix second in its name, by the reader's clock, so that a dead reader does not keep a commit
for ever. A reader that needs longer creates another hold in time.

The order makes it safe: a reader that sees the record after creating its hold has the files until the hold expires,
because retention deletes a record first, then looks for holds, and leaves the files of a held commit alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_train.checkpoint.commits.record import VOID, CommitRecord
from elastic_train.checkpoint.stores.store import (
    KeyClaimed,
    KeyMissing,
    KeyTaken,
    Store,
    read,
)
from elastic_train.config.recipe import parse_best
from elastic_train.core.lineage import COMMITS, cut, place_of
from elastic_train.errors import ConfigError, StorageError


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

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError(f"the steps of a period to keep a commit of must be at least 1, not {self.num}")

    def wanted(self, commits: Sequence[Candidate]) -> Iterator[str]:
        return _firsts(commits, lambda commit: commit.step // self.num or None)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Keep the first commit of every period of `seconds`, by its record's time."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"the seconds of a period to keep a commit of must be more than 0, not {self.seconds:g}")

    def wanted(self, commits: Sequence[Candidate]) -> Iterator[str]:
        return _firsts(commits, lambda commit: int(commit.record.created_at // self.seconds) if commit.record else None)


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the commit that the run counts as its best by a metric, or else the first with the best value.

    Written `min loss`, `max macro_f1`. A commit's metrics may be those of an earlier step, and what the run counts
    depends on how much better a value has to be. A commit outside the lineage would stand for the same steps, repeated
    within it.
    """

    metric: str
    is_higher_better: bool

    @classmethod
    def parse(cls, text: str) -> Best:
        metric, is_higher_better = parse_best(text)
        return cls(metric, is_higher_better)

    def wanted(self, commits: Sequence[Candidate]) -> list[str]:
        reached = next((one.record.improvement for one in commits if one.record and one.is_of_lineage), None)
        is_by_it = reached is not None and parse_best(reached.metric) == (self.metric, self.is_higher_better)
        step = reached.best_step if reached is not None and is_by_it else None
        if counted := next((one.key for one in commits if one.step == step and one.is_of_lineage), None):
            return [counted]
        best: tuple[float, str] | None = None
        for commit in reversed(commits):
            value = commit.record.metrics.get(self.metric) if commit.record and commit.is_of_lineage else None
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
        best: Collection[str] = (),
        budget: int | None = None,
    ) -> Retention:
        """Join the given policies, a budget replacing `last`; raise ConfigError if one is invalid."""
        if budget is not None and budget < 1:
            raise ConfigError(f"the bytes of commits to keep must be at least 1, not {budget}")
        policies: list[Policy] = [] if budget else [Last(last)]
        policies += [] if every_steps is None else [EverySteps(every_steps)]
        policies += [] if every_s is None else [EverySeconds(every_s)]
        policies += map(Best.parse, best)
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


log = logging.getLogger(__name__)

PINS = "pins/"
HOLDS = "holds/"
HOLD_TTL_S = 3600.0
_HOLD = re.compile(r"holds/(?P<name>\d+-\d+)/(?P<until>\d+)-[0-9a-f]+")


def pin(store: Store, key: str) -> None:
    """Keep a commit until `unpin`; idempotent. Raise KeyClaimed if another process is about to pin it, or may fail."""
    try:
        store.create(f"{PINS}{_name(key)}", _whose())
    except KeyClaimed:
        raise
    except KeyTaken:
        return


def unpin(store: Store, key: str) -> None:
    """Allow retention to delete a commit again."""
    store.delete(f"{PINS}{_name(key)}")


def pinned(store: Store) -> set[str]:
    return {_key(entry.key.removeprefix(PINS)) for entry in store.list(PINS)}


@contextlib.contextmanager
def holding(store: Store, key: str, ttl_s: float = HOLD_TTL_S) -> Iterator[None]:
    """Hold the commit of a key (`CommitRecord.key`) within this context: retention does not delete it.

    The hold ends with the context, or after `ttl_s` seconds; hold again before that to read longer. A store that cannot
    be written to is read without a hold, with a warning. Raise KeyMissing (a StorageError) if the commit does not
    exist.
    """
    marker = f"{HOLDS}{_name(key)}/{int(time.time() + ttl_s)}-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as undo:
        try:
            store.create(marker, _whose())
            undo.callback(_let_go, store, marker)
        except StorageError as error:
            log.warning("reading %s without a hold, so retention may delete it meanwhile: %s", key, error)
        if read(store, key) == VOID:
            raise KeyMissing(f"{store.url}/{key}: its attempt was swept before it became a commit")
        yield


def held(store: Store, now: float | None = None) -> set[str]:
    """Return the keys of held commits; expired holds are deleted if the store allows it."""
    moment, keys = time.time() if now is None else now, set()
    for entry in store.list(HOLDS):
        match = _HOLD.fullmatch(entry.key)
        if match and int(match["until"]) >= moment:
            keys.add(_key(match["name"]))
        elif match:
            _let_go(store, entry.key)
    return keys


def _let_go(store: Store, marker: str) -> None:
    try:
        store.delete(marker)
    except StorageError as error:
        log.warning("a hold could not be deleted, and counts until it ends: %s", error)


def _name(key: str) -> str:
    assert place_of(key), f"{key} is not a commit's key"
    return key.removeprefix(COMMITS).removesuffix(".json")


def _key(name: str) -> str:
    return f"{COMMITS}{name}.json"


def _whose() -> bytes:
    return f"{socket.gethostname()} process {os.getpid()}\n".encode()
