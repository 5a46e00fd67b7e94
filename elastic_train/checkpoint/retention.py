"""Retention: the deletion of commits that no policy wants, and the sweeping of attempts that never became one.

A record is deleted before its files, so that what is left at any moment is either a whole commit or an abandoned
attempt. Never deleted: the newest commit that verifies, pinned ones, those that a reader holds, and an attempt that may
still be written.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass

from elastic_train.checkpoint.markers import held, pinned
from elastic_train.checkpoint.policies import Candidate, Retention
from elastic_train.checkpoint.reader import DAMAGE, commit_keys, damage_of, read_record, records
from elastic_train.checkpoint.record import CommitRecord
from elastic_train.checkpoint.stores import Entry, Store
from elastic_train.checkpoint.writer import ATTEMPTS
from elastic_train.lineage import COMMITS, place_of

SAFE_AGE_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, and how many bytes of files that freed."""

    commits: tuple[str, ...]
    attempts: tuple[str, ...]
    num_bytes: int


def prune(store: Store, retention: Retention, *, verified: str | None = None, is_rehearsal: bool = False) -> Pruned:
    """Delete the commits that no policy wants, but none that is pinned or held, nor the newest one that verifies.

    `verified` is the key of a commit that the caller knows to be whole; without it the newest are read until one is,
    and if none is, nothing is deleted. A rehearsal deletes nothing and says what it would have deleted.
    """
    commits = [_candidate(store, key) for key in commit_keys(store)]
    sure = pinned(store) | held(store)
    doomed = retention.unwanted(commits, sure)
    if doomed:
        whole = verified if verified in {commit.key for commit in commits} else _newest_whole(store)
        doomed = retention.unwanted(commits, sure | {whole}) if whole else []
    delete = _measure_commit if is_rehearsal else _delete_commit
    return Pruned(tuple(doomed), (), sum(delete(store, key) for key in doomed))


def sweep(
    store: Store, term: int, *, now: float | None = None, safe_age_s: float = SAFE_AGE_S, is_rehearsal: bool = False
) -> Pruned:
    """Delete attempts that no record names, once nobody can finish them: of a term below `term`, or long untouched.

    A writer of an older term that is still at it loses its files. Should it come to publish all the same, its record is
    looked for once more before each attempt goes: a world may be going on from that commit by now.
    """
    attempts = _attempts(store)  # before the records: an attempt that is sealed in between is then seen as sealed
    sealed, unreadable = set(), set()
    for key, record, _ in records(store):
        if record is None:
            unreadable.add(place_of(key))
        else:
            sealed.add(record.attempt)
    spared = unreadable | {place_of(key) for key in held(store, now)}
    moment = time.time() if now is None else now
    swept, num_bytes = [], 0
    for attempt, entries in attempts.items():
        place = place_of_attempt(attempt)
        if attempt in sealed or place is None or place in spared:
            continue
        touched = [entry.modified_at for entry in entries if entry.modified_at is not None]
        if place[0] < term or (touched and max(touched) < moment - safe_age_s):
            if any(place_of(entry.key) == place for entry in store.list(COMMITS)):
                continue
            num_bytes += sum(entry.size for entry in entries) if is_rehearsal else _delete_all(store, entries)
            swept.append(attempt)
    return Pruned((), tuple(swept), num_bytes)


def _newest_whole(store: Store) -> str | None:
    return next((key for key in commit_keys(store) if damage_of(store, key) is None), None)


def _candidate(store: Store, key: str) -> Candidate:
    place = place_of(key)
    assert place, f"{key} is no commit's key"
    return Candidate(key, place[1], functools.partial(_readable, store, key))


def _readable(store: Store, key: str) -> CommitRecord | None:
    with contextlib.suppress(*DAMAGE):
        return read_record(store, key)
    return None


def _measure_commit(store: Store, key: str) -> int:
    record = _readable(store, key)
    return record.num_bytes if record else 0


def _delete_commit(store: Store, key: str) -> int:
    """Delete a record, then its files; those of an unreadable record stay, for nobody knows which they are.

    So do those of a commit that a reader has taken hold of meanwhile: they are swept later.
    """
    record = _readable(store, key)
    store.delete(key)
    if record is None or key in held(store):
        return 0
    return _delete_all(store, store.list(f"{record.attempt}/"))


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


def place_of_attempt(attempt: str) -> tuple[int, int] | None:
    """Return the (term, step) of an attempt's folder, None if it is not one of ours."""
    _, step, name = attempt.split("/") if attempt.count("/") == 2 else ("", "", "")
    term = name.partition("-")[0]
    number = step.removeprefix("step-")
    return (int(term), int(number)) if term.isdecimal() and number.isdecimal() else None
