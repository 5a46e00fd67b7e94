"""Report a rank's memory: after a world's first step, periodically, and at its end.

Every process reports its own memory in its own history, without communication.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from elastic_train.insight.memory import MemoryFacts
from elastic_train.insight.page import Facts
from elastic_train.parallel.gradient_sum import OfPart
from elastic_train.system.wording import first_line
from elastic_train.tracking.history import History
from elastic_train.training.memory.meter import Meter

log = logging.getLogger(__name__)


class MemoryWatch:
    """Measures a rank's memory in one world, every `every_steps` steps; `held` yields its tensors."""

    def __init__(
        self,
        meter: Meter,
        held: Callable[[], Iterable[OfPart]],
        history: History,
        every_steps: int,
        page: Facts | None = None,
    ) -> None:
        self.held, self.meter = held, meter
        self._history, self._every_steps, self._page = history, every_steps, page
        self._num_steps = 0
        self._unsaid: int | None = None
        self._has_failed = False

    def step(self, step: int) -> None:
        self._unsaid = step
        if self._num_steps % self._every_steps == 0:
            self.say()
        self._num_steps += 1

    def say(self) -> None:
        """Report the memory if steps were applied since the last report."""
        step, self._unsaid = self._unsaid, None
        if step is None or self._has_failed:
            return
        try:
            facts = self.look()
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            self._has_failed = True
            log.warning("this rank's memory is not looked at in this world any longer: %s", first_line(error))
            return
        self._history.memory(step=step, facts=facts.as_fields())
        if self._page is not None:
            self._page.memory = facts

    def look(self) -> MemoryFacts:
        return self.meter.measure(self.held())
