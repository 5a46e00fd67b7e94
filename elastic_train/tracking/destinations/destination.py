"""What every tracker is asked for; MLflow, TensorBoard's files and Weights & Biases answer it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastic_train.tracking.metric_log import Settled, Values


class LostValuesError(OSError):
    """Values that were sent have not arrived: `open` finds out which, and all are offered again."""


class Destination(Protocol):
    """Takes a run's settled lines, each once, from one thread; any call may fail, and `open` is called again then.

    `name` is what messages call it, `lock` the file below the run's folder that whoever sends holds, `remedy` what a
    person does about values that it did not get.
    """

    name: str
    lock: str
    remedy: str

    def known_id(self) -> str | None:
        """Return the run's id there, if the folder has it."""

    def open(self) -> str:
        """Find or create the run, find out what it has, and return its id."""

    def describe(self) -> list[Exception]:
        """Record the configuration; return what failed, which the next call tries again."""

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Send the values that it lacks; return how many. Tags are kept for `tag`."""

    def tag(self) -> None:
        """Set the newest tags."""

    def end(self, status: str) -> None:
        """Record how the run ended."""
