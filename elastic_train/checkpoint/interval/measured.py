"""What a run's folder tells of its saves: how large a commit is, what a save costs, how often a fault costs steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.reader import records
from elastic_train.checkpoint.interval.young_daly import NUM_MEASURED, SaveCost, typical
from elastic_train.tracking.history import faults_before, measured_saves


@dataclass(frozen=True, slots=True)
class Measured:
    """None is what nothing is known of; `cost` is the median of the `num_saves` newest saves."""

    state_gb: float | None
    mtbf_s: float | None
    cost: SaveCost | None
    num_saves: int


def measure(run: str) -> Measured:
    """Read a run's newest record and its histories; those that are kept elsewhere tell nothing.

    Raises ConfigError if there is no such run.
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
