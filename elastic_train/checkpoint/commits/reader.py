"""Reading commits: find the newest intact one, report what was passed over and why, and load its state.

Candidates come newest first by (term, step). A damaged one is passed over for its parent, and so on along the lineage;
where a record is unreadable, so that its parent is unknown, the order alone decides. Whatever the store holds, no
pickle is opened before its digest has cleared it, and no byte is used whose block does not match.

A listing may be late: a client of NFS shows a folder as it was up to a minute ago. So the commit that the fence names
is a candidate by its name, listed or not, nothing that is merely listed is preferred to it unless it continues it, and
what a listing lacks is missing only if it cannot be opened either.

A store that does not respond is not a damaged commit: that error is raised, since falling back would lose steps.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.commits.record import VOID, CommitRecord, decode
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.reading import read_leaves
from elastic_train.checkpoint.format.state_tree import fill, leaves_of
from elastic_train.checkpoint.stores.checked_file import find_damage
from elastic_train.checkpoint.stores.checksums import FileRecord
from elastic_train.checkpoint.stores.store import (
    KeyMissing,
    Store,
    Unreadable,
    read,
)
from elastic_train.core.lineage import COMMITS, Interval, cut, place_of
from elastic_train.errors import CommitError

DAMAGE = (CommitError, KeyMissing, Unreadable)
"""Errors that make the search pass over a commit, instead of ending it."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What `discover` found.

    `head` is the newest intact commit, None if the store has none at all; `skipped` are the newer ones that were passed
    over, as (key, reason).
    """

    head: CommitRecord | None
    skipped: tuple[tuple[str, str], ...]


def discover(
    store: Store, *, published: str | None = None, damage: Callable[[Store, str], str | None] | None = None
) -> Discovery:
    """Find the commit to resume from: the newest whose record and files all match their checksums.

    All files of the candidates are read, unless `damage` is given: it returns what is wrong with the commit of a key,
    None if nothing is. `published` is the key that the fence names as head, if any: it is opened by that name, and its
    absence is reported among the skipped, and not fatal.

    Raises CommitError if there are commits and none is intact, StorageError if the store cannot be read.
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
    """Finds commits that sort above the one that the fence names, and do not continue it although it is intact.

    A process that had lost touch with the others may have committed such a one by itself.
    """

    def __init__(self, store: Store, published: str | None, damage: Callable[[Store, str], str | None]) -> None:
        self._store, self._damage = store, damage
        self._named = None if published is None else readable(store, published)

    def why(self, key: str) -> str | None:
        """Say why a commit is a stray, None if it is not."""
        named = self._named
        if named is None or (place_of(key) or (0, 0)) <= (named.term, named.step):
            return None
        record = readable(self._store, key)
        if record is None or not strays_from(record.intervals, named) or self._damage(self._store, named.key):
            return None
        return f"does not continue {named.key}, which the fence names as head"


def continues(intervals: Sequence[Interval], commit: CommitRecord) -> bool:
    """Say whether a lineage has all the steps of a commit, applied by the same terms."""
    return cut(intervals, commit.step) == commit.intervals


def strays_from(intervals: Sequence[Interval], published: CommitRecord) -> bool:
    """Say whether a lineage parted from a published commit before its world knew of it.

    One that a newer term applied steps to counts whatever it continues from: its world knew of the commit, and
    continues it or has passed over it because it was damaged.
    """
    term = intervals[-1].term if intervals else 0
    return term <= published.term and not continues(intervals, published)


def commit_keys(store: Store, published: str | None = None) -> list[str]:
    """Return the keys of all records, the newest commit first; the tombstones of sweeps are left out.

    `published` is among them whether or not it is listed, if it has the form of a commit's key.
    """
    listed = {entry.key for entry in store.list(COMMITS) if entry.size != len(VOID)}
    places = ((place_of(key), key) for key in (listed if published is None else {*listed, published}))
    return [key for _, key in sorted(((place, key) for place, key in places if place), reverse=True)]


def read_record(store: Store, key: str) -> CommitRecord:
    """Read one record; CommitError if it is damaged, KeyMissing if it does not exist."""
    return decode(read(store, key), key)


def readable(store: Store, key: str) -> CommitRecord | None:
    """Read one record; None if it is damaged or does not exist."""
    with contextlib.suppress(*DAMAGE):
        return read_record(store, key)
    return None


