"""Worlds in a row in which a process applied no step, those that did not form included: at some point it gives up.

A process that lives on counts for itself, since a world that does not form leaves no history. A network that is broken
heals again, so the count alone decides nothing: it also has to last. What ends processes is counted from the histories
(`elastic_train.world.no_progress`), as far as one folder has them.

A step that others take along as they end, since they alone held a part of the state, is none: worlds that begin at one
commit again and again have to get beyond all of them, or to a commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.errors import NoProgressError


class Standstill:
    """Counts worlds without a step; `reached` says which step this process has applied last."""

    def __init__(self, most: int | None, least_s: float, reached: Callable[[], int]) -> None:
        self._most, self._least_s, self._reached = most, least_s, reached
        self._furthest, self._committed, self._num, self._since_s = reached(), 0, 0, 0.0

    def note(self, why: str, committed: int = 0) -> None:
        """Count a world that has ended, or has not formed; one that got further begins the count again.

        That is further than any before, by its steps or by the newest commit, whose step is `committed`.

        Raises NoProgressError once there were `most` in a row, and `least_s` seconds have passed since the first.
        """
        step, now = self._reached(), time.monotonic()
        if step > self._furthest or committed > self._committed:
            self._furthest, self._committed = max(step, self._furthest), max(committed, self._committed)
            self._num = 0
            return
        if self._num == 0:
            self._since_s = now
        self._num += 1
        lasted_s = now - self._since_s
        if self._most is None or self._num < self._most or lasted_s < self._least_s:
            return
        raise NoProgressError(
            f"{self._num} worlds in a row, for {lasted_s:.0f} s, did not get beyond step {self._furthest}; "
            f"the last one: {why}. "
            "Check that every node reaches the others on all ports, and the nodes' logs for what ended their "
            "processes; give_up_after_worlds and give_up_after_s set how long to try"
        )
