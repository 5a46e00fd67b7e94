"""Times of ranks by phase over many steps: sums of their rows, and the summary in a run's result.

A window is of one world, so its rows are of the same ranks; a summary has means over ranks, and may span worlds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from elastic_train.insight.phases import PHASES, RankFacts

Summary = Mapping[str, object]


class PhaseWindow:
    """Sums of the rows of one world's ranks."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums = np.zeros((0, len(RankFacts._fields)))

    def add(self, ranks: Sequence[RankFacts]) -> None:
        rows = np.array(ranks)
        self._sums = rows if self.num_steps == 0 else self._sums + rows
        self.num_steps += 1

    def by_rank(self) -> list[RankFacts]:
        """Return each rank's totals, with the mean of round trips."""
        sums = self._sums.copy()
        sums[:, -1] /= max(1, self.num_steps)
        return [RankFacts._make(row) for row in sums.tolist()]

    def mean(self) -> dict[str, float]:
        """Return the mean of every phase over ranks and steps, in seconds, and of hidden exchange."""
        if self.num_steps == 0:
            return {}
        means = (self._sums.mean(axis=0) / self.num_steps).tolist()
        return dict(zip((*PHASES, "hidden"), means, strict=False))


class PhaseTotals:
    """Totals of an average rank over all steps that a process has seen."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums = np.zeros(len(RankFacts._fields))

    def add(self, window: PhaseWindow) -> None:
        if window.num_steps:
            self._sums += np.array(window.by_rank()).mean(axis=0)
            self.num_steps += window.num_steps

    def summary(self) -> Summary | None:
        """Return the summary for result.json; None before the first step.

        Shares are of a step's time, and add up to 1 over phases; `bytes` are given to collectives per step.
        """
        if self.num_steps == 0:
            return None
        per_step = dict(zip(RankFacts._fields, (self._sums / self.num_steps).tolist(), strict=True))
        total_s = sum(per_step[f"{phase}_s"] for phase in PHASES)
        return {
            "steps": self.num_steps,
            "step_s": total_s,
            "seconds": {phase: per_step[f"{phase}_s"] for phase in PHASES},
            "share": {phase: per_step[f"{phase}_s"] / total_s if total_s else 0.0 for phase in PHASES},
            "hidden_s": per_step["hidden_s"],
            "bytes": round(per_step["exchanged_bytes"]),
        }
