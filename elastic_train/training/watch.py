"""What a world's first rank makes of the rows that all ranks have given with a step: it says them, and decides nothing.

Sums over a window go to the history and the tracker, and those of all the worlds that a process has led to its result.
"""

from __future__ import annotations

from elastic_train.insight.phases import PHASES
from elastic_train.insight.totals import PhaseTotals, PhaseWindow
from elastic_train.tracking.history import History
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.step_sums import StepSums


class Watch:
    """The rows of one world; `totals` are the process's, over all of its worlds."""

    def __init__(self, history: History, tracker: Tracker | None, totals: PhaseTotals, every_steps: int) -> None:
        self.totals = totals
        self._history, self._tracker, self._every_steps = history, tracker, every_steps
        self._window = PhaseWindow()
        self._step = 0

    def step(self, step: int, sums: StepSums) -> None:
        """Take the rows of a step that was applied."""
        self._window.add(sums.ranks)
        self._step = step
        if self._window.num_steps >= self._every_steps:
            self.say()

    def say(self) -> None:
        """Say what the steps since the last time have cost; nothing if there are none."""
        window, self._window = self._window, PhaseWindow()
        if window.num_steps == 0:
            return
        self.totals.add(window)
        self._history.phases(step=self._step, steps=window.num_steps, seconds=window.by_rank())
        if self._tracker is not None:
            means = window.mean()
            self._tracker.log(self._step, {f"time/{phase}_s": means[phase] for phase in (*PHASES, "hidden")})
