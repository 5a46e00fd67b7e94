"""Read commits: find the newest intact one, report why others were passed over, and load its state.

Candidates are tried newest first by (term, step). If one is damaged, its parent is next, and so on along the lineage;
if its record is unreadable, hence its parent unknown, the next in order is. No pickle is opened before its digest
matches, and no byte is used whose block does not match.

Listings may be stale: an NFS client shows a folder as it was up to a minute ago. So the commit that the fence names is
a candidate even if unlisted, a listed commit is preferred to it only if it continues it, and an unlisted key counts as
missing only if it cannot be opened either.

A store that does not respond is not a damaged commit: that error is raised, since falling back would lose steps.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.checkpoint.commits.record import VOID, CommitRecord, decode
from elastic_train.checkpoint.stores.checksums import find_damage
from elastic_train.checkpoint.stores.store import (
    FileRecord,
    KeyMissing,
    Store,
    Unreadable,
    read,
)
from elastic_train.core.lineage import COMMITS, Interval, cut, place_of
from elastic_train.errors import CommitError

if TYPE_CHECKING:
    from elastic_train.checkpoint.format.layout import State

DAMAGE = (CommitError, KeyMissing, Unreadable)
"""Errors for which the search passes over a commit instead of ending."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of `discover`.

    `head` is the newest intact commit, None if the store has no commits; `skipped` are newer ones that were passed
    over, as (key, reason).
    """

    head: CommitRecord | None
    skipped: tuple[tuple[str, str], ...]


def discover(
    store: Store, *, published: str | None = None, damage: Callable[[Store, str], str | None] | None = None
) -> Discovery:
    """Find the commit to resume from: the newest whose record and files all match their checksums.

    All files of candidates are read, unless `damage` is given: it returns what is wrong with the commit of a key, or
    None. `published` is the key that the fence names as head, if any: it is opened by name, and its absence is reported
    in `skipped`, not raised.

    Raise CommitError if there are commits but none is intact, StorageError if the store cannot be read.
    """
    damage = damage or damage_of
    keys = commit_keys(store, published)
    strays = _Strays(store, published, damage)
    skipped: list[tuple[str, str]] = []
    left = list(keys)
    while left:
        key = left.pop(0)
        if stray := strays.why(key):
            skipped.append((key, stray))
            continue
        wrong = damage(store, key)
        if wrong is None:
            return Discovery(read_record(store, key), tuple(skipped))
        skipped.append((key, ABSENT if key == published and not exists(store, key) else wrong))
        left = _after(store, key, left, skipped)
    if set(keys) - {key for key, why in skipped if why == ABSENT}:
        listed = "\n".join(f"  {key}: {why}" for key, why in skipped)
        raise CommitError(
            f"{store.url}: there are commits, but none is intact:\n{listed}\n"
            "restore one from a backup, or start again with another run.dir"
        )
    return Discovery(None, tuple(skipped))


ABSENT = "the fence names it as head, but its record is not in the store"


class _Strays:
    """Finds commits that sort above the one that the fence names but do not continue it although it is intact.

    A process that was cut off from the others may have made such a commit.
    """

    def __init__(self, store: Store, published: str | None, damage: Callable[[Store, str], str | None]) -> None:
        self._store, self._damage = store, damage
        self._named = None if published is None else readable(store, published)

    def why(self, key: str) -> str | None:
        """Return why a commit is a stray; None if it is not."""
        named = self._named
        if named is None or (place_of(key) or (0, 0)) <= (named.term, named.step):
            return None
        record = readable(self._store, key)
        if record is None or not strays_from(record.intervals, named) or self._damage(self._store, named.key):
            return None
        return f"does not continue {named.key}, which the fence names as head"


def continues(intervals: Sequence[Interval], commit: CommitRecord) -> bool:
    """Return True if a lineage has all steps of a commit, applied by the same terms."""
    return cut(intervals, commit.step) == commit.intervals


def strays_from(intervals: Sequence[Interval], published: CommitRecord) -> bool:
    """Return True if a lineage branched off before a published commit without its world knowing the commit.

    A lineage with steps of a newer term is valid whatever it continues: its world knew of the commit, and continues it
    or passed over it as damaged.
    """
    term = intervals[-1].term if intervals else 0
    return term <= published.term and not continues(intervals, published)


def commit_keys(store: Store, published: str | None = None) -> list[str]:
    """Return the keys of all records, newest first, without the tombstones of sweeps.

    `published` is included even if unlisted, if it has the form of a commit key.
    """
    listed = {entry.key for entry in store.list(COMMITS) if entry.size != len(VOID)}
    places = ((place_of(key), key) for key in (listed if published is None else {*listed, published}))
    return [key for _, key in sorted(((place, key) for place, key in places if place), reverse=True)]


def read_record(store: Store, key: str) -> CommitRecord:
    """Read one record; raise CommitError if it is damaged, KeyMissing if it does not exist."""
    return decode(read(store, key), key)


def readable(store: Store, key: str) -> CommitRecord | None:
    """Read one record; None if it is damaged or does not exist."""
    with contextlib.suppress(*DAMAGE):
        return read_record(store, key)
    return None


def records(store: Store, published: str | None = None) -> Iterator[tuple[str, CommitRecord | None, str | None]]:
    """Yield (key, record, problem) of every commit, newest first, without reading files; record or problem is None.

    `published` is included even if unlisted.
    """
    for key in commit_keys(store, published):
        try:
            yield key, read_record(store, key), None
        except DAMAGE as error:
            yield key, None, str(error)


def wrong_sizes(record: CommitRecord, sizes: Mapping[str, int]) -> list[str]:
    """Compare sizes by key with a commit's record; return the missing files and those of another size."""
    wrong: list[str] = []
    for name, file in sorted(record.files.items()):
        key = f"{record.attempt}/{name}"
        if key not in sizes:
            wrong.append(f"{key} is missing")
        elif sizes[key] != file.size:
            wrong.append(f"{key} has {sizes[key]} bytes, its record says {file.size}")
    return wrong


