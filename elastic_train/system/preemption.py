"""Preemption: SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 and SIGUSR2 set a flag that the loop reads at step boundaries.

The flag is part of every step's collective, so all ranks stop after the same step, commit once, and leave together.
While nothing would be lost, as before the first step, the process leaves at once, wherever it is.

A second SIGTERM exits at once, without a commit, but one within seconds counts as the same request: a scheduler that
signals a whole process tree reaches a worker twice, directly and through its agent. A second Ctrl-C always exits at
once. SIGHUP stays ignored where it was (nohup).

A step may outlast the time until the launcher sends SIGKILL. So half of that time after SIGTERM, but not earlier than
`RESERVE_S` before its end, an unfinished step is dropped: the applied state, which the step has not touched, is
committed. SIGUSR1 and SIGUSR2 are early warnings, without a kill.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")

ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Requests after which the process may be killed."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Requests without a kill; the second is the usual one of submitit users."""
EXIT_BY_SIGNAL = 128
"""Base of the exit code of a process ended by a signal, as in shells; the signal's number is added."""
SAME_REQUEST_S, SAME_KEY_S = 3.0, 0.3
"""Seconds within which repeated signals count as one request: as different signals or a second SIGTERM, and as
Ctrl-C."""
SHOW_CURSOR = "\x1b[?25h"
GRACE_VARIABLE = "ELASTIC_TRAIN_STOP_GRACE_S"
"""Set by `elastic-train launch` for its workers: seconds from SIGTERM to SIGKILL."""
TORCHELASTIC_GRACE_S = 30.0
RESERVE_S = 30.0
"""Most seconds reserved for the commit; half of a shorter grace period."""


class StepDropped(BaseException):
    """Raised to drop the current step because time to leave is running out; the applied state is untouched.

    Not an Exception, as it may interrupt any code, including a task's.
    """


class LeaveNow(BaseException):
    """Raised when asked to leave with nothing to lose. Not an Exception: it may interrupt any code."""


def requests() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to leave: without SIGHUP if its parent has it ignored."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in (*ORDERS, *WARNINGS) if not (is_deaf and number == signal.SIGHUP))


class Orders:
    """Orders to leave received so far, and the one after which the process must end at once."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """Time of the first order (monotonic seconds)."""

    def is_final(self, number: int, now_s: float) -> bool:
        """Record an order; return True if the process must end at once, having been asked before."""
        if self.since_s is None:
            self.since_s = now_s
            return False
        if number == signal.SIGHUP:  # shell and kernel send it one after the other
            return False
        return now_s - self.since_s > (SAME_KEY_S if number == signal.SIGINT else SAME_REQUEST_S)


def tell(text: str) -> None:
    """Write a line to standard error in a signal handler; the terminal may be gone along with the sender."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def end_at_once(number: int, said: str) -> NoReturn:
    """End this process on an order to do so, with a last message if there is one."""
    if said:
        tell((f"{SHOW_CURSOR}\n" if os.isatty(2) else "") + f"ended at once by {signal.Signals(number).name}: {said}")
    os._exit(EXIT_BY_SIGNAL + number)


class LeaveRequest:
    """True state and time of a request to leave (monotonic seconds); create it in the main thread.

    `grace_s` is the time from SIGTERM to SIGKILL in seconds; None if nobody kills, or it is unknown.
    """

    name = ""
    """Name of the first signal; empty if it was none, or a launcher's, which names the one that it received."""
    may_go: Callable[[], bool] = staticmethod(lambda: False)
    """Returns True while a request may raise LeaveNow, as nothing would be lost."""
    lost: Callable[[], str] = staticmethod(lambda: "nothing is lost")
    """Returns what is lost if the process ends now; empty if another process reports it."""

    def __init__(self, grace_s: float | None = None) -> None:
        self.is_set = False
        self.since_s = 0.0
        self.is_late = False
        """True if no more time may be spent on a step."""
        self._grace_s = grace_s
        self._is_droppable, self._orders = False, Orders()
        self._earlier = {number: signal.signal(number, self._note) for number in requests()}
        if grace_s is not None:
            self._earlier[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._be_late)

    def release(self) -> None:
        """Restore the signals' previous handlers."""
        if self._grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def hear_no_more(self) -> None:
        """Ignore all requests, in a process about to end as requested, or with its result."""
        for number in self._earlier:
            signal.signal(number, signal.SIG_IGN)

    @property
    def patience_s(self) -> float:
        """Seconds since the request to wait for others before this process leaves by itself."""
        return math.inf if self._grace_s is None else step_time_s(self._grace_s) + self._grace_s / 8

    @contextlib.contextmanager
    def droppable(self) -> Iterator[None]:
        """Allow StepDropped inside: the code can be abandoned at any point."""
        self._is_droppable = True
        try:
            if self.is_late:
                raise StepDropped
            yield
        finally:
            self._is_droppable = False

    def dropping(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; waiting for one can be abandoned."""
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
            self.since_s, self.name = now_s, "" if self._grace_s is not None else signal.Signals(number).name
        if number in ORDERS:
            is_first_order = self._orders.since_s is None
            if self._orders.is_final(number, now_s):
                end_at_once(number, self.lost())
            if is_first_order:
                self.since_s = now_s
                if self._grace_s is not None:
                    signal.setitimer(signal.ITIMER_REAL, step_time_s(self._grace_s))
        if is_first and self.may_go():
            raise LeaveNow
        if is_first and number == signal.SIGINT and self._grace_s is None:
            tell(f"asked to leave by {self.name}: this step is finished and committed; Ctrl-C again ends at once")

    def _be_late(self, number: int, frame: FrameType | None) -> None:
        self.is_late = True
        if self._is_droppable:
            raise StepDropped


def step_time_s(grace_s: float) -> float:
    """Return how many seconds after SIGTERM a step may still take, given the grace period."""
    return max(0.001, grace_s - min(RESERVE_S, grace_s / 2))


def launched_grace_s() -> float | None:
    """Return this process's grace period from SIGTERM to SIGKILL in seconds; None without a launcher."""
    text = os.environ.get(GRACE_VARIABLE)
    if text:
        return float(text)
    return TORCHELASTIC_GRACE_S if "TORCHELASTIC_RUN_ID" in os.environ else None
