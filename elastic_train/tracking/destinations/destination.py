"""The protocol of trackers: MLflow, TensorBoard's files and Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastic_train.tracking.metric_log import Settled, Values


class LostValuesError(OSError):
    """Raised if sent values have not arrived: `open` finds out which, and all are offered again."""


class Destination(Protocol):
    """Takes a run's settled lines, each once, from one thread; after any failed call `open` is called again.

    `name` is used in messages, `lock` is the file in the run's folder that the sender holds, `remedy` says what to do
    about values that it lacks.
    """

    name: str
    lock: str
    remedy: str

    def known_id(self) -> str | None:
        """Return the run's id there, if the folder has it."""

    def open(self) -> str:
        """Find or create the run, read what it has, and return its id."""

    def describe(self) -> list[Exception]:
        """Record the configuration; return the failures, which the next call retries."""

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Send the values that it lacks; return their number. Tags are kept for `tag`."""

    def tag(self) -> None:
        """Set the newest tags."""

    def end(self, status: str) -> None:
        """Record how the run ended."""
