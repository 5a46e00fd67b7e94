"""How quickly etcd answers this process: added up over all of its connections, for whoever watches it."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Answers(NamedTuple):
    """Requests that were answered, the seconds that took, and requests that were not, since a process began."""

    num_answers: int = 0
    answer_s: float = 0.0
    num_failures: int = 0


class Tally:
    """Requests that were answered, the seconds that took, and requests that were not; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_answers, self.num_failures = 0, 0
        self.answer_s = 0.0
        """Seconds from request to answer, of all answers."""

    def add_answer(self, seconds: float) -> None:
        with self._lock:
            self.num_answers += 1
            self.answer_s += seconds

    def add_failure(self) -> None:
        """A request got an error in place of an answer: etcd was not reached in time, had no leader, or refused it."""
        with self._lock:
            self.num_failures += 1

    def read(self) -> Answers:
        """Return the sums of one moment."""
        with self._lock:
            return Answers(self.num_answers, self.answer_s, self.num_failures)


TALLY = Tally()
"""Of this process."""
