"""`elastic-train status`: whether a run is done, can be resumed, or has nothing left to resume from."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_train.checkpoint.commits.listing import survey_store
from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.retention_policies import Best
from elastic_train.cli.output import print_json, print_text
from elastic_train.config import sources
from elastic_train.errors import CommitError, Preempted
from elastic_train.tracking.run_folder import RunFolder

CODES = {"done": 0, "resumable": Preempted.exit_code, "failed": CommitError.exit_code}


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands: `step` is the one that it is done with, or that training would go on from."""

    state: str
    step: int | None
    why: str

    @property
    def exit_code(self) -> int:
        return CODES[self.state]


def status(run: str, *, is_json: bool) -> int:
    """Print where a run stands, and return the exit code that says it."""
    found = status_of(_folder_of(run))
    if is_json:
        print_json({**asdict(found), "exit_code": found.exit_code})
    else:
        print_text(f"{found.state}: {found.why}")
    return found.exit_code


def status_of(run: str) -> Status:
    """Find out where a run stands; raises ConfigError if there is none."""
    store = open_run(run)
    rows = survey_store(store, Best.parse("min loss")).rows
    head = next((row.record for row in rows if "head" in row.marks), None)
    result = None if "://" in run else RunFolder(Path(run)).result()
    done = result.get("step") if result is not None and result.get("status") == "done" else None
    if isinstance(done, int) and (head is None or done >= head.step):
        return Status("done", done, f"all of its {done} steps are trained")
    if head is not None:
        return Status("resumable", head.step, f"training would go on from step {head.step} ({head.key})")
    if rows:
        return Status("failed", None, "; ".join(f"{row.key}: {row.wrong}" for row in rows))
    return Status("resumable", None, f"no commits in {store.url} yet: training would begin with the first step")


def _folder_of(run: str) -> str:
    """Return a run's folder or URL as it is, or the folder that a configuration names."""
    if Path(run).is_file():
        return sources.load(Path(run), environ=os.environ, arguments=()).run.dir
    return run
