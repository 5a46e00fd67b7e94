"""One line for each thing that a member waits for, not one for each try.

An alarm of etcd may last for hours, in which every worker of a job tries again every few seconds.
"""

from __future__ import annotations

import logging


class OutageLog:
    """Says why etcd is waited for when that begins or the reason changes, and that it answers again."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said = ""

    def waits(self, error: Exception) -> None:
        """Note that something could not be done yet."""
        if str(error) != self._said:
            self._said = str(error)
            self._log.warning("waiting for etcd: %s", error)

    def is_over(self) -> None:
        """Note that it could be done."""
        if self._said:
            self._said = ""
            self._log.warning("etcd answers again")
