"""Draw the failures of a job over days, and return its goodput and the cost of each failure.

Failures are exponential, as in `young_daly.waste`, whose closed form a test compares with these draws. A failure during
a recovery starts the recovery again. A failed node returns after its repair; until then a standby replaces it, or, when
there is none, its replica group is idle. Training stops once more when a node takes the place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from elastic_train.checkpoint.saving.cadence import SaveCost

DAY_S = 86400.0
Seconds = Callable[[Random], float]
FREE = SaveCost(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replica groups of a job, its standby nodes, the mean repair of a node, and the mean time between failures."""

    mtbf_s: float
    groups: int = 1
    standby: int = 1
    repair_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds until ranks compute again, and seconds that training stops again when a node takes the place.

    With `lost_step_s`, a failure loses a part of a step of this length; without, all steps since the newest commit. A
    save of `cost` starts every `every_s` seconds of training; infinite if none is made.
    """

    down: Seconds
    join: Seconds = lambda _: 0.0
    lost_step_s: float | None = None
    cost: SaveCost = FREE
    every_s: float = float("inf")

    @property
    def training_share(self) -> float:
        """Share of the time without failures that is not a save's stall."""
        return 1.0 if self.every_s == float("inf") else self.every_s / (self.every_s + self.cost.stall_s)

    def lost_s(self, up_s: float, chance: Random) -> float:
        """Return the seconds of work that a failure after `up_s` seconds costs."""
        if self.lost_step_s is not None:
            return min(up_s, chance.uniform(0.0, self.lost_step_s))
        if up_s < self.every_s + self.cost.publish_s:
            return up_s * self.training_share
        num_saves = (up_s - self.every_s - self.cost.publish_s) // (self.every_s + self.cost.stall_s) + 1
        return max(0.0, up_s * self.training_share - num_saves * self.every_s)


@dataclass(frozen=True, slots=True)
class Life:
    """The share of time in new steps, and each failure's seconds until its lost work was repeated."""

    goodput: float
    recovery_s: list[float]


def live(recovery: Recovery, fleet: Fleet, days: float, chance: Random) -> Life:
    """Draw a job of so many days."""
    now, end, useful_s = 0.0, days * DAY_S, 0.0
    back_at, costs = list[float](), list[float]()
    while now < end:
        up_s = chance.expovariate(1 / fleet.mtbf_s)
        until = min(now + up_s, end)
        back_at = sorted(at for at in back_at if at > now)
        idle = back_at[: max(0, len(back_at) - fleet.standby)]
        useful_s += (until - now) * recovery.training_share - sum(min(at, until) - now for at in idle) / fleet.groups
        if until == end:
            break
        now = until
        back_at.append(now + chance.expovariate(1 / fleet.repair_s) if fleet.repair_s else now)
        lost_s, failed_at = recovery.lost_s(up_s, chance), now
        while (again_s := chance.expovariate(1 / fleet.mtbf_s)) < (down_s := recovery.down(chance)):
            now += again_s
        now += down_s
        costs.append(now - failed_at + lost_s)
        useful_s -= lost_s
        now += recovery.join(chance)
    return Life(useful_s / end, costs)
