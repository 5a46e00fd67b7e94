"""Measure the faults of a run from its folder."""

from __future__ import annotations

from pathlib import Path

from elastic_train.checkpoint.interval.cadence import Faults
from elastic_train.tracking.history_files import summarised


def faults_before(run_dir: str | Path, before_term: int) -> Faults:
    """Return how many terms before `before_term` lost applied steps, and the training time of all of them.

    Reads a summary, and both ends of rank 0's histories of the newest terms.
    """
    found = summarised(run_dir, before_term)
    return Faults(found.num_faults, found.trained_s)
