"""A mirror of an etcd prefix that follows every change through broken streams, restarts and compactions.

It lists at revision R and streams from R+1, from the etcd member that has just answered. When the stream breaks, or
starts at a compacted revision, it lists again, through another member if necessary, and streams from there. After
`PROBE_S` of silence the member must answer a request. If its revision is not the newest that was shown, all is listed
again after `RELIST_S`, so that a silently dead stream is noticed soon.

Invariant: each snapshot is a state that etcd had at that revision, and none is older than the one before it or of an
earlier life of etcd, before it lost its data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import grpc  # type: ignore[import-untyped]
from pyetcd import events as kinds
from pyetcd import exceptions as failures
from pyetcd import watch as streams

from rendezvous.errors import StoreDeniedError, StoreError
from rendezvous.etcd.connection import DENIED_S, GIVE_UP_AFTER_S, Connection, list_in_life, range_end_of, text_of
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.etcd.options import EtcdOptions
from rendezvous.membership.latest_view import LatestSnapshot
from rendezvous.membership.store import Entry, Snapshot
from rendezvous.pauses import between

PROBE_S = 3.0
RELIST_S = 10.0
_log = logging.getLogger(__name__)
_Said: TypeAlias = streams.WatchResponse | Exception | None


class Mirror:
    """The Watch of EtcdStore: a thread that provides the newest snapshot."""

    def __init__(
        self, options: EtcdOptions, prefix: str, end: str, *, first: Snapshot, data_loss: DataLossDetector
    ) -> None:
        self._connection = Connection(options)
        self._prefix, self._end = prefix, end
        self._latest, self._data_loss = LatestSnapshot(first), data_loss
        self._closed = threading.Event()
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._listed_at = 0.0
        threading.Thread(target=self._follow, name=f"watch {prefix}", daemon=True).start()

    @property
    def snapshot(self) -> Snapshot:
        return self._latest.snapshot

    def wait(self, seen: Snapshot, timeout_s: float) -> Snapshot | None:
        return self._latest.wait(seen, timeout_s)

    def cover(self, end: str) -> None:
        if end != self._end:
            self._end = end
            self._said.put(None)  # ends the stream; the next one has the new range

    def close(self) -> None:
        self._closed.set()
        self._said.put(None)

    def _follow(self) -> None:
        while not self._closed.is_set():
            end = self._end
            try:
                self._stream()
            # nothing ends this thread, not even that another cannot be started now (RuntimeError)
            except (StoreError, grpc.RpcError, failures.Etcd3Exception, RuntimeError) as error:
                _log.debug("the watch of %s waits for etcd: %s", self._prefix, error)
                if isinstance(error, StoreDeniedError):
                    self._closed.wait(between(*DENIED_S))
            if end == self._end:
                self._closed.wait(between(0.02, 0.2))
        self._connection.close()

    def _stream(self) -> None:
        """List, then apply one stream's changes until it breaks or its etcd member no longer answers."""
        said: queue.SimpleQueue[_Said] = queue.SimpleQueue()
        self._said = said
        end = self._end  # only now: a later change ends this stream
        self._list(end)
        watch_id = self._connection.call(functools.partial(self._open, said.put, end), give_up_after_s=2.0)
        try:
            self._apply(said, end)
        finally:  # or its answers would pile up unread
            # If that etcd member is gone, so is the watch, and there may be no other member to ask.
            with contextlib.suppress(grpc.RpcError, failures.Etcd3Exception):
                self._connection.client().cancel_watch(watch_id)

    def _apply(self, said: queue.SimpleQueue[_Said], end: str) -> None:
        """Apply a stream's changes, until it breaks or the connection moves to another member.

        All that have arrived are applied at once: members that leave a world together cost one view, not one each.
        """
        streaming_from = self._connection.client().endpoint_in_use
        while not self._closed.is_set():
            try:
                events, is_over = _arrived(said)
            except queue.Empty:
                self._probe(end)
                if self._connection.client().endpoint_in_use is not streaming_from:
                    return
                continue
            if events:
                shown = _applied(self.snapshot.before(end), events)
                self._data_loss.shown(shown.life, shown.revision)
                self._latest.show(shown)
            if is_over:
                return

    def _list(self, end: str) -> None:
        listed = list_in_life(self._connection, self._prefix, self._data_loss, end=end)
        if listed.life > self.snapshot.life:
            _log.warning("etcd has lost its data: its revision went back to %d", listed.revision)
        self._latest.show(listed)
        self._listed_at = time.monotonic()

    def _probe(self, end: str) -> None:
        """Send a small request; if this member does not answer, the connection moves to another.

        Keys are listed only if any was written of which the stream has not told: if as many members listed all keys
        every few seconds, an idle job's load of etcd would grow with the square of its members.
        """
        answer = self._connection.call(
            lambda client: client.get_response(self._prefix, count_only=True), give_up_after_s=GIVE_UP_AFTER_S
        )
        is_current = answer.header.revision == self.snapshot.revision
        if not is_current and time.monotonic() - self._listed_at >= RELIST_S:
            self._list(end)

    def _open(self, on_answer: Callable[[_Said], None], end: str, client: object) -> int:
        bounds = {"range_end": range_end_of(self._prefix, end), "start_revision": self.snapshot.revision + 1}
        return int(client.add_watch_callback(self._prefix, on_answer, **bounds))  # type: ignore[attr-defined]


def _arrived(said: queue.SimpleQueue[_Said]) -> tuple[list[kinds.Event], bool]:
    """Wait for a stream's next answer; return the events of all that have arrived, and True if the stream is over.

    Raises queue.Empty after `PROBE_S`.
    """
    answers = [said.get(timeout=PROBE_S)]
    while not said.empty():
        answers.append(said.get())
    responses = [answer for answer in answers if isinstance(answer, streams.WatchResponse)]
    return [event for response in responses for event in response.events], len(responses) < len(answers)


def _applied(snapshot: Snapshot, events: Sequence[kinds.Event]) -> Snapshot:
    """Return the snapshot after the events of some responses; a response holds all events of its revisions."""
    entries = dict(snapshot.entries)
    for event in events:
        key = text_of(event.key)
        if isinstance(event, kinds.DeleteEvent):
            entries.pop(key, None)
        else:
            entries[key] = Entry(text_of(event.value), event.mod_revision, event.create_revision)
    revision = max([snapshot.revision, *(event.mod_revision for event in events)])
    return replace(snapshot, revision=revision, entries=entries)
