"""Requests to leave that reach a launcher, from its first moment on: SIGTERM, SIGUSR1 and SIGINT.

Until something has been started the process ends at once, with the code that lets a scheduler start it again. From then
on a request is raised where the launcher waits, once; a second one, seconds later, ends the process as it is.

This module imports nothing that takes time: a scheduler may take a node back while the launcher is being imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from elastic_train.system.preemption import EXIT_AT_ONCE, SAME_REQUEST_S

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE = 75


class AskedToLeave(BaseException):
    """The launcher was asked to leave. Not an Exception: it comes out of whatever runs at that moment."""


class _Departure:
    """Since when this process has been asked to leave (monotonic seconds), and what a request raises in it."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.raised: Callable[[str], BaseException] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        name, now_s = signal.Signals(number).name, time.monotonic()
        if self.since_s is not None:
            if now_s - self.since_s > SAME_REQUEST_S:
                os._exit(EXIT_AT_ONCE)  # the workers die with it
            return
        self.since_s = now_s
        if self.raised is None:
            os.write(2, f"asked to leave by {name} before anything was started\n".encode())
            os._exit(REQUEUE)
        raise self.raised(f"asked to leave by {name}")


_departure = _Departure()


def listen() -> None:
    """Listen for requests from now on, for as long as this process lives."""
    for number in REQUESTS:
        signal.signal(number, _departure.note)


def asked_s() -> float | None:
    """Return for how long this process has been asked to leave, in seconds; None if it has not been."""
    return None if _departure.since_s is None else time.monotonic() - _departure.since_s


@contextlib.contextmanager
def raising(kind: Callable[[str], BaseException]) -> Iterator[None]:
    """Let a request raise this inside, in the main thread; how requests were taken before holds again afterwards."""
    before = {number: signal.signal(number, _departure.note) for number in REQUESTS}
    raised, _departure.raised = _departure.raised, kind
    if raised is None:
        _departure.since_s = None  # an earlier launch of this process
    try:
        yield
    finally:
        _departure.raised = raised
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
