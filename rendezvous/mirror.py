"""A mirror of an etcd prefix that follows every change, whatever breaks on the way.

It lists at revision R and streams from R+1. When the stream breaks, or starts at a revision that was compacted away, it
lists again, through another member of etcd if need be, and streams from there. A list after `RELIST_S` of silence
bounds how long a stream that died without a sign is believed.

Invariant: the mirror's revision never goes back, and every revision it shows is a state that etcd had.
"""

from __future__ import annotations

import functools
import logging
import queue
import random
import threading
from collections.abc import Callable
from typing import TypeAlias

from pyetcd import events as kinds
from pyetcd import watch as streams

from rendezvous.errors import StoreError
from rendezvous.etcd import Connection, list_prefix
from rendezvous.options import EtcdOptions
from rendezvous.store import Entry, Snapshot

RELIST_S = 10.0
_log = logging.getLogger(__name__)
_Said: TypeAlias = streams.WatchResponse | Exception | None


class Mirror:
    """The Watch of EtcdStore: a thread that keeps the newest snapshot."""

    def __init__(self, options: EtcdOptions, prefix: str, *, first: Snapshot) -> None:
        self._connection = Connection(options)
        self._prefix = prefix
        self._snapshot = first
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        threading.Thread(target=self._follow, name=f"watch {prefix}", daemon=True).start()

    @property
    def snapshot(self) -> Snapshot:
        with self._changed:
            return self._snapshot

    def wait(self, after: int, timeout_s: float) -> Snapshot | None:
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._snapshot.revision > after, timeout_s)
            return self._snapshot if arrived else None

    def close(self) -> None:
        self._closed.set()
        self._said.put(None)

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                self._stream()
            except StoreError as error:
                _log.debug("the watch of %s waits for etcd: %s", self._prefix, error)
            self._closed.wait(random.uniform(0.02, 0.2))
        self._connection.close()

    def _stream(self) -> None:
        """Apply what one stream says until it breaks or falls silent, then list."""
        said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._said = said
        watch_id = self._connection.call(functools.partial(self._open, said.put), give_up_after_s=2.0)
        while not self._closed.is_set():
            try:
                answer = said.get(timeout=RELIST_S)
            except queue.Empty:
                self._publish(list_prefix(self._connection, self._prefix))
                continue
            if not isinstance(answer, streams.WatchResponse):
                break
            self._publish(_applied(self._snapshot, answer))
        self._connection.client().cancel_watch(watch_id)
        if not self._closed.is_set():
            self._publish(list_prefix(self._connection, self._prefix))

    def _open(self, tell: Callable[[_Said], None], client: object) -> int:
        start = self._snapshot.revision + 1
        return int(client.add_watch_prefix_callback(self._prefix, tell, start_revision=start))  # type: ignore[attr-defined]

    def _publish(self, snapshot: Snapshot) -> None:
        with self._changed:
            if snapshot.revision > self._snapshot.revision:
                self._snapshot = snapshot
                self._changed.notify_all()


def _applied(snapshot: Snapshot, response: streams.WatchResponse) -> Snapshot:
    """Return the snapshot after a response's events; a response holds all events of its revisions."""
    entries = dict(snapshot.entries)
    for event in response.events:
        key = event.key.decode()
        if isinstance(event, kinds.DeleteEvent):
            entries.pop(key, None)
        else:
            entries[key] = Entry(event.value.decode(), event.mod_revision, event.create_revision)
    revision = max([snapshot.revision, *(event.mod_revision for event in response.events)])
    return Snapshot(revision, entries)
