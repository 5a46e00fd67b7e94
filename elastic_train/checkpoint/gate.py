"""The gate between a save and its publication: a world that ends closes it, and waits for who is passing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


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
