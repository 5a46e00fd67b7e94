"""When the next commit is due: by steps, by time, or `interval: auto`, by what saves and faults have cost so far.

By steps every rank decides alike. By time rank 0's clock alone decides, and it alone has measured anything.
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
"""Before the first save nothing is known of its cost, so it comes early."""
_WORTH_REPORTING = 1.25


class Cadence:
    """The rule of one process in one world, which begins now; `past` are the faults before it.

    `owed_s` is for how many seconds steps have been applied that no commit contains.
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
        """Whether a commit is due at a step."""
        every = self._config.every_steps
        return isinstance(every, int) and step % every == 0

    def is_overdue(self) -> bool:
        """Whether the time for a commit has come."""
        return self._interval_s is not None and self._clock() - self._last_at > self._interval_s

    def begin(self) -> None:
        """Note that a save begins now."""
        self._last_at = self._clock()

    def measured(self, stall_s: float, publish_s: float) -> str | None:
        """Learn from a save that was published; return the reason for the interval if it changed by much."""
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
