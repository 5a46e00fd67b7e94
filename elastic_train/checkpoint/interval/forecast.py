"""Forecast the cost of save intervals, for given costs and fault rates. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.checkpoint.interval.young_daly import (
    Choice,
    SaveCost,
    choose,
    optimum,
    waste,
)

INTERVALS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 4 * 3600.0, 12 * 3600.0)


@dataclass(frozen=True, slots=True)
class Outlook:
    """One interval: shares of time without progress, and the worst cost of one fault in seconds."""

    interval_s: float
    waste: float
    stall_share: float
    fault_share: float
    rpo_s: float
    is_allowed: bool


def forecast(cost: SaveCost, mtbf_s: float, rpo_s: float, restart_s: float) -> tuple[Choice, list[Outlook]]:
    """Return the chosen interval, and outlooks of it, of the optimum, and of common ones."""
    choice = choose(cost, mtbf_s, rpo_s, restart_s)
    usual = {interval_s for interval_s in INTERVALS_S if interval_s > cost.publish_s}
    intervals = sorted(usual | {choice.interval_s, max(optimum(cost.stall_s, mtbf_s), choice.interval_s)})
    return choice, [_outlook(interval_s, cost, mtbf_s, rpo_s, restart_s) for interval_s in intervals]


def _outlook(interval_s: float, cost: SaveCost, mtbf_s: float, rpo_s: float, restart_s: float) -> Outlook:
    share = waste(interval_s, cost, mtbf_s, restart_s)
    stalls = (1 - share) * cost.stall_s / interval_s
    worst_s = interval_s + cost.publish_s
    return Outlook(interval_s, share, stalls, share - stalls, worst_s, worst_s <= rpo_s * (1 + 1e-9))
