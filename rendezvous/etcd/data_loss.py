"""How often etcd has lost its data: a linearizable read never answers with a lower revision than one before it did.

Etcd itself does not tell: one that comes back empty, as a pod without a volume does, counts its revisions from 1 again.
Whoever asks notes what had been heard by then; an answer below that is of another life.

Invariant: an answer is counted to the life that it was asked in, or to a later one that it proves.
"""

from __future__ import annotations

import threading


class DataLossDetector:
    """The lives of one etcd, as the readers of one process know them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = self._newest = 0

    def ask(self) -> tuple[int, int]:
        """Return the life, and the newest revision heard of in it, as they are before a request."""
        with self._lock:
            return self._life, self._newest

    def shown(self, life: int, revision: int) -> None:
        """Note what a stream of a life has brought: who asks from now on is answered with no less."""
        with self._lock:
            if life == self._life:
                self._newest = max(self._newest, revision)

    def heard(self, asked: tuple[int, int], revision: int) -> int:
        """Return the life that the answer to a request is of."""
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
