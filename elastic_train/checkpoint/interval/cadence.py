"""When the next commit is due: by steps, by time, or with `interval: auto` by measured costs of saves and faults.

By steps every rank decides alike; by time only rank 0's clock and measurements count.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from elastic_train.checkpoint.interval.young_daly import (
    NUM_MEASURED,
    Choice,
    Faults,
    SaveCost,
    choose,
    typical,
)
from elastic_train.config.checkpoints import CheckpointConfig

FIRST_S = 60.0
"""The first save comes early, as its cost is unknown."""
_WORTH_REPORTING = 1.25


class Cadence:
    """The save schedule of one process in one world, starting now; `past` are earlier faults.

    `owed_s` is the training time in seconds that no commit contains.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        past: Faults,
        clock: Callable[[], float] = time.monotonic,
        *,
        owed_s: float = 0.0,
    ) -> None:
        self._config = config
        self._is_auto = config.every_steps == "auto"
        self._past, self._clock = past, clock
        self._began_at = clock()
        self._last_at = self._began_at - owed_s
        self._rpo_s = math.inf if config.every_s is None else config.every_s
        self._costs: deque[SaveCost] = deque(maxlen=NUM_MEASURED)
        self._interval_s = min(FIRST_S, self._rpo_s) if self._is_auto else config.every_s
        self._reported_s: float | None = None

    def is_due(self, step: int) -> bool:
        every = self._config.every_steps
        return isinstance(every, int) and step % every == 0

    def is_overdue(self) -> bool:
        return self._interval_s is not None and self._clock() - self._last_at > self._interval_s

    def begin(self) -> None:
        """Record that a save starts now."""
        self._last_at = self._clock()

    def measured(self, stall_s: float, publish_s: float) -> str | None:
        """Learn from a published save; return the reason for a new interval if it changed much."""
        if not self._is_auto:
            return None
        self._costs.append(SaveCost(min(stall_s, publish_s), publish_s))
        choice = self._choose()
        self._interval_s = choice.interval_s
        reported = self._reported_s
        if reported is not None and max(reported / choice.interval_s, choice.interval_s / reported) < _WORTH_REPORTING:
            return None
        self._reported_s = choice.interval_s
        return choice.reason

    def _choose(self) -> Choice:
        faults = Faults(self._past.num, self._past.trained_s + self._clock() - self._began_at)
        return choose(typical(self._costs), faults.mtbf_s, self._rpo_s)
