"""A store in memory, with a virtual clock: replaces etcd in unit tests and in simulation.

Time passes only by `advance`. A renewed lease never ends; an abandoned one ends once time has advanced by its time to
live. Threads may share one store: a watch wakes when another thread writes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rendezvous.errors import StoreRefusedError
from rendezvous.membership.store import (
    MOST_GUARDS,
    Entry,
    Guards,
    Lease,
    Snapshot,
    Watch,
    Writes,
)


class MemoryStore:
    """Keys, revisions and leases in this process."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._entries: dict[str, Entry] = {}
        self._holders: dict[str, MemoryLease] = {}
        self._leases: list[MemoryLease] = []
        self._revision = 1
        self._now_s = 0.0

    @property
    def revision(self) -> int:
        return self._revision

    def get(self, prefix: str) -> Snapshot:
        with self.changed:
            entries = {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}
            return Snapshot(self._revision, entries)

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        with self.changed:
            if max(len(guards), len(writes)) > MOST_GUARDS:
                raise StoreRefusedError(
                    f"too many operations in a transaction: {len(guards)} guards, {len(writes)} writes"
                )
            if not all(self._holds(key, revision) for key, revision in guards.items()):
                return None
            self._revision += 1
            for key, put in writes.items():
                self._delete(key) if put is None else self._put(key, put.value, put.lease)
            self.changed.notify_all()
            return self._revision

    def lease(self, ttl_s: float, *, renew: bool = True) -> MemoryLease:
        with self.changed:
            granted = MemoryLease(ttl_s, self, ends_at_s=None if renew else self._now_s + ttl_s)
            self._leases.append(granted)
            return granted

    def watch(self, prefix: str, end: str = "") -> Watch:
        return MemoryWatch(self, prefix, end)

    def close(self) -> None:
        """Do nothing: others may still use this store."""

    def advance(self, seconds: float) -> None:
        """Advance the time, and end the leases that were not renewed."""
        with self.changed:
            self._now_s += seconds
            for lease in [lease for lease in self._leases if lease.is_over(self._now_s)]:
                self.end(lease)

    def abandon(self, lease: MemoryLease) -> None:
        with self.changed:
            lease.ends_at_s = self._now_s + lease.ttl_s

    def end(self, lease: MemoryLease) -> None:
        """End a lease and delete its keys."""
        with self.changed:
            lease.is_lost = True
            self._leases = [other for other in self._leases if other is not lease]
            keys = [key for key, holder in self._holders.items() if holder is lease]
            for key in keys:
                self._delete(key)
            self._revision += bool(keys)
            self.changed.notify_all()

    def _holds(self, key: str, revision: int) -> bool:
        if key.endswith("/"):
            return all(entry.mod_revision <= revision for entry in self.get(key).entries.values())
        return Snapshot(self._revision, self._entries).revision_of(key) == revision

    def _delete(self, key: str) -> None:
        self._entries.pop(key, None)
        self._holders.pop(key, None)

    def _put(self, key: str, value: str, lease: Lease | None) -> None:
        created = self._entries[key].create_revision if key in self._entries else self._revision
        self._entries[key] = Entry(value, self._revision, created)
        self._holders.pop(key, None)
        if lease is not None:
            assert isinstance(lease, MemoryLease) and not lease.is_lost
            self._holders[key] = lease


@dataclass(eq=False)
class MemoryLease:
    """A lease on virtual time."""

    ttl_s: float
    store: MemoryStore
    ends_at_s: float | None = None
    is_lost: bool = field(default=False)

    def is_over(self, now_s: float) -> bool:
        return self.ends_at_s is not None and now_s >= self.ends_at_s

    def revoke(self) -> None:
        self.store.end(self)

    def abandon(self) -> None:
        self.store.abandon(self)


class MemoryWatch:
    """A watch that reads the store itself, so it is never late."""

    def __init__(self, store: MemoryStore, prefix: str, end: str = "") -> None:
        self._store = store
        self._prefix, self._end = prefix, end

    @property
    def snapshot(self) -> Snapshot:
        return self._store.get(self._prefix).before(self._end)

    def wait(self, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        with self._store.changed:
            arrived = self._store.changed.wait_for(lambda: self.snapshot.is_newer(seen), timeout_s)
            return self.snapshot if arrived else None

    def cover(self, end: str) -> None:
        with self._store.changed:
            self._end = end
            self._store.changed.notify_all()

    def close(self) -> None:
        """Do nothing: there is no background thread."""
