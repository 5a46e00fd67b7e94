"""When a save is given up, and what keeps it from being published from then on.

Its world has ended, or it gets no further: storage that hangs cannot be interrupted, but nobody has to wait for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

TIMES_LONGEST, LEAST_S, MOST_S = 10.0, 20.0, 600.0
"""How long a save may get no further: so many times the longest that was published, within bounds."""

SLOWEST_BYTES_S = 20e6
"""Storage of this rate is slow, not stuck: an upload, or a sync, of a part as a whole tells nothing before its end."""


class Abandoned(Exception):  # noqa: N818 - not a failure: the world has ended
    """The save is not wanted any more."""


class Gate:
    """Whether a save may go on; `passing` it is publishing."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def check(self) -> None:
        if self._closed.is_set():
            raise Abandoned

    def pause(self, seconds: float) -> None:
        """Sleep, or raise Abandoned as soon as the gate is closed."""
        if self._closed.wait(seconds):
            raise Abandoned

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        with self._lock:
            self.check()
            yield

    def close(self, patience_s: float) -> None:
        """Let nobody pass from now on, and wait a while for who is passing."""
        self._closed.set()
        if self._lock.acquire(timeout=patience_s):
            self._lock.release()


class Patience:
    """How long a save may get no further; one that was given up lets the next have twice as long, were it only slow."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._num_given_up = 0

    def limit_s(self, num_bytes: int) -> float:
        """Return the seconds that a save may get no further, of which each rank writes about so many bytes."""
        learned_s = min(MOST_S, max(LEAST_S, TIMES_LONGEST * self._longest_s) * 2.0**self._num_given_up)
        return max(learned_s, num_bytes / SLOWEST_BYTES_S)

    def learn(self, seconds: float) -> None:
        """Learn from a save that has ended well."""
        self._longest_s, self._num_given_up = max(seconds, self._longest_s), 0

    def lengthen(self) -> None:
        self._num_given_up = min(self._num_given_up + 1, 10)
