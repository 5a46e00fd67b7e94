"""A watchdog over a process's own progress: a worker that hangs says where, and ends, so that the others go on.

Time spent waiting for peers does not count: who waits for a hung rank is not hung. The limit is learned from the
longest stretch of work so far. Two watchers look: a thread, which dumps every thread's stack and ends the process with
the code for a hang; and faulthandler's timer, which needs no interpreter lock, for a hang that holds it: the thread
sets it back as long as it runs, so it goes off, and ends the process, when no thread has run for longer than the limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from elastic_train.errors import HungError

T = TypeVar("T")

TIMES_LONGEST = 10.0
LEAST_S, MOST_S = 20.0, 600.0
BACKSTOP_S = 5.0


class Watchdog:
    """Watches one process; `limit_s` fixes the longest stretch of work without progress, None learns it."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._fixed_s = limit_s
        self._longest_s: float | None = None
        self._since: float | None = None
        self._is_entering = False
        self._thread: threading.Thread | None = None

    @property
    def limit_s(self) -> float:
        """How long work may go on without progress, as of now."""
        if self._is_entering or (self._fixed_s is None and self._longest_s is None):
            return MOST_S
        learned_s = min(MOST_S, max(LEAST_S, TIMES_LONGEST * (self._longest_s or 0.0)))
        return self._fixed_s or learned_s

    def beat(self) -> None:
        """Say that there was progress, and that work goes on."""
        self._learn()
        was_entering, self._is_entering = self._is_entering, False
        self._since = time.monotonic()
        self._start()
        if was_entering:
            self._arm()

    def enter(self) -> None:
        """Say that work without beats begins, such as a world's: up to the next beat it has the longest limit."""
        self._since, self._is_entering = time.monotonic(), True
        self._start()

    def beating(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; each is progress."""
        for item in items:
            self.beat()
            yield item

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Do not count the time inside: it is somebody else's, or has a limit of its own."""
        self._learn()
        was_working, self._since = self._since is not None, None
        try:
            yield
        finally:
            self._since = time.monotonic() if was_working else None

    def _learn(self) -> None:
        if self._since is not None and not self._is_entering:
            self._longest_s = max(time.monotonic() - self._since, self._longest_s or 0.0)

    def rest(self) -> None:
        """Stop counting until the next beat."""
        self._since = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            self._arm()
            time.sleep(min(1.0, self.limit_s / 4))
            since = self._since
            if since is not None and time.monotonic() - since > self.limit_s:
                self._end(time.monotonic() - since)

    def _arm(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # there may be no stderr to dump to
            faulthandler.dump_traceback_later(self.limit_s + BACKSTOP_S, exit=True)

    def _end(self, stuck_s: float) -> None:
        with contextlib.suppress(ValueError, OSError):
            sys.stderr.write(
                f"error: no progress for {stuck_s:.0f} s (limit {self.limit_s:.0f} s): this process hangs and ends; "
                "where every thread is:\n"
            )
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
        os._exit(HungError.exit_code)
