"""What a member has seen of its job: the newest snapshot, as the watch or its own write brought it, and its view.

Invariant: what is seen never goes back, to an older revision or to a life of etcd before it lost its data, and snapshot
and view of one `now` belong together.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from rendezvous.membership.records import Keys, View, read_view
from rendezvous.membership.store import Snapshot


class Now(NamedTuple):
    """A snapshot, what it says, and for how many seconds the same members have been ready."""

    snapshot: Snapshot
    view: View
    same_for_s: float


class LatestView:
    """One thread shows, others read and wait."""

    def __init__(self, keys: Keys, first: Snapshot) -> None:
        self._keys = keys
        self._changed = threading.Condition()
        self._snapshot, self._view = first, read_view(first, keys)
        self._same_since = time.monotonic()
        self.newest_term = self._view.term
        """Of all worlds that were seen, in any life."""

    def now(self) -> Now:
        with self._changed:
            return Now(self._snapshot, self._view, time.monotonic() - self._same_since)

    def show(self, snapshot: Snapshot) -> None:
        """Take a snapshot in, if it is newer."""
        view = read_view(snapshot, self._keys)
        with self._changed:
            if snapshot.is_newer(self._snapshot):
                if view.ready != self._view.ready:
                    self._same_since = time.monotonic()
                self._snapshot, self._view = snapshot, view
                self.newest_term = max(self.newest_term, view.term)
                self._changed.notify_all()

    def await_change(self, seen: Snapshot, timeout_s: float) -> None:
        """Return once there is a newer snapshot than this, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.is_newer(seen), timeout_s)
