"""The newest snapshot of a job's keys, from whichever thread brought it, and what it says.

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
        """Take a snapshot in, if it is newer."""
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
    """A snapshot, what it says, and for how many seconds the same members have been ready."""

    snapshot: Snapshot
    view: View
    same_for_s: float


class LatestView(LatestSnapshot):
    """The newest snapshot, with the records in it, as the watch or a write of the member itself brought it."""

    def __init__(self, keys: Keys, first: Snapshot) -> None:
        super().__init__(first)
        self._keys = keys
        self._view = read_view(first, keys)
        self._same_since = time.monotonic()
        self.newest_term = self._view.term
        """The highest term of any world that was seen, in any life of etcd."""
        self.finished: dict[str, str] = {}
        """The hosts of the members of the present world that were seen to have finished, and may have left since."""

    @property
    def view(self) -> View:
        """The newest records alone, which nobody has to wait for: they are one object, and are never changed."""
        return self._view

    def now(self) -> Now:
        with self._changed:
            return Now(self._snapshot, self._view, time.monotonic() - self._same_since)

    def show(self, snapshot: Snapshot) -> None:
        """Take a snapshot in, with the records in it, if it is newer."""
        view = read_view(snapshot, self._keys)  # outside the lock: a thousand members take a while to read
        with self._changed:
            if snapshot.is_newer(self._snapshot):
                if view.ready != self._view.ready:
                    self._same_since = time.monotonic()
                before = self.finished if view.term == self._view.term else {}
                self.finished = before | {one.id: one.host for one in view.members if view.is_finishing(one)}
                self._view = view
                self.newest_term = max(self.newest_term, view.term)
                super().show(snapshot)
