"""`elastic-train status`: whether a run is done, can be resumed, or has nothing left to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_train.checkpoint.commits.listing import survey_store
from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.retention_policies import Best
from elastic_train.cli.output import print_json, print_text
from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.errors import CommitError, ConfigError, Preempted
from elastic_train.tracking.run_folder import RunFolder
from elastic_train.training.result import EARLY_STOPPING

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


def status(run: str, overrides: Sequence[str] = (), *, is_json: bool) -> int:
    """Print where a run stands, and return the exit code that says it; `overrides` are of a configuration."""
    config = _config_of(run, overrides)
    found = status_of(run) if config is None else status_of(config.run.dir, config)
    if is_json:
        print_json({**asdict(found), "exit_code": found.exit_code})
    else:
        print_text(f"{found.state}: {found.why}")
    return found.exit_code


def status_of(run: str, config: Config | None = None) -> Status:
    """Find out where a run stands, of a configuration also whether it goes further than the run did.

    Raises ConfigError if there is none.
    """
    store = open_run(run, may_be_new=config is not None)
    rows = survey_store(store, Best.parse("min loss")).rows
    head = next((row.record for row in rows if "head" in row.marks), None)
    result = None if "://" in run else RunFolder(Path(run)).result()
    done = result.get("step") if result is not None and result.get("status") == "done" else None
    is_longer = config is not None and result is not None and _goes_further(config, result)
    if isinstance(done, int) and (head is None or done >= head.step) and not is_longer:
        return Status("done", done, f"all of its {done} steps are trained")
    if head is not None:
        return Status("resumable", head.step, f"training would go on from step {head.step} ({head.key})")
    if rows:
        return Status("failed", None, "; ".join(f"{row.key}: {row.wrong}" for row in rows))
    return Status("resumable", None, f"no commits in {store.url} yet: training would begin with the first step")


def _goes_further(config: Config, result: Mapping[str, object]) -> bool:
    """Say whether a configuration has more steps, or epochs, than the run that is done."""
    if result.get("ended_by") == EARLY_STOPPING:
        return False
    if config.max_steps is not None:
        step = result.get("step")
        return isinstance(step, int) and step < config.max_steps
    epochs = result.get("epochs")
    return isinstance(epochs, int) and epochs < config.epochs


def _config_of(run: str, overrides: Sequence[str]) -> Config | None:
    """Return the configuration that this is, with its overrides; None of a run's folder or URL."""
    if Path(run).is_file():
        return sources.load(Path(run), environ=os.environ, arguments=overrides)
    if overrides:
        raise ConfigError(f"{' '.join(overrides)}: keys are for a configuration, and {run} is not one")
    return None
