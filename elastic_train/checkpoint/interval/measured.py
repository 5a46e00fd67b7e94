"""Measure a run's saves from its folder (commit size, cost, time between faults), and forecast those of intervals."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.reader import records
from elastic_train.checkpoint.interval.cadence import (
    NUM_MEASURED,
    Choice,
    Faults,
    SaveCost,
    choose,
    optimum,
    typical,
    waste,
)
from elastic_train.tracking.history_files import histories, lines_of, summarised


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements, None where unknown; `cost` is the median of the `num_saves` newest saves."""

    state_gb: float | None
    mtbf_s: float | None
    cost: SaveCost | None
    num_saves: int


def measure(run: str) -> Measured:
    """Read a run's newest record and local histories.

    Raise ConfigError if the run does not exist.
    """
    newest = next((record for _, record, _ in records(open_run(run)) if record), None)
    costs = measured_saves(run, NUM_MEASURED)
    faults = faults_before(run, sys.maxsize)
    return Measured(
        state_gb=newest.num_bytes / 1e9 if newest else None,
        mtbf_s=faults.mtbf_s if faults.trained_s else None,
        cost=typical(costs) if costs else None,
        num_saves=len(costs),
    )


def faults_before(run_dir: str | Path, before_term: int) -> Faults:
    """Return how many terms before `before_term` lost applied steps, and the training time of all of them.

    Reads a summary, and both ends of rank 0's histories of the newest terms.
    """
    found = summarised(run_dir, before_term)
    return Faults(found.num_faults, found.trained_s)


def measured_saves(run_dir: str | Path, num: int) -> list[SaveCost]:
    """Return the costs of at most `num` published saves, newest terms first."""
    costs: list[SaveCost] = []
    for path in itertools.chain.from_iterable(map(reversed, reversed(histories(run_dir, rank=0)))):
        commits = [line for line in lines_of(path.read_bytes()) if line["op"] == "commit"]
        times = [(float(str(line["stall_s"])), float(str(line["seconds"]))) for line in reversed(commits)]
        costs += [SaveCost(min(stall_s, publish_s), publish_s) for stall_s, publish_s in times]
        if len(costs) >= num:
            break
    return costs[:num]


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
