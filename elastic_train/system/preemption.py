"""Preemption: SIGTERM and SIGUSR1 set a flag that the loop reads at step boundaries.

The flag is part of every step's collective, so all ranks stop after the same step, commit once, and leave together.
A second SIGTERM exits at once, without a commit, but one that follows within seconds is the same request: a scheduler
that signals a whole process tree reaches a worker twice, directly and through its agent.

A step may last longer than the launcher waits before it sends SIGKILL. So half of that time after SIGTERM, and never
less than `RESERVE_S` before its end, a step that is still being computed is dropped: the applied state, which the step
has not touched, is committed instead. SIGUSR1 is an early warning, after which nobody kills yet.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

EXIT_AT_ONCE = 143
SAME_REQUEST_S = 3.0
GRACE_VARIABLE = "ELASTIC_TRAIN_STOP_GRACE_S"
"""Set by `elastic-train launch` for its workers: seconds from SIGTERM to SIGKILL."""
TORCHELASTIC_GRACE_S = 30.0
RESERVE_S = 30.0
"""Kept for the commit, at most; half of a grace that is shorter than twice as long."""


class StepDropped(BaseException):
    """The step in progress is given up, because the time to leave is running out; the applied state is untouched.

    Not an Exception: it comes out of whatever runs at that moment, a task's code included.
    """


class LeaveRequest:
    """Whether this process was asked to leave, and since when (monotonic seconds); create one, in the main thread.

    `grace_s` is the time from SIGTERM to SIGKILL, in seconds; None where nobody kills, or nobody says when.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.is_set = False
        self.since_s = 0.0
        self.is_late = False
        """Whether no more time may be spent on a step."""
        self._grace_s = grace_s
        self._is_droppable = self._is_ordered = False
        self._earlier = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        if grace_s is not None:
            self._earlier[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._be_late)

    def release(self) -> None:
        """Give the signals back to the handlers that they had before."""
        if self._grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def patience_s(self) -> float:
        """How long to wait for others, in seconds since the request, before this process leaves by itself."""
        return math.inf if self._grace_s is None else step_time_s(self._grace_s) + self._grace_s / 8

    @contextlib.contextmanager
    def droppable(self) -> Iterator[None]:
        """Allow StepDropped inside: what runs there can be given up at any point."""
        self._is_droppable = True
        try:
            if self.is_late:
                raise StepDropped
            yield
        finally:
            self._is_droppable = False

    def dropping(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; waiting for one can be given up."""
        iterator = iter(items)
        while True:
            with self.droppable():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_first, self.is_set = not self.is_set, True
        if is_first:
            self.since_s = now_s
        if number != signal.SIGTERM:
            return
        if self._is_ordered and now_s - self.since_s > SAME_REQUEST_S:
            os._exit(EXIT_AT_ONCE)
        if not self._is_ordered:
            self._is_ordered, self.since_s = True, now_s
            if self._grace_s is not None:
                signal.setitimer(signal.ITIMER_REAL, step_time_s(self._grace_s))

    def _be_late(self, number: int, frame: FrameType | None) -> None:
        self.is_late = True
        if self._is_droppable:
            raise StepDropped


def step_time_s(grace_s: float) -> float:
    """Return how long after SIGTERM, of a grace in seconds, a step may still take."""
    return max(0.001, grace_s - min(RESERVE_S, grace_s / 2))


def launched_grace_s() -> float | None:
    """Return the time from SIGTERM to SIGKILL that this process's launcher gives, in seconds; None without one."""
    text = os.environ.get(GRACE_VARIABLE)
    if text:
        return float(text)
    return TORCHELASTIC_GRACE_S if "TORCHELASTIC_RUN_ID" in os.environ else None
