"""Where a rank's step time goes, phase by phase, and which rank the others wait for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

SLOW_RATIO = 1.5
"""A rank that computes for so many times the median is named: what ranks do in a step is alike but for noise."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank measured, in seconds and bytes.

    `data_s` is how long it waited for this step's samples, `compute_s` how long its lanes took. Of the step before,
    whose exchange is over: `wait_s` for the slowest rank, `exchange_s` for the gradients, `exchanged_bytes` given to
    collectives for them.
    """

    data_s: float
    compute_s: float
    wait_s: float
    exchange_s: float
    exchanged_bytes: int


@dataclass(slots=True)
class StepClock:
    """Measures the phases of a rank's steps, one lap after another; what is kept is sent with the next step."""

    data_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0
    exchanged_bytes: int = 0
    _last_s: float = 0.0

    def start(self) -> None:
        """Begin to measure: what has passed since the last lap belongs to no phase."""
        self._last_s = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, or the start."""
        before, self._last_s = self._last_s, time.perf_counter()
        return self._last_s - before

    def row(self, compute_s: float) -> list[float | int]:
        """Return what `RankFacts` says of this rank, in its order."""
        return [self.data_s, compute_s, self.wait_s, self.exchange_s, self.exchanged_bytes]


def slowest(ranks: Sequence[RankFacts]) -> tuple[int, float] | None:
    """Return the rank whose lanes took longest, and how many times the median that was; None if it is unremarkable."""
    if len(ranks) < 2:
        return None
    times = [facts.compute_s for facts in ranks]
    median = statistics.median_low(times)
    rank = max(range(len(times)), key=times.__getitem__)
    return (rank, times[rank] / median) if median > 0 and times[rank] >= SLOW_RATIO * median else None
