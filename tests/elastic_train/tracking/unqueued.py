"""Files of a run that are written by the call itself, for tests of what is in them; and their usual lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_train.core.lineage import Interval
from elastic_train.tracking.background_files import Act, BackgroundFiles
from elastic_train.tracking.delivery import Destination
from elastic_train.tracking.history import History
from elastic_train.tracking.tracker import Tracker


class Unqueued(BackgroundFiles):
    """Does at once what a thread would do soon."""

    def put(self, act: Act) -> None:
        act()


def add_restore(history: History, step: int, steps_lost: int | None = None) -> None:
    """Add a restore after a loss of steps; None for the beginning of a run."""
    resumed: dict[str, object] | None = None if steps_lost is None else {"steps_lost": steps_lost}
    told = {"epoch": 0, "offset": step, "commit": None, "given_by": None, "applied_by": None, "seconds": 0.1}
    history.restore(step=step, **told, skipped=[], resumed=resumed)  # type: ignore[arg-type]


def add_commit(history: History, step: int, seconds: float = 0.2, stall_s: float = 0.01) -> None:
    told = {"key": "k", "digest": "d", "parent": None, "weights_sha256": "w", "created_at": 1.5}
    history.commit(step=step, **told, seconds=seconds, stall_s=stall_s)  # type: ignore[arg-type]


def start_term(folder: Path, term: int, lo: int, others: Sequence[Destination]) -> Tracker:
    """Start the tracker of a term that continues from step `lo`, without MLflow."""
    intervals = (Interval(1, 0, lo),) if lo else ()
    named = {"mlflow_uri": None, "experiment": "e", "run_name": "run"}
    begun = {"run_dir": folder, "term": term, "config": {}, "intervals": intervals, "settled": lo, "others": others}
    return Tracker.start(files=BackgroundFiles(), **named, **begun)  # type: ignore[arg-type]
