"""Retention: delete commits that no policy wants.

A record is deleted before its files, so at any time there are only complete commits and abandoned attempts. Never
deleted: the newest intact commit, pinned commits, and held ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.commits.pins_and_holds import held, pinned
from elastic_train.checkpoint.commits.reader import (
    commit_keys,
    damage_of,
    readable,
)
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Candidate, Retention
from elastic_train.checkpoint.stores.store import Entry, Store
from elastic_train.core.lineage import place_of


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
