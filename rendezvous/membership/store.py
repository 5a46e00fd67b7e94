"""The protocol between membership and its store: etcd in production, memory in tests and simulation.

A store maps keys to short texts. Every write is one transaction on revisions (`swap`), every read is a consistent
snapshot of a prefix (`get`), every wait is a `watch` with a deadline, and a key may be attached to a lease that ends
with its holder. This is enough to elect, to seal and to fence.

Invariant: revisions grow by at least one with every write, in one order for all readers; a store that loses its data
begins another life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

ABSENT = 0
"""Revision of a key that does not exist; as a guard, it makes a write create the key."""

MOST_GUARDS = 128
"""Maximum number of guards in a transaction, and of writes: etcd's default (--max-txn-ops)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's text, the revision that wrote it last, and the revision that created it."""

    value: str
    mod_revision: int
    create_revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys below a prefix at one revision."""

    revision: int
    entries: Mapping[str, Entry]
    life: int = 0
    """Number of known data losses of the store by then; after each, revisions start at 1 again."""
    is_whole: bool = True
    """False if keys are left out that a watch does not cover."""

    def is_newer(self, other: Snapshot) -> bool:
        """Return True if this is of a later life or revision, or has keys of the same revision that `other` lacks."""
        return (self.life, self.revision, self.is_whole) > (other.life, other.revision, other.is_whole)

    def before(self, end: str) -> Snapshot:
        """Return only the keys that sort before `end`; all of them if it is empty."""
        if not end:
            return self
        entries = {key: entry for key, entry in self.entries.items() if key < end}
        return replace(self, entries=entries, is_whole=False)

    def revision_of(self, key: str) -> int:
        entry = self.entries.get(key)
        return ABSENT if entry is None else entry.mod_revision


class Lease(Protocol):
    """A proof of life, renewed in the background until it is revoked, abandoned or lost."""

    @property
    def ttl_s(self) -> float: ...

    @property
    def is_lost(self) -> bool:
        """True if the store has said that the lease has ended; False while the store cannot be reached."""

    def revoke(self) -> None:
        """End the lease and delete its keys now; harmless if it has already ended.

        Raises StoreUnavailableError if the store does not answer: revoke it again, or abandon it.
        """

    def abandon(self) -> None:
        """Stop renewing without revoking, as a crash would: the keys are deleted after the time to live."""


@dataclass(frozen=True, slots=True)
class Put:
    """A text to write, and the lease with which the key is deleted (None: it stays)."""

    value: str
    lease: Lease | None = None


Writes = Mapping[str, Put | None]
"""Effect of a transaction on each key; None deletes it."""

Guards = Mapping[str, int]
"""Required revision of each key for a transaction; ABSENT for a key that must not exist.

A key that ends with a slash means all keys below it: none may have been written after the revision, but some may have
been deleted.
"""


class Watch(Protocol):
    """A mirror of a prefix that follows the store through broken streams, restarts and compactions."""

    @property
    def snapshot(self) -> Snapshot: ...

    def wait(self, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        """Return the mirror as soon as it is newer than `seen`; None after `timeout_s`."""

    def cover(self, end: str) -> None:
        """Follow only the keys that sort before `end` from now on, or all of the prefix if it is empty."""

    def close(self) -> None: ...


class Store(Protocol):
    """Keys with revisions, leases and watches. Every call ends within a deadline, or raises StoreUnavailableError."""

    def get(self, prefix: str) -> Snapshot: ...

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        """Do all `writes` in one transaction if every guard holds; return its revision, or None if one did not."""

    def lease(self, ttl_s: float, *, renew: bool = True) -> Lease:
        """Grant a lease; without `renew` it ends after `ttl_s`, which the store may round up."""

    def watch(self, prefix: str, end: str = "") -> Watch:
        """Follow the keys below `prefix` that sort before `end`; all of them if it is empty."""

    def close(self) -> None:
        """Release connections and threads; leases that were not revoked expire."""
