"""Retention and sweeping: delete commits that no policy wants, and attempts that never became a commit.

A record is deleted before its files, so at any time there are only complete commits and abandoned attempts. Never
deleted: the newest intact commit, pinned commits, and held ones.

A sweep makes sure that an attempt never becomes a commit.

The writer of such an attempt may be frozen, and publish it when it wakes; the sweeping process may freeze as well,
between a look and its deletion. So a sweep first claims the record's name, by the same conditional create as its
writer's: one of them wins, and only losing attempts are deleted. The name stays claimed, by a tombstone of a few bytes.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.commits.reader import (
    commit_keys,
    damage_of,
    readable,
)
from elastic_train.checkpoint.commits.record import VOID, CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Candidate, Retention, held, pinned
from elastic_train.checkpoint.stores.store import Entry, KeepsUnfinished, Store, create_once
from elastic_train.core.lineage import ATTEMPTS, COMMITS, commit_key, place_of


@dataclass(frozen=True, slots=True)
class Pruned:
    """The deleted commits and attempts, and the bytes freed."""

    commits: tuple[str, ...]
    attempts: tuple[str, ...]
    num_bytes: int


def prune(
    store: Store, retention: Retention, *, newest: CommitRecord | None = None, is_rehearsal: bool = False
) -> Pruned:
    """Delete the commits that no policy wants, except pinned, held, and the newest intact one.

    `newest` is a commit known to be intact; without it, or if a newer one was published, commits are read newest first
    until one is intact; if none is, nothing is deleted. A rehearsal deletes nothing and returns what it would delete.
    """
    keys, sure = commit_keys(store, newest.key if newest else None), pinned(store) | held(store)
    doomed = retention.unwanted([_candidate(store, key) for key in keys], sure)
    if doomed:
        whole = newest if newest is not None and newest.key == keys[0] else _newest_whole(store, keys)
        commits = [_candidate(store, key, whole) for key in keys]
        doomed = retention.unwanted(commits, sure | {whole.key}) if whole else []
    delete = _measure_commit if is_rehearsal else _delete_commit
    return Pruned(tuple(doomed), (), sum(delete(store, key) for key in doomed))


def _newest_whole(store: Store, keys: Sequence[str]) -> CommitRecord | None:
    return next((readable(store, key) for key in keys if damage_of(store, key) is None), None)


def _candidate(store: Store, key: str, newest: CommitRecord | None = None) -> Candidate:
    place = place_of(key)
    assert place, f"{key} is not a commit's key"
    return Candidate(key, place[1], functools.partial(readable, store, key), newest)


def _measure_commit(store: Store, key: str) -> int:
    record = readable(store, key)
    return record.num_bytes if record else 0


def _delete_commit(store: Store, key: str) -> int:
    """Delete a record, then its files; return the bytes freed. Files of an unreadable record stay, as they are unknown.

    Files of a commit that a reader holds by now also stay, and are swept later.
    """
    record = readable(store, key)
    store.delete(key)
    if record is None or key in held(store):
        return 0
    return delete_all(store, store.list(f"{record.attempt}/"))


def delete_all(store: Store, entries: list[Entry]) -> int:
    for entry in entries:
        store.delete(entry.key)
    return sum(entry.size for entry in entries)


SAFE_AGE_S = 6 * 3600.0
Place = tuple[int, int]


def sweep(
    store: Store, term: int, *, now: float | None = None, safe_age_s: float = SAFE_AGE_S, is_rehearsal: bool = False
) -> Pruned:
    """Delete attempts without a record that nobody should finish: of a term below `term`, or old ones.

    The record of an attempt's step may be that of another try. An attempt of the newest term is old if nothing in it
    changed for `safe_age_s` seconds; a writer still at work on it is fenced when it publishes. A rehearsal deletes
    nothing.
    """
    attempts = _attempts(store)
    recorded = {place_of(key) for key in commit_keys(store)}  # an unreadable record's files stay
    num_at = Counter(map(place_of_attempt, attempts))
    moment = time.time() if now is None else now
    lost: dict[str, list[Entry]] = {}
    for attempt, entries in attempts.items():
        place = place_of_attempt(attempt)
        if place is None or not _is_over(place, entries, term, moment - safe_age_s):
            continue
        if place in recorded:
            is_lost = num_at[place] > 1 and _is_of_another(store, place, attempt)
        else:
            is_lost = is_rehearsal or create_once(store, commit_key(*place), VOID)
        if is_lost:
            lost[attempt] = entries
    # A reader creates a hold, then looks for the record: with the names claimed, no hold can succeed any more.
    spared = {place_of(key) for key in held(store, now)}
    swept = [attempt for attempt in lost if place_of_attempt(attempt) not in spared]
    measure = _size if is_rehearsal else delete_all
    return Pruned((), tuple(swept), sum(measure(store, lost[attempt]) for attempt in swept))


def drop_unfinished(
    store: Store, *, now: float | None = None, safe_age_s: float = SAFE_AGE_S, is_rehearsal: bool = False
) -> list[str]:
    """Abort uploads of attempt files that were begun over `safe_age_s` seconds ago; return their keys.

    A killed process leaves them in S3, where they cost money and appear in no listing of objects. Raise StorageError if
    the store cannot list them. A rehearsal aborts nothing.
    """
    if not isinstance(store, KeepsUnfinished):
        return []
    moment = time.time() if now is None else now
    return list(store.drop_unfinished(ATTEMPTS, moment - safe_age_s, is_rehearsal=is_rehearsal))


def tombstones(store: Store, below_term: int) -> list[str]:
    """Return the names claimed by sweeps in terms below `below_term`, and below a term that has committed since."""
    entries = [(place, entry) for entry in store.list(COMMITS) if (place := place_of(entry.key))]
    committed = max((term for (term, _), entry in entries if entry.size != len(VOID)), default=0)
    below = min(below_term, committed)
    return [entry.key for (term, _), entry in entries if entry.size == len(VOID) and term < below]


def _is_of_another(store: Store, place: Place, attempt: str) -> bool:
    """Return True if the record of an attempt's place can be read, and is another attempt's: the name is taken."""
    record = readable(store, commit_key(*place))
    return record is not None and record.attempt != attempt


def _is_over(place: Place, entries: list[Entry], term: int, safe_until: float) -> bool:
    touched = [entry.modified_at for entry in entries if entry.modified_at is not None]
    return place[0] < term or bool(touched and max(touched) < safe_until)


def _size(store: Store, entries: list[Entry]) -> int:
    return sum(entry.size for entry in entries)


def _attempts(store: Store) -> dict[str, list[Entry]]:
    """Return the entries of every attempt's folder, data/step-<step>/<term>-<unique>."""
    attempts: dict[str, list[Entry]] = {}
    for entry in store.list(ATTEMPTS):
        attempts.setdefault("/".join(entry.key.split("/")[:3]), []).append(entry)
    return attempts


def place_of_attempt(attempt: str) -> Place | None:
    """Return the (term, step) of an attempt's folder; None if it is not one of ours."""
    _, step, name = attempt.split("/") if attempt.count("/") == 2 else ("", "", "")
    term = name.partition("-")[0]
    number = step.removeprefix("step-")
    return (int(term), int(number)) if term.isdecimal() and number.isdecimal() else None
