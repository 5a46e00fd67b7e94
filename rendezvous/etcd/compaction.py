"""Compact the history of an etcd that has only jobs like this one, so that it does not fill its disk.

Etcd keeps every revision until it is compacted, which by default never happens: a regroup of a thousand members writes
a megabyte. The leading member compacts all revisions older than ten minutes.

Compaction affects the whole etcd, and a client that resumes a watch at a compacted revision must list again. Ours do;
others may not. So an etcd with any key outside /elastic/, or in which this user may not count all keys, is left to its
operator, as is one that someone else compacts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from pyetcd import utils

from rendezvous.errors import StoreError
from rendezvous.etcd.connection import GIVE_UP_AFTER_S, Connection
from rendezvous.etcd.options import EtcdOptions
from rendezvous.membership.records import JOBS

KEEP_S = 600.0
"""Seconds of history to keep: watches resumed within this time are not compacted."""
LOOK_EVERY_S = 60.0

_log = logging.getLogger("rendezvous")


class Compaction:
    """A thread that compacts etcd while `is_leading()`."""

    def __init__(
        self,
        options: EtcdOptions,
        is_leading: Callable[[], bool],
        *,
        keep_s: float = KEEP_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._options, self._is_leading, self._keep_s, self._look_every_s = options, is_leading, keep_s, look_every_s
        self._seen: deque[tuple[float, int]] = deque()
        """Times, and the newest revision at each."""
        self._compacted = 0
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="compaction", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _serve(self) -> None:
        while not self._closed.wait(self._look_every_s):
            if not self._is_leading():
                self._seen.clear()
                continue
            connection = Connection(self._options)
            try:
                self._look(connection)
            except StoreError as error:
                _log.debug("etcd's history is not compacted from here: %s", error)
                self._seen.clear()
            finally:
                connection.close()

    def _look(self, connection: Connection) -> None:
        """Record the newest revision, and compact at the newest one that is old enough."""
        revision, num_ours = _count(connection, JOBS, utils.prefix_range_end(JOBS.encode()))
        if self._seen and revision < self._seen[-1][1]:
            self._seen.clear()  # etcd has lost its data
            self._compacted = 0
        now = time.monotonic()
        self._seen.append((now, revision))
        old = 0
        while now - self._seen[0][0] > self._keep_s:
            old = self._seen.popleft()[1]
        if old > self._compacted and _count(connection, b"\0", b"\0")[1] == num_ours:
            connection.call(lambda client: client.compact(old), give_up_after_s=GIVE_UP_AFTER_S)
            self._compacted = old


def _count(connection: Connection, start: str | bytes, end: bytes) -> tuple[int, int]:
    """Return etcd's revision, and the number of keys from `start` up to `end`; an end of zero means all."""
    answer = connection.call(
        lambda client: client.get_response(start, range_end=end, count_only=True), give_up_after_s=GIVE_UP_AFTER_S
    )
    return int(answer.header.revision), int(answer.count)
