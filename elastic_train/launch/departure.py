"""Requests to leave that reach a launcher, or a trainer that has not begun: SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2.

Until something has been started the process ends at once, with the code that lets a scheduler start it again. From then
on a request is raised where the launcher waits, once; a second one, seconds later, ends the process as it is.

This module imports nothing that takes time: a request may come while the launcher is being imported.
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
    """The launcher was asked to leave. Not an Exception: it comes out of whatever runs at that moment."""


class _Departure:
    """Since when this process has been asked to leave (monotonic seconds), and what a request raises in it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all; a worker is forked with what its launcher had in mind."""
        self.since_s: float | None = None
        self.raised: Callable[[int], BaseException] | None = None
        self.at_once: Callable[[int], str] = lambda _: "its workers end with it"
        """What to do before the process ends at once, by a signal; it returns the last word."""
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
    """Listen for requests from now on, for as long as this process lives."""
    _departure.begin()
    for number in requests():
        signal.signal(number, _departure.note)


def hear_no_more() -> None:
    """Ignore requests, in a process that listened for them and is about to end with its exit code."""
    for number in REQUESTS:
        if signal.getsignal(number) == _departure.note:
            signal.signal(number, signal.SIG_IGN)


def asked_s() -> float | None:
    """Return for how long this process has been asked to leave, in seconds; None if it has not been."""
    return None if _departure.since_s is None else time.monotonic() - _departure.since_s


@contextlib.contextmanager
def raising(kind: Callable[[int], BaseException], at_once: Callable[[int], str] | None = None) -> Iterator[None]:
    """Let a request raise this inside, in the main thread; how requests were taken before holds again afterwards.

    `at_once` is called, with the number of the signal, before the process ends by a second one.
    """
    before = {number: signal.signal(number, _departure.note) for number in requests()}
    raised, _departure.raised = _departure.raised, kind
    earlier, _departure.at_once = _departure.at_once, at_once or _departure.at_once
    if raised is None:
        _departure.since_s, _departure.orders = None, Orders()  # an earlier launch of this process
    try:
        yield
    finally:
        _departure.raised, _departure.at_once = raised, earlier
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def asked_by(number: int) -> AskedToLeave:
    """Return what a request raises before there are workers."""
    return AskedToLeave(f"asked to leave by {signal.Signals(number).name}")
