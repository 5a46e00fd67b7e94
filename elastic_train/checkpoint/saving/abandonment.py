"""When a save is given up, and what keeps it from being published from then on.

Its world has ended, or it gets no further: storage that hangs cannot be interrupted, but nobody has to wait for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from elastic_train.errors import StorageError

TIMES_LONGEST, LEAST_S, MOST_S = 10.0, 20.0, 600.0
"""How long a save may get no further: so many times the longest that was published, within bounds."""

SLOWEST_BYTES_S = 20e6
"""Storage of this rate is slow, not stuck: an upload, or a sync, of a part as a whole tells nothing before its end."""


LOOK_EVERY_S = 0.1


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


class Attended:
    """Something done with storage on a thread of its own, which is left behind when it gets no further."""

    def __init__(self, act: Callable[[Callable[[], None]], None]) -> None:
        """Begin; `act` calls what it is given whenever it gets on."""
        self._act, self._ended = act, threading.Event()
        self._error: BaseException | None = None
        self._move()
        threading.Thread(target=self._run, name="attended", daemon=True).start()

    def wait(self, limit_s: float) -> None:
        """Return when it is done; raise what it raised, or StorageError when it got no further for so long."""
        while not self._ended.wait(LOOK_EVERY_S):
            if time.monotonic() - self._moved_at_s > limit_s:
                raise StorageError(f"the storage got no further for {limit_s:.0f} s and was given up; does it answer?")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._act(self._move)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        finally:
            self._ended.set()

    def _move(self) -> None:
        self._moved_at_s = time.monotonic()
