"""The newest snapshot of a job's keys, from any thread, and the view parsed from it.

Invariant: the newest snapshot is never replaced by one of an older revision, or of a life of etcd before it lost its
data; and snapshot and view of one `now` belong together.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from rendezvous.membership.records import Keys, View, read_view
from rendezvous.membership.store import Snapshot


class LatestSnapshot:
    """Some threads show snapshots, others read the newest one or wait for the next."""

    def __init__(self, first: Snapshot) -> None:
        self._changed = threading.Condition()
        self._snapshot = first

    @property
    def snapshot(self) -> Snapshot:
        with self._changed:
            return self._snapshot

    def show(self, snapshot: Snapshot) -> None:
        """Store a snapshot if it is newer."""
        with self._changed:
            if snapshot.is_newer(self._snapshot):
                self._snapshot = snapshot
                self._changed.notify_all()

    def wait(self, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        """Return the newest snapshot as soon as it is newer than `seen`; None after the timeout."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._snapshot.is_newer(seen), timeout_s)
            return self._snapshot if arrived else None


class Now(NamedTuple):
    """A snapshot, its view, and the seconds for which the same members have been ready."""

    snapshot: Snapshot
    view: View
    same_for_s: float


class LatestView(LatestSnapshot):
    """The newest snapshot with its records, from the watch or from a write of the member itself."""

    def __init__(self, keys: Keys, first: Snapshot) -> None:
        super().__init__(first)
        self._keys = keys
        self._view = read_view(first, keys)
        self._same_since = time.monotonic()
        self.newest_term = self._view.term
        """Highest term of any world seen, in any life of etcd."""
        self.finished: dict[str, str] = {}
        """Hosts, by member, of the current world's members that were seen to finish, and may have left since."""

    @property
    def view(self) -> View:
        """The newest view, without locking: views are never changed."""
        return self._view

    def now(self) -> Now:
        with self._changed:
            return Now(self._snapshot, self._view, time.monotonic() - self._same_since)

    def show(self, snapshot: Snapshot) -> None:
        """Store a snapshot and its parsed records, if it is newer."""
        if not snapshot.is_newer(self.snapshot):
            return
        view = read_view(snapshot, self._keys)  # outside the lock: parsing a thousand members takes a while
        with self._changed:
            if snapshot.is_newer(self._snapshot):
                if view.ready != self._view.ready:
                    self._same_since = time.monotonic()
                before = self.finished if view.term == self._view.term else {}
                self.finished = before | {member.id: member.host for member in view.finishing}
                self._view = view
                self.newest_term = max(self.newest_term, view.term)
                super().show(snapshot)