def sizes_of(store: Store, attempt: str, files: Mapping[str, FileRecord]) -> dict[str, int]:
    """Return the sizes of an attempt's files by key; those listed with a wrong size are opened to check."""
    sizes = {entry.key: entry.size for entry in store.list(f"{attempt}/")}
    for name, file in files.items():
        if sizes.get(key := f"{attempt}/{name}") != file.size:
            with contextlib.suppress(KeyMissing, Unreadable), store.open(key) as opened:
                sizes[key] = opened.seek(0, io.SEEK_END)
    return sizes


def verify(store: Store, record: CommitRecord) -> None:
    """Compare all files of a commit with its record, sizes first; raise CommitError with everything that is wrong."""
    wrong = wrong_sizes(record, sizes_of(store, record.attempt, record.files))
    for name, file in sorted(record.files.items()):
        if not wrong and (damage := find_damage(store, f"{record.attempt}/{name}", file)):
            wrong.append(damage)
    if wrong:
        raise CommitError("; ".join(wrong))


def damage_of(store: Store, key: str) -> str | None:
    """Read a commit's record and all files; return what is wrong, None if it is intact."""
    try:
        verify(store, read_record(store, key))
    except DAMAGE as error:
        return str(error)
    return None


def load(store: Store, record: CommitRecord, state: State) -> None:
    """Fill a nested state from a commit, in place.

    Tensors in `state`, and this rank's pieces of tensors, are overwritten on their device; missing entries (the state
    of an optimizer that has not stepped) are added on the CPU. Intact copies of the files on this node are preferred.

    Raise ConfigError if `state` has a leaf that the commit lacks or has with another shape or type, CommitError if
    bytes do not match their checksums, StorageError if the store cannot be read.
    """
    from elastic_train.checkpoint.format.reading import read_leaves  # torch is loaded with a state only
    from elastic_train.checkpoint.format.state_tree import fill, leaves_of

    source = store.near({f"{record.attempt}/{name}": file for name, file in record.files.items()})
    leaves = read_leaves(source, record.attempt, record.files, dict(leaves_of(state)))
    fill(state, leaves, record.int_keyed, record.empty)


def read_state(store: Store, record: CommitRecord) -> State:
    """Return a commit's state as saved: nested mappings and lists of CPU tensors and plain values.

    `state["model"]` has the model's weights and buffers by name, with their original shapes and types. Every byte is
    checked. Raise CommitError if the files do not match the record, StorageError if the store cannot be read.
    """
    state: State = {}
    load(store, record, state)
    return state


def exists(store: Store, key: str) -> bool:
    """Return True if a store has a key, even if unlisted or unreadable; raise StorageError if it does not answer."""
    try:
        store.open(key).close()
    except KeyMissing:
        return False
    except Unreadable:
        pass
    return True


def _after(store: Store, key: str, left: list[str], skipped: list[tuple[str, str]]) -> list[str]:
    """Return the candidates after a failed commit: from its parent on if known, else all remaining ones.

    The parent is looked up by name, even if unlisted.
    """
    record = readable(store, key)
    parent = record.parent_key if record else None
    if parent is None or (parent not in left and readable(store, parent) is None):
        return left
    at = place_of(parent) or (0, 0)
    newer = [other for other in left if (place_of(other) or at) > at]
    skipped += [(other, f"is not an ancestor of {key}: a late record of an older term") for other in newer]
    return [parent, *(other for other in left if other not in newer and other != parent)]
