"""Preemption: SIGTERM and SIGUSR1 set a flag that the loop reads at step boundaries.

The flag is part of every step's collective, so all ranks stop after the same step, commit once, and leave together.
A second SIGTERM exits at once, without a commit, but one that follows within seconds is the same request: a scheduler
that signals a whole process tree reaches a worker twice, directly and through its agent.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

EXIT_AT_ONCE = 143
SAME_REQUEST_S = 3.0


class LeaveRequest:
    """Whether this process was asked to leave, and since when (monotonic seconds); create one, in the main thread."""

    def __init__(self) -> None:
        self.is_set = False
        self.since_s = 0.0
        self._earlier = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def release(self) -> None:
        """Give the signals back to the handlers that they had before."""
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.is_set:
            self.is_set, self.since_s = True, now_s
        elif number == signal.SIGTERM and now_s - self.since_s > SAME_REQUEST_S:
            os._exit(EXIT_AT_ONCE)
