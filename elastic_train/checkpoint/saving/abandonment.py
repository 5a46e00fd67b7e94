"""When a save is abandoned, and what keeps it from being published from then on.

Either its world has ended, or it makes no progress: storage that hangs cannot be interrupted, but nobody has to wait
for it.
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
"""How long a save may make no progress: this multiple of the longest that was published, within bounds."""

SLOWEST_BYTES_S = 20e6
"""Storage of this rate is slow, not stuck: an upload, or a sync, of a whole part reports nothing before its end."""


LOOK_EVERY_S = 0.1


class Abandoned(Exception):  # noqa: N818 - not a failure: the world has ended
    """The save is not wanted any more."""


class PublishGate:
    """Whether a save may continue; it is published while `passing` the gate."""

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
        """Hold the gate open for a publish; Abandoned if it is closed."""
        with self._lock:
            self.check()
            yield

    def close(self, patience_s: float) -> None:
        """Let no publish begin from now on, and wait up to `patience_s` seconds for one that has begun."""
        self._closed.set()
        if self._lock.acquire(timeout=patience_s):
            self._lock.release()


class AdaptiveTimeout:
    """How long a save may make no progress; each one that is abandoned doubles that, in case storage is only slow."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._num_abandoned = 0

    def limit_s(self, num_bytes: int) -> float:
        """Return the seconds that a save may make no progress if no rank writes more than about `num_bytes`."""
        learned_s = min(MOST_S, max(LEAST_S, TIMES_LONGEST * self._longest_s) * 2.0**self._num_abandoned)
        return max(learned_s, num_bytes / SLOWEST_BYTES_S)

    def learn(self, seconds: float) -> None:
        """Learn from a save that has succeeded."""
        self._longest_s, self._num_abandoned = max(seconds, self._longest_s), 0

    def lengthen(self) -> None:
        """Learn that a save was abandoned."""
        self._num_abandoned = min(self._num_abandoned + 1, 10)


class LastProgress:
    """When something last made progress; it begins now."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Record progress, on any thread."""
        self._at_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._at_s


def call_abandonable(act: Callable[[Callable[[], None]], T], limit_s: float) -> T:
    """Do something with storage on another thread, and return what it returns or raise what it raises.

    `act` is given a function to call on every sign of progress. Raises StorageError, and leaves the thread behind, when
    there is none for `limit_s` seconds; what the thread does after that may still take effect.
    """
    progress = LastProgress()
    call = begin("abandonable", lambda: act(progress.note))
    try:
        return call.result_unless(lambda: progress.idle_s > limit_s, LOOK_EVERY_S)
    except GivenUp:
        raise StorageError(
            f"the storage made no progress for {limit_s:.0f} s and was abandoned; is it reachable?"
        ) from None
