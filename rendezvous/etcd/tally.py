"""Statistics of etcd's answers to this process, over all of its connections, for monitoring."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Answers(NamedTuple):
    """Number of answered requests, their total seconds, and number of failed requests, since process start."""

    num_answers: int = 0
    answer_s: float = 0.0
    num_failures: int = 0


class Tally:
    """Counts answered requests, their seconds, and failed requests; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_answers, self.num_failures = 0, 0
        self.answer_s = 0.0
        """Total seconds from request to answer."""

    def add_answer(self, seconds: float) -> None:
        with self._lock:
            self.num_answers += 1
            self.answer_s += seconds

    def add_failure(self) -> None:
        """Count a failed request: etcd was not reached in time, had no leader, or refused it."""
        with self._lock:
            self.num_failures += 1

    def read(self) -> Answers:
        """Return consistent totals."""
        with self._lock:
            return Answers(self.num_answers, self.answer_s, self.num_failures)


TALLY = Tally()
"""The tally of this process."""
