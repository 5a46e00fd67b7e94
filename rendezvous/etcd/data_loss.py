"""Count etcd's data losses: a linearizable read never returns a lower revision than an earlier read.

Etcd itself does not report a loss. If it comes back empty, e.g. as a pod without a volume, its revisions start at 1
again. So every request records the newest revision known when it was sent; a lower one in the answer means a new life.

Invariant: an answer belongs to the life in which it was requested, or to a later one that it proves.
"""

from __future__ import annotations

import threading


class DataLossDetector:
    """The lives of one etcd, as far as this process can know them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = self._newest = 0

    def ask(self) -> tuple[int, int]:
        """Return the current life and its newest known revision; call it before a request, for `heard`."""
        with self._lock:
            return self._life, self._newest

    def shown(self, life: int, revision: int) -> None:
        """Record a revision from a life's stream: later reads answer with at least this one."""
        with self._lock:
            if life == self._life:
                self._newest = max(self._newest, revision)

    def heard(self, asked: tuple[int, int], revision: int) -> int:
        """Return the life that an answer belongs to; `asked` is the result of `ask` before the request."""
        life, newest = asked
        with self._lock:
            if revision >= newest:
                if life == self._life:
                    self._newest = max(self._newest, revision)
                return life
            if life == self._life:
                self._life, self._newest = life + 1, revision
            else:
                self._newest = max(self._newest, revision)
            return self._life
