"""`elastic-train status`: whether a run is done, can be resumed, or has nothing left to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from elastic_train.checkpoint.commits.listing import survey_store
from elastic_train.checkpoint.commits.lookup import open_run
from elastic_train.checkpoint.commits.retention_policies import Best
from elastic_train.cli.output import print_json, print_text
from elastic_train.config import sources
from elastic_train.config.schema import Config
from elastic_train.errors import CommitError, ConfigError, Preempted
from elastic_train.runs.lines import read_lines, text, whole
from elastic_train.tracking.history_files import FOLDER
from elastic_train.tracking.run_folder import RunFolder
from elastic_train.training.result import EARLY_STOPPING

TOGETHER_S = 60.0
"""Within which the ranks of a job end that ends with an error: the first of them says why."""
CODES = {"done": 0, "resumable": Preempted.exit_code, "failed": CommitError.exit_code}


@dataclass(frozen=True, slots=True)
class LastError:
    """The error with which a run ended the last time: when (unix seconds), where, after which step, and in words."""

    at: float
    host: str
    rank: int
    step: int
    exit_code: int
    why: str

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        where = f"{at} on {self.host}, rank {self.rank}, after step {self.step}"
        return f"last error (exit code {self.exit_code}, {where}): {self.why}"


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands: `step` is the one that it is done with, or that training would go on from."""

    state: str
    step: int | None
    why: str
    last_error: LastError | None = None
    """Of a run that has not gone on since."""

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
        if found.last_error is not None:
            print_text(f"{found.last_error}")
    return found.exit_code


def status_of(run: str, config: Config | None = None) -> Status:
    """Find out where a run stands, of a configuration also whether it goes further than the run did.

    Raises ConfigError if there is none.
    """
    found = _status_of(run, config)
    is_here = found.state != "done" and "://" not in run
    return replace(found, last_error=_last_error(Path(run) / FOLDER)) if is_here else found


def _last_error(folder: Path) -> LastError | None:
    """Return why the first rank to fail ended the last time; None if training has gone on since, or nobody has failed.

    What was killed left no line.
    """
    lines = [line for path in folder.glob("failed-*.jsonl") for line in read_lines(path)]
    at = sorted((float(str(line["t"])), place) for place, line in enumerate(lines))
    histories = [path.stat().st_mtime for path in folder.glob("[0-9]*-*-*.jsonl")]
    if not at or max(histories, default=0.0) > at[-1][0] + TOGETHER_S:
        return None
    first, place = next(each for each in at if each[0] >= at[-1][0] - TOGETHER_S)
    line = lines[place]
    rank, step, code = (whole(line, key) or 0 for key in ("of_rank", "step", "exit_code"))
    return LastError(first, text(line, "host") or "?", rank, step, code, text(line, "why") or "?")


def _status_of(run: str, config: Config | None) -> Status:
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
