"""Log one line per reason for waiting, not one per try.

An etcd alarm may last for hours, in which every worker of a job retries every few seconds. And a terminal should not be
silent while nodes are missing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

FIRST_WORD_S, EVERY_S = 5.0, 60.0


class OutageLog:
    """Logs why etcd is waited for, at the start or when the reason changes, and that it answers again."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said = ""

    def waits(self, error: Exception, left_s: float | None = None) -> None:
        """Note that a request failed and will be retried, for `left_s` seconds if that is limited."""
        if str(error) != self._said:
            self._said = str(error)
            limit = "" if left_s is None else f", giving up in {max(0.0, left_s):.0f} s"
            self._log.warning("waiting for etcd%s: %s", limit, error)

    def is_over(self) -> None:
        """Note that a request succeeded."""
        if self._said:
            self._said = ""
            self._log.warning("etcd answers again")


class WaitingLog:
    """Logs what is waited for after some seconds, and then each minute, or only once."""

    def __init__(self, log: logging.Logger, timeout_s: float = math.inf, every_s: float = EVERY_S) -> None:
        self._log, self._every_s = log, every_s
        self._deadline = time.monotonic() + timeout_s
        self._due_at = time.monotonic() + FIRST_WORD_S
        self._is_urgent = False

    def waits(self, what: Callable[[float], str], *, at_once: bool = False) -> None:
        """Log a wait if it is due, the first time `at_once` if requested; `what` gets the remaining seconds."""
        now = time.monotonic()
        if now >= self._due_at or (at_once and not self._is_urgent):
            self._is_urgent = at_once
            self._due_at = now + self._every_s
            self._log.warning("%s", what(max(0.0, self._deadline - now)))
