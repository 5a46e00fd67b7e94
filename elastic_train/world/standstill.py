"""Give up after too many consecutive worlds in which a process applied no step, including those that did not form.

A surviving process counts for itself, because a world that does not form leaves no history. Networks recover, so the
count must also last for some time. Faults that kill processes are counted from the histories
(`elastic_train.world.no_progress`), as far as one folder has them.

A step that is lost again with the only holders of a part of the state does not count: worlds that keep restarting from
one commit must get beyond all earlier ones, or to a new commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.errors import NoProgressError


class Standstill:
    """Counts worlds without a step; `reached` returns this process's last applied step."""

    def __init__(self, most: int | None, least_s: float, reached: Callable[[], int]) -> None:
        self._most, self._least_s, self._reached = most, least_s, reached
        self._furthest, self._committed, self._num, self._since_s = reached(), 0, 0, 0.0

    def note(self, why: str, committed: int = 0) -> None:
        """Count a world that has ended, or has not formed; progress resets the count.

        Progress means more than ever before, in steps or in the step of the newest commit, `committed`. Raises
        NoProgressError after `most` worlds in a row if `least_s` seconds have passed since the first.
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
            "processes; give_up_after sets how long to try"
        )
