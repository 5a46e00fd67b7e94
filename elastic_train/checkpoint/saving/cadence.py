"""Decide when the next commit is due: by steps, by time, or, with `interval: auto`, so that the least is wasted.

By steps every rank decides alike; by time only rank 0's clock and measurements count.

The interval with the least waste is chosen within a budget for the cost of a fault, without I/O or a clock.

Young (1974) and Daly (2006): at a constant fault rate, frequent saves waste stalls, rare ones recomputed steps. This is
the exact optimum of Daly's model, which sqrt(2 * stall * time between faults) approximates. Saves run in the
background: a commit counts from its publication, so that time adds to a fault's cost; and one save is in flight at a
time, so no interval is shorter.

The fault rate is the mean of its Gamma posterior: a prior at first, then what the run has seen.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from elastic_train.config.checkpoints import CheckpointConfig
from elastic_train.system.wording import duration
from elastic_train.tracking.history_files import summarised

PRIOR_FAULTS, PRIOR_S = 1.0, 86400.0
"""Prior: one fault in a day of training."""
NUM_MEASURED = 9
"""Number of newest saves whose median is the cost of one."""
SHORTEST_S = 1.0
_BISECTIONS = 80


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Cost of a save: seconds that training stalls, and seconds until the commit is published."""

    stall_s: float
    publish_s: float

    def __post_init__(self) -> None:
        assert 0 <= self.stall_s <= self.publish_s, f"{self}: a save stalls no longer than it takes"


def typical(costs: Collection[SaveCost]) -> SaveCost:
    """Return the medians, so that one slow save has no effect."""
    return SaveCost(
        statistics.median(cost.stall_s for cost in costs), statistics.median(cost.publish_s for cost in costs)
    )


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults that cost applied steps, and the training time in which they occurred."""

    num: int
    trained_s: float

    @property
    def mtbf_s(self) -> float:
        return (PRIOR_S + self.trained_s) / (PRIOR_FAULTS + self.num)


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval between the starts of two saves, and its reason."""

    interval_s: float
    reason: str


def choose(cost: SaveCost, mtbf_s: float, rpo_s: float, restart_s: float = 0.0) -> Choice:
    """Return the interval with the least waste among those that keep a fault's cost within `rpo_s` seconds.

    If publishing alone exceeds the budget, saves follow each other without a pause.
    """
    optimal_s = optimum(cost.stall_s, mtbf_s)
    shortest_s = max(SHORTEST_S, cost.publish_s)
    allowed_s = rpo_s - cost.publish_s
    interval_s = max(shortest_s, min(optimal_s, allowed_s))
    facts = (
        f"a save stalls training for {duration(cost.stall_s)} and is published after {duration(cost.publish_s)}, "
        f"a fault is expected every {duration(mtbf_s)}: least is wasted at {duration(optimal_s)}"
    )
    if allowed_s < shortest_s:
        facts += f"; the RPO budget of {duration(rpo_s)} cannot be kept, since publishing takes too long"
    elif allowed_s < optimal_s:
        facts += f", but the RPO budget of {duration(rpo_s)} allows {duration(allowed_s)}"
    elif optimal_s < shortest_s:
        facts += ", but one save is in flight at a time"
    share = waste(interval_s, cost, mtbf_s, restart_s)
    return Choice(interval_s, f"commit every {duration(interval_s)}: {facts}; {share:.2%} of the time is wasted")


def optimum(stall_s: float, mtbf_s: float) -> float:
    """Return the interval with the least waste: the root x = T / mtbf of log(1 - x) + x = -stall / mtbf in [0, 1)."""
    lo, hi = 0.0, 1.0
    for _ in range(_BISECTIONS):
        x = (lo + hi) / 2
        if x < 1 and math.log1p(-x) + x > -stall_s / mtbf_s:
            lo = x
        else:
            hi = x
    return lo * mtbf_s


def waste(interval_s: float, cost: SaveCost, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the share of time without progress: stalls, recomputed steps, restarts (Daly 2006, section 4).

    `restart_s` is the time from a fault to the first recomputed step.
    """
    segment, lost = (interval_s + cost.stall_s) / mtbf_s, (cost.publish_s + restart_s) / mtbf_s
    if segment + lost > 700:
        return 1.0
    return 1 - interval_s / mtbf_s / (math.exp(lost) * math.expm1(segment))


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


def faults_before(run_dir: str | Path, before_term: int) -> Faults:
    """Return how many terms before `before_term` lost applied steps, and the training time of all of them.

    Reads a summary, and both ends of rank 0's histories of the newest terms.
    """
    found = summarised(run_dir, before_term)
    return Faults(found.num_faults, found.trained_s)
