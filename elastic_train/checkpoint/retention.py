"""Retention: which commits stay, and the sweeping of attempts that never became one.

A record is deleted before its files, so that what is left at any moment is either a whole commit or an abandoned
attempt. Never deleted: the newest commit that verifies, pinned ones, and an attempt that may still be written.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from elastic_train.checkpoint.reader import DAMAGE, commit_keys, damage_of, read_record, records
from elastic_train.checkpoint.stores import Entry, Store
from elastic_train.checkpoint.writer import ATTEMPTS
from elastic_train.lineage import place_of

SAFE_AGE_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, and how many bytes of files that freed."""

    commits: tuple[str, ...]
    attempts: tuple[str, ...]
    num_bytes: int


def prune(store: Store, keep_last: int, *, pinned: Collection[str] = (), verified: str | None = None) -> Pruned:
    """Delete all but the newest `keep_last` commits, those pinned, and the newest one that verifies.

    `verified` is the key of a commit that the caller knows to be whole; without it the newest are read until one is.
    Damaged commits count among the last, and go as others do: they are no reason to keep fewer whole ones.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    keys = commit_keys(store)
    doomed = [key for key in keys[keep_last:] if key not in pinned]
    if doomed:
        whole = verified if verified in keys else _newest_whole(store)
        doomed = [key for key in doomed if key != whole] if whole else []
    num_bytes = sum(_delete_commit(store, key) for key in reversed(doomed))
    return Pruned(tuple(doomed), (), num_bytes)


def sweep(store: Store, term: int, *, now: float | None = None, safe_age_s: float = SAFE_AGE_S) -> Pruned:
    """Delete attempts that no record names, once nobody can finish them: of a term below `term`, or long untouched.

    A writer of an older term that is still at it loses its files, and could not have published anyway.
    """
    attempts = _attempts(store)  # before the records: an attempt that is sealed in between is then seen as sealed
    sealed, unreadable = set(), set()
    for key, record, _ in records(store):
        if record is None:
            unreadable.add(place_of(key))
        else:
            sealed.add(record.attempt)
    moment = time.time() if now is None else now
    swept, num_bytes = [], 0
    for attempt, entries in attempts.items():
        place = _place_of_attempt(attempt)
        if attempt in sealed or place is None or place in unreadable:
            continue
        touched = [entry.modified_at for entry in entries if entry.modified_at is not None]
        if place[0] < term or (touched and max(touched) < moment - safe_age_s):
            num_bytes += _delete_all(store, entries)
            swept.append(attempt)
    return Pruned((), tuple(swept), num_bytes)


def _newest_whole(store: Store) -> str | None:
    return next((key for key in commit_keys(store) if damage_of(store, key) is None), None)


def _delete_commit(store: Store, key: str) -> int:
    """Delete a record, then its files; those of an unreadable record stay, for nobody knows which they are."""
    try:
        attempt = read_record(store, key).attempt
    except DAMAGE:
        store.delete(key)
        return 0
    store.delete(key)
    return _delete_all(store, store.list(f"{attempt}/"))


def _delete_all(store: Store, entries: list[Entry]) -> int:
    for entry in entries:
        store.delete(entry.key)
    return sum(entry.size for entry in entries)


def _attempts(store: Store) -> dict[str, list[Entry]]:
    """Return the entries of every attempt's folder, data/step-<step>/<term>-<unique>."""
    attempts: dict[str, list[Entry]] = {}
    for entry in store.list(ATTEMPTS):
        attempts.setdefault("/".join(entry.key.split("/")[:3]), []).append(entry)
    return attempts


def _place_of_attempt(attempt: str) -> tuple[int, int] | None:
    """Return the (term, step) of an attempt's folder, None if it is not one of ours."""
    _, step, name = attempt.split("/") if attempt.count("/") == 2 else ("", "", "")
    term = name.partition("-")[0]
    number = step.removeprefix("step-")
    return (int(term), int(number)) if term.isdecimal() and number.isdecimal() else None
