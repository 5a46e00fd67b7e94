"""Measure a run's saves from its folder: commit size, cost of a save, time between faults."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.reader import records
from elastic_train.checkpoint.interval.young_daly import NUM_MEASURED, Faults, SaveCost, typical
from elastic_train.tracking.history_files import histories, lines_of
from elastic_train.tracking.history_pruning import summarised


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
