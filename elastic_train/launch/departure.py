"""Requests to leave that reach a launcher, or a trainer that has not begun: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2.

Before anything was started the process exits at once, with the code that makes a scheduler restart it. Afterwards a
request is raised, once, where the launcher waits; a second one, seconds later, ends the process immediately.

This module has no slow imports: a request may come while the launcher is being imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from elastic_train.system.preemption import ORDERS, WARNINGS, Orders, end_at_once, requests, tell

REQUESTS = (*ORDERS, *WARNINGS)
REQUEUE = 75


class AskedToLeave(BaseException):
    """Raised when the launcher is asked to leave. Not an Exception, as it may interrupt any code."""


class _Departure:
    """When this process was asked to leave (monotonic seconds), and what a request raises."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset all; a worker is forked with its launcher's state."""
        self.since_s: float | None = None
        self.raised: Callable[[int], BaseException] | None = None
        self.at_once: Callable[[int], str] = lambda _: "its workers end with it"
        """Called before a signal ends the process at once; returns the last message."""
        self.orders = Orders()

    def note(self, number: int, frame: FrameType | None) -> None:
        name, now_s = signal.Signals(number).name, time.monotonic()
        is_final = number in ORDERS and self.orders.is_final(number, now_s)
        if self.since_s is not None:
            if is_final:
                end_at_once(number, self.at_once(number))
            return
        self.since_s = now_s
        if self.raised is None:
            tell(f"asked to leave by {name} before anything was started")
            os._exit(REQUEUE)
        raise self.raised(number)


_departure = _Departure()


def listen() -> None:
    """Listen for requests until the process ends."""
    _departure.begin()
    for number in requests():
        signal.signal(number, _departure.note)


def hear_no_more() -> None:
    """Ignore requests from now on, in a listening process about to exit with its code."""
    for number in REQUESTS:
        if signal.getsignal(number) == _departure.note:
            signal.signal(number, signal.SIG_IGN)


def asked_s() -> float | None:
    """Return the seconds since this process was asked to leave; None if it was not."""
    return None if _departure.since_s is None else time.monotonic() - _departure.since_s


@contextlib.contextmanager
def raising(kind: Callable[[int], BaseException], at_once: Callable[[int], str] | None = None) -> Iterator[None]:
    """Within this context a request raises `kind` in the main thread; earlier handlers are restored afterwards.

    `at_once` is called with the signal's number before a second signal ends the process.
    """
    before = {number: signal.signal(number, _departure.note) for number in requests()}
    raised, _departure.raised = _departure.raised, kind
    earlier, _departure.at_once = _departure.at_once, at_once or _departure.at_once
    if raised is None:
        _departure.since_s, _departure.orders = None, Orders()  # left by an earlier launch in this process
    try:
        yield
    finally:
        _departure.raised, _departure.at_once = raised, earlier
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def asked_by(number: int) -> AskedToLeave:
    """Return the exception for a request before there are workers."""
    return AskedToLeave(f"asked to leave by {signal.Signals(number).name}")
