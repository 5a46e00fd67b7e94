"""Reading commits: find the newest that is whole, say what was passed over and why, and load its state.

Candidates come newest first by (term, step). One that is damaged is passed over for its parent, and so on along the
lineage; where a record is unreadable, so that its parent is unknown, the order alone decides. Whatever the store
holds, no pickle is opened before its digest has cleared it, and no byte is used whose block does not match.

A store that cannot be asked is not a damaged commit: that error is passed on, since falling back would lose steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.commits.record import VOID, CommitRecord, decode
from elastic_train.checkpoint.format.dcp import read_leaves
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import fill, leaves_of
from elastic_train.checkpoint.stores.checksums import find_damage
from elastic_train.checkpoint.stores.deadline import PromptStore
from elastic_train.checkpoint.stores.node_copy import NearStore
from elastic_train.checkpoint.stores.store import (
    KeyMissing,
    Store,
    Unreadable,
    read,
)
from elastic_train.core.lineage import COMMITS, place_of
from elastic_train.errors import CommitError

DAMAGE = (CommitError, KeyMissing, Unreadable)
"""What makes a commit be passed over, in place of ending the search."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The newest whole commit, None if there is no commit at all, and every newer one that it was not: (key, why)."""

    head: CommitRecord | None
    skipped: tuple[tuple[str, str], ...]


def discover(
    store: Store, *, published: str | None = None, damage: Callable[[Store, str], str | None] | None = None
) -> Discovery:
    """Find the newest whole commit; its record is the result's `head`, None if there is no commit at all.

    Raises CommitError if there are commits and none is whole, and StorageError if the store cannot be read.
    `published` is the key that the fence names as head, if it does: that it is gone is reported, not fatal. `damage`
    says what is wrong with a commit, None if nothing is; without it all files are read.
    """
    damage = damage or damage_of
    keys = commit_keys(store)
    skipped: list[tuple[str, str]] = []
    if published is not None and published not in keys:
        skipped.append((published, "the fence names it as head, but its record is not in the store"))
    left = list(keys)
    while left:
        key = left.pop(0)
        wrong = damage(store, key)
        if wrong is None:
            return Discovery(read_record(store, key), tuple(skipped))
        skipped.append((key, wrong))
        left = _after(store, key, left, skipped)
    if keys:
        told = "\n".join(f"  {key}: {why}" for key, why in skipped)
        raise CommitError(
            f"{store.url}: there are commits, and none is whole:\n{told}\n"
            "restore one from a copy, or start again in another run.dir"
        )
    return Discovery(None, tuple(skipped))


def commit_keys(store: Store) -> list[str]:
    """Return the keys of all records, the newest commit first; names that a sweep has taken are no records."""
    places = ((place_of(entry.key), entry.key) for entry in store.list(COMMITS) if entry.size != len(VOID))
    return [key for _, key in sorted(((place, key) for place, key in places if place), reverse=True)]


def read_record(store: Store, key: str) -> CommitRecord:
    """Read one record; CommitError if it is damaged, KeyMissing if there is none."""
    return decode(read(store, key), key)


def records(store: Store) -> Iterator[tuple[str, CommitRecord | None, str | None]]:
    """Yield (key, record, what is wrong with the record) of every commit, the newest first; no file is read."""
    for key in commit_keys(store):
        try:
            yield key, read_record(store, key), None
        except DAMAGE as error:
            yield key, None, str(error)


def wrong_sizes(record: CommitRecord, sizes: Mapping[str, int]) -> list[str]:
    """Compare the sizes of keys with a commit's record; say what is missing or of another size."""
    wrong: list[str] = []
    for name, file in sorted(record.files.items()):
        key = f"{record.attempt}/{name}"
        if key not in sizes:
            wrong.append(f"{key} is missing")
        elif sizes[key] != file.size:
            wrong.append(f"{key} has {sizes[key]} bytes, its record says {file.size}")
    return wrong


def verify(store: Store, record: CommitRecord) -> None:
    """Compare all files of a commit with its record, sizes first; raise CommitError with everything that is wrong."""
    wrong = wrong_sizes(record, {entry.key: entry.size for entry in store.list(f"{record.attempt}/")})
    for name, file in sorted(record.files.items()):
        if not wrong and (damage := find_damage(store, f"{record.attempt}/{name}", file)):
            wrong.append(damage)
    if wrong:
        raise CommitError("; ".join(wrong))


def damage_of(store: Store, key: str) -> str | None:
    """Read a commit, its record and all of its files; say what is wrong with it, None if it is whole."""
    try:
        verify(store, read_record(store, key))
    except DAMAGE as error:
        return str(error)
    return None


def load(store: Store, record: CommitRecord, state: State) -> None:
    """Fill a nested state with a commit's, in place.

    Tensors that `state` has are overwritten where they are, on their device; what it lacks (an optimizer that has not
    stepped) is added on the CPU. Raises ConfigError if `state` has a leaf that the commit lacks, or of another shape or
    type, and CommitError if the bytes that are read do not match their checksums.
    """
    if isinstance(store, NearStore | PromptStore):
        store = store.preferring({f"{record.attempt}/{name}": file for name, file in record.files.items()})
    leaves = read_leaves(store, record.attempt, record.files, dict(leaves_of(state)))
    fill(state, leaves, record.int_keyed, record.empty)


def read_state(store: Store, record: CommitRecord) -> State:
    """Return a commit's whole state, nested as it was saved, with its tensors on the CPU.

    Raises CommitError if its bytes do not match the record, and StorageError if the store cannot be read.
    """
    state: State = {}
    load(store, record, state)
    return state


def _after(store: Store, key: str, left: list[str], skipped: list[tuple[str, str]]) -> list[str]:
    """Return the candidates after a commit that failed: from its parent on if that is known, else all that are left."""
    try:
        record = read_record(store, key)
    except DAMAGE:
        return left
    if record.parent_key not in left:
        return left
    at = left.index(record.parent_key)
    skipped += [(other, f"is no ancestor of {key}: a late record of an older term") for other in left[:at]]
    return left[at:]