def records(store: Store, published: str | None = None) -> Iterator[tuple[str, CommitRecord | None, str | None]]:
    """Yield (key, record, what is wrong with the record) of every commit, the newest first; the files are not read.

    `published` is among them whether or not it is listed.
    """
    for key in commit_keys(store, published):
        try:
            yield key, read_record(store, key), None
        except DAMAGE as error:
            yield key, None, str(error)


def wrong_sizes(record: CommitRecord, sizes: Mapping[str, int]) -> list[str]:
    """Compare the sizes of keys with a commit's record; return what is missing or of another size."""
    wrong: list[str] = []
    for name, file in sorted(record.files.items()):
        key = f"{record.attempt}/{name}"
        if key not in sizes:
            wrong.append(f"{key} is missing")
        elif sizes[key] != file.size:
            wrong.append(f"{key} has {sizes[key]} bytes, its record says {file.size}")
    return wrong


def sizes_of(store: Store, attempt: str, files: Mapping[str, FileRecord]) -> dict[str, int]:
    """Return the sizes of an attempt's files by key; a file that is listed otherwise than recorded is opened to see."""
    sizes = {entry.key: entry.size for entry in store.list(f"{attempt}/")}
    for name, file in files.items():
        if sizes.get(key := f"{attempt}/{name}") != file.size:
            with contextlib.suppress(KeyMissing, Unreadable), store.open(key) as opened:
                sizes[key] = opened.seek(0, io.SEEK_END)
    return sizes


def verify(store: Store, record: CommitRecord) -> None:
    """Compare all files of a commit with its record, sizes first; CommitError lists everything that is wrong."""
    wrong = wrong_sizes(record, sizes_of(store, record.attempt, record.files))
    for name, file in sorted(record.files.items()):
        if not wrong and (damage := find_damage(store, f"{record.attempt}/{name}", file)):
            wrong.append(damage)
    if wrong:
        raise CommitError("; ".join(wrong))


def damage_of(store: Store, key: str) -> str | None:
    """Read a commit, its record and all of its files; return what is wrong with it, None if it is intact."""
    try:
        verify(store, read_record(store, key))
    except DAMAGE as error:
        return str(error)
    return None


def load(store: Store, record: CommitRecord, state: State) -> None:
    """Fill a nested state with a commit's, in place.

    Tensors in `state`, and what this rank holds of tensors in pieces, are overwritten where they are, on their device;
    what it lacks (the state of an optimizer that has not stepped) is added on the CPU. Intact copies of the files on
    this node are read in place of the store's.

    Raises ConfigError if `state` has a leaf that the commit lacks, or of another shape or type; CommitError if the
    bytes do not match their checksums; StorageError if the store cannot be read.
    """
    source = store.near({f"{record.attempt}/{name}": file for name, file in record.files.items()})
    leaves = read_leaves(source, record.attempt, record.files, dict(leaves_of(state)))
    fill(state, leaves, record.int_keyed, record.empty)


def read_state(store: Store, record: CommitRecord) -> State:
    """Return a commit's state: nested mappings and lists of tensors on the CPU and plain values, as they were saved.

    `state["model"]` has the model's weights and buffers by name, with the shapes and types that they had. Every byte is
    checked. Raises CommitError if the files do not match the record, StorageError if the store cannot be read.
    """
    state: State = {}
    load(store, record, state)
    return state


def exists(store: Store, key: str) -> bool:
    """Say whether a store has a key, listed or not, readable or not; StorageError if it does not answer."""
    try:
        store.open(key).close()
    except KeyMissing:
        return False
    except Unreadable:
        pass
    return True


def _after(store: Store, key: str, left: list[str], skipped: list[tuple[str, str]]) -> list[str]:
    """Return the candidates after a commit that failed: from its parent on if that is known, else all that are left.

    The parent is one by its name, listed or not.
    """
    record = readable(store, key)
    parent = record.parent_key if record else None
    if parent is None or (parent not in left and readable(store, parent) is None):
        return left
    at = place_of(parent) or (0, 0)
    newer = [other for other in left if (place_of(other) or at) > at]
    skipped += [(other, f"is not an ancestor of {key}: a late record of an older term") for other in newer]
    return [parent, *(other for other in left if other not in newer and other != parent)]
