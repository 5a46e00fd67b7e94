"""Send a run's metrics to a tracker, each value once, and its description to MLflow.

`Destination` is the protocol of trackers: MLflow, TensorBoard's files and Weights & Biases.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from elastic_train.config import yaml12
from elastic_train.config.credentials import without_password
from elastic_train.errors import ConfigError
from elastic_train.system.extras import version_of
from elastic_train.system.wording import without_passwords
from elastic_train.tracking.metric_log import Settled, Values
from elastic_train.tracking.mlflow_run import (
    ENDED_TAG,
    GIT_TAG,
    TORCH_TAG,
    VERSION_TAG,
    WEIGHTS_TAG,
    MlflowRun,
    metric_name,
)
from elastic_train.tracking.run_folder import RunFolder

SEND_EVERY_S = 1.0
LOCK = "mlflow.lock"
_GIT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters of a job's run in MLflow."""

    run_dir: Path
    config: Mapping[str, object]
    mlflow_uri: str
    experiment: str
    run_name: str

    def config_text(self) -> str:
        """Return the configuration as YAML, without passwords in URLs."""
        return without_passwords(yaml12.write(self.config))


class Delivery:
    """Sends a job's lines to its run in MLflow, each value once; after a failure, `open` again and continue."""

    name, lock = "MLflow", LOCK
    remedy = "`elastic-train sync RUN` sends the rest"

    def __init__(self, job: Job, *, goes_on: bool) -> None:
        self._job, self._goes_on = job, goes_on
        self._run: MlflowRun | None = None
        self._undone: list[Callable[[], object]] | None = None
        self._marks: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._tags_set: dict[str, str] = {}

    def known_id(self) -> str | None:
        """Return the run's id, if the folder has one for this tracker."""
        link = RunFolder(self._job.run_dir).link()
        return link.run_id if link and link.mlflow_uri == without_password(self._job.mlflow_uri) else None

    def open(self) -> str:
        """Find or create the run, and read what it has, as a call that timed out may have arrived; return its id."""
        self._run = MlflowRun(self._job.run_dir, self._job.mlflow_uri, self._job.experiment, self._job.run_name)
        self._marks = self._run.marks()
        return self._run.run_id

    def describe(self) -> list[Exception]:
        """Record the configuration and the status RUNNING; return the failures, which the next call retries."""
        if self._undone is None:
            run = self._opened()
            reopening = [run.reopen] if self._goes_on else []
            self._undone = [*reopening, *run.description(self._job.config, self._job.config_text())]
        failed = {part: errors[0] for part in self._undone if (errors := attempt(part))}
        self._undone = list(failed)
        return list(failed.values())

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Send the values that MLflow lacks; return their number. Tags are kept for `tag`."""
        missing, marks = lacking(lines, self._marks, metric_name)
        self._opened().append(missing)
        self._marks, self._tags = marks, self._tags | tags_of(lines)
        return count_values(missing)

    def tag(self) -> None:
        """Set the newest tags unless they are set already."""
        if self._tags != self._tags_set:
            self._opened().tag(self._tags)
            self._tags_set = self._tags

    def end(self, status: str) -> None:
        """Record the run's final status with its reason, and the weights' hash unless it failed."""
        self._opened().end(status, {} if status == "FAILED" else _tags_of_result(self._job.run_dir))

    def _opened(self) -> MlflowRun:
        assert self._run is not None, "a run is opened before it is sent to"
        return self._run


def attempt(part: Callable[[], object]) -> list[Exception]:
    """Do one of several independent things; return its error in a list, else an empty list."""
    try:
        part()
    except Exception as error:  # noqa: BLE001 - artifact stores raise what their libraries raise; the caller reports it
        return [error]
    return []


def lacking(
    lines: Iterable[Values | Settled], marks: Mapping[str, int], name_of: Callable[[str], str] = str
) -> tuple[list[Values], dict[str, int]]:
    """Return the values above a tracker's furthest step of each metric, its `marks`, and the marks once it has them."""
    missing, furthest = list[Values](), dict(marks)
    for line in lines:
        if isinstance(line, Values):
            by_name = {name: x for name, x in line.by_name.items() if line.step > furthest.get(name_of(name), -1)}
            furthest |= {name_of(name): line.step for name in by_name}
            missing += [replace(line, by_name=by_name)] if by_name else []
    return missing, furthest


def tags_of(lines: Iterable[Values | Settled]) -> dict[str, str]:
    return {tag: text for line in lines if isinstance(line, Settled) for tag, text in line.tags.items()}


def count_values(lines: Iterable[Values | Settled]) -> int:
    return sum(len(line.by_name) for line in lines if isinstance(line, Values))


def code_tags() -> dict[str, str]:
    """Return tags of the running code: versions of this package and torch, git commit of the working folder."""
    tags = {}
    for tag, package in ((VERSION_TAG, "elastic-train"), (TORCH_TAG, "torch")):
        if (version := version_of(package)) is not None:  # None in a checkout that is not installed
            tags[tag] = version
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no answer from it
        command = ["git", "rev-parse", "--verify", "HEAD"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
        tags[GIT_TAG] = asked.stdout.strip()
    return tags


def _tags_of_result(run_dir: Path) -> dict[str, str]:
    """Return tags from a run's result: weights' hash and reason for the end."""
    try:
        result = RunFolder(run_dir).result() or {}
    except ConfigError:
        return {}  # a damaged result costs the tags, not the run's end
    found = {WEIGHTS_TAG: result.get("weights_sha256"), ENDED_TAG: result.get("ended_by")}
    return {tag: str(value) for tag, value in found.items() if value is not None}


class LostValuesError(OSError):
    """Raised if sent values have not arrived: `open` finds out which, and all are offered again."""


class Destination(Protocol):
    """Takes a run's settled lines, each once, from one thread; after any failed call `open` is called again.

    `name` is used in messages, `lock` is the file in the run's folder that the sender holds, `remedy` says what to do
    about values that it lacks.
    """

    name: str
    lock: str
    remedy: str

    def known_id(self) -> str | None:
        """Return the run's id there, if the folder has it."""

    def open(self) -> str:
        """Find or create the run, read what it has, and return its id."""

    def describe(self) -> list[Exception]:
        """Record the configuration; return the failures, which the next call retries."""

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Send the values that it lacks; return their number. Tags are kept for `tag`."""

    def tag(self) -> None:
        """Set the newest tags."""

    def end(self, status: str) -> None:
        """Record how the run ended."""
