"""When a save is abandoned, and how its publication is prevented from then on.

A save is abandoned when its world ends or it makes no progress: storage that hangs cannot be interrupted, but nobody
has to wait for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from elastic_train.errors import StorageError
from rendezvous.waiting import GivenUp, begin

T = TypeVar("T")
TIMES_LONGEST, LEAST_S, MOST_S = 10.0, 20.0, 600.0
"""Limit without progress: this multiple of the longest published save, within bounds in seconds."""

SLOWEST_BYTES_S = 20e6
"""Slowest rate that counts as progress: uploading or syncing a whole part reports nothing before its end."""


LOOK_EVERY_S = 0.1


class Abandoned(Exception):  # noqa: N818 - not a failure: the world has ended
    """Raised in a save that is no longer wanted."""


class PublishGate:
    """A gate that a save may pass to publish until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise Abandoned if the gate is closed."""
        if self._closed.is_set():
            raise Abandoned

    def pause(self, seconds: float) -> None:
        """Sleep, or raise Abandoned as soon as the gate is closed."""
        if self._closed.wait(seconds):
            raise Abandoned

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Hold the gate open during a publish; raise Abandoned if it is closed."""
        with self._lock:
            self.check()
            yield

    def close(self, patience_s: float) -> None:
        """Prevent any new publish, and wait up to `patience_s` seconds for one in progress."""
        self._closed.set()
        if self._lock.acquire(timeout=patience_s):
            self._lock.release()


class AdaptiveTimeout:
    """The limit on a save without progress; each abandoned save doubles it, in case storage is only slow."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._num_abandoned = 0

    def limit_s(self, num_bytes: int) -> float:
        """Return the limit in seconds if no rank writes more than about `num_bytes`."""
        learned_s = min(MOST_S, max(LEAST_S, TIMES_LONGEST * self._longest_s) * 2.0**self._num_abandoned)
        return max(learned_s, num_bytes / SLOWEST_BYTES_S)

    def learn(self, seconds: float) -> None:
        self._longest_s, self._num_abandoned = max(seconds, self._longest_s), 0

    def lengthen(self) -> None:
        """Double the limit after an abandoned save."""
        self._num_abandoned = min(self._num_abandoned + 1, 10)


class LastProgress:
    """Time of the last progress, initially now."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        self._at_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._at_s


def call_abandonable(act: Callable[[Callable[[], None]], T], limit_s: float) -> T:
    """Run a storage operation on another thread; return its result or raise its error.

    `act` gets a function to call on every sign of progress. Raise StorageError, and leave the thread behind, after
    `limit_s` seconds without progress; the thread's later actions may still take effect.
    """
    progress = LastProgress()
    call = begin("abandonable", lambda: act(progress.note))
    try:
        return call.result_unless(lambda: progress.idle_s > limit_s, LOOK_EVERY_S)
    except GivenUp:
        raise StorageError(
            f"the storage made no progress for {limit_s:.0f} s and was abandoned; is it reachable?"
        ) from None
