"""Tracking that training never waits for: values go to a local file, and a thread sends the file's lines to MLflow.

The local file is the truth; MLflow may be down, slow or gone. MLflow forgets nothing that it was sent, so the thread
sends what is settled: up to the newest commit, and all of a job that is over. It skips what is at or below the furthest
step that MLflow has of the metric. So a value is there once, and is the highest term's, after restarts, rollbacks and
failed calls. A thread whose run has a newer term stops: the newer one sends in its stead. `sync` does the same
afterwards.
"""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import yaml

from elastic_train.errors import ConfigError, StorageError
from elastic_train.metrics import (
    LineageReader,
    MetricsWriter,
    Settled,
    Values,
    read_metrics,
    recorded_end,
    settled_step,
    terms,
)
from elastic_train.mlflow_run import (
    COMMIT_TAG,
    GIT_TAG,
    TORCH_TAG,
    VERSION_TAG,
    MlflowRun,
    bound_requests,
    is_no_tracker,
    locked_by,
    metric_name,
    read_link,
    reason_of,
    resolve,
    tracker_errors,
    without_password,
)

log = logging.getLogger(__name__)

STATUSES = ("FINISHED", "FAILED", "KILLED")
FLUSH_TIMEOUT_S = {"FINISHED": 20.0, "FAILED": 20.0, "KILLED": 5.0}
SEND_EVERY_S = 1.0
MAX_FAILURES_IN_A_ROW = 500
MAX_FAILURES_AWAITED = 3
_LONGEST_PAUSE_S = 60.0
_GIT_TIMEOUT_S = 2.0
_LOCK = "mlflow.lock"


@dataclass(frozen=True, slots=True)
class Job:
    """What the tracker's run is made from."""

    run_dir: Path
    config: Mapping[str, object]
    mlflow_uri: str
    experiment: str
    run_name: str

    def config_text(self) -> str:
        """Return the configuration as the run keeps it, without passwords."""
        return re.sub(r"://[^/@\s]+@", "://***@", yaml.safe_dump(dict(self.config), sort_keys=False))


class Delivery:
    """Brings a job's lines to its run in MLflow, each value once. After a failure it is opened again, and goes on."""

    def __init__(self, job: Job, *, goes_on: bool) -> None:
        self._job, self._goes_on = job, goes_on
        self._run: MlflowRun | None = None
        self._undone: list[Callable[[], object]] | None = None
        self._marks: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._tags_set: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        """Say whether the run was found or made."""
        return self._run is not None

    def open(self) -> str:
        """Find or make the run, and return its id; ask it what it has, for a call that timed out may have arrived."""
        self._run = MlflowRun(self._job.run_dir, self._job.mlflow_uri, self._job.experiment, self._job.run_name)
        self._marks = self._run.marks()
        return self._run.run_id

    def describe(self) -> list[Exception]:
        """Record the configuration, and that the run goes on; return what failed; the next call repeats it."""
        if self._undone is None:
            run = self._opened()
            reopening = [run.reopen] if self._goes_on else []
            self._undone = [*reopening, *run.description(self._job.config, self._job.config_text())]
        failed = {part: errors[0] for part in self._undone if (errors := attempt(part))}
        self._undone = list(failed)
        return list(failed.values())

    def send(self, lines: Sequence[Values | Settled]) -> int:
        """Send the values that MLflow does not have, and return how many they were; remember the tags."""
        missing, marks, tags = [], dict(self._marks), dict(self._tags)
        for line in lines:
            if isinstance(line, Settled):
                tags |= line.tags
                continue
            by_name = {name: x for name, x in line.by_name.items() if line.step > marks.get(metric_name(name), -1)}
            missing.append(replace(line, by_name=by_name))
            marks |= {metric_name(name): line.step for name in by_name}
        self._opened().append(missing)
        self._marks, self._tags = marks, tags
        return count_values(missing)

    def tag(self) -> None:
        """Set the newest tags, if they are not those that were set last."""
        if self._tags != self._tags_set:
            self._opened().tag(self._tags)
            self._tags_set = self._tags

    def end(self, status: str) -> None:
        """Set how the run ended."""
        self._opened().end(status, None if status == "FAILED" else _weights_sha256(self._job.run_dir))

    def _opened(self) -> MlflowRun:
        assert self._run is not None, "a run is opened before it is sent to"
        return self._run


def attempt(part: Callable[[], object]) -> list[Exception]:
    """Do one of several things that do not need each other; return the error if it failed."""
    try:
        part()
    except Exception as error:  # noqa: BLE001 - artifact stores raise what their libraries raise; the caller tells it
        return [error]
    return []


class Tracker:
    """One term's values: `log` writes them down, a daemon thread sends them once they are settled."""

    def __init__(self, writer: MetricsWriter, sending: _Sending | None) -> None:
        self._writer: MetricsWriter | None = writer
        self._sending = sending
        self._num_lost = 0

    @staticmethod
    def start(
        *,
        run_dir: Path,
        term: int,
        config: Mapping[str, object],
        mlflow_uri: str | None,
        experiment: str,
        run_name: str,
        begins_at: int = 0,
        settled: int = 0,
        tags: Mapping[str, str] | None = None,
    ) -> Tracker:
        """Begin a term's file, and the thread that sends it if there is a tracker; raises StorageError.

        The term goes on from the applied step `begins_at`, of which `settled` are in a commit; `tags` are what else is
        known of it.
        """
        try:
            writer = MetricsWriter(run_dir, term)
        except OSError as error:
            raise StorageError(f"metrics cannot be written: {error}") from error
        sending = None
        if mlflow_uri is not None:
            bound_requests()
            sending = _Sending(Job(run_dir, config, resolve(mlflow_uri), experiment, run_name), term)
        tracker = Tracker(writer, sending)
        tracker._write(lambda writer: writer.begin(begins_at))
        tracker._settle(settled, code_tags() | dict(tags or {}))
        return tracker

    @property
    def num_failures(self) -> int:
        """How often sending has failed."""
        return 0 if self._sending is None else self._sending.num_failures

    def log(self, step: int, values: Mapping[str, float], is_higher_better: Mapping[str, bool] | None = None) -> None:
        """Write down a step's values; a best is kept of those of which it is known what is better.

        A disk that is full costs values, never the training.
        """
        self._write(lambda writer: writer.values(step, values, is_higher_better or {}))

    def commit(self, step: int, key: str) -> None:
        """Write down that a commit was published: what was logged up to its step is settled, and is sent."""
        self._settle(step, {COMMIT_TAG: key})

    def wait_run_id(self, timeout_s: float) -> str | None:
        """Return the run's id in MLflow; None if the tracker failed a few times from now on, or until the deadline."""
        return None if self._sending is None else self._sending.wait_run_id(timeout_s)

    def finish(self, status: str) -> None:
        """Write down how the term ended, and give the thread a bounded time to send the rest and say so."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {', '.join(STATUSES)}")
        if self._writer is None:
            return
        self._write(lambda writer: writer.end(status))
        self._writer = None
        if self._sending is not None and not self._sending.finish(status, FLUSH_TIMEOUT_S[status]):
            log.warning("MLflow does not know all of this run yet; `elastic-train sync RUN` sends the rest")

    def pause(self) -> None:
        """End the term without an end of the run: another term's tracker goes on."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _settle(self, step: int, tags: Mapping[str, str]) -> None:
        self._write(lambda writer: writer.settled(step, tags))
        if self._sending is not None:
            self._sending.settled = step

    def _write(self, line: Callable[[MetricsWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            line(self._writer)
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                log.warning("metrics are being lost, training goes on: %s; make room on the disk", error)


class _Sending:
    """The thread: opens the run, sends older terms' lines and then its own as they are settled, and ends the run."""

    def __init__(self, job: Job, term: int) -> None:
        self.num_failures = 0
        self.settled: float = 0
        self._job, self._term = job, term
        self._delivery, self._lines = Delivery(job, goes_on=True), LineageReader(job.run_dir, newest=term)
        self._piece: list[Values | Settled] = []
        self._failures_in_a_row = 0
        self._told: set[str] = set()
        link = read_link(job.run_dir)
        self._run_id = link.run_id if link and link.mlflow_uri == without_password(job.mlflow_uri) else None
        self._has_answer = threading.Event()
        self._is_awaited = threading.Event()
        self._num_failures_before = 0
        self._is_through = threading.Event()
        self._status: str | None = None
        self._is_complete = False
        threading.Thread(target=self._supervise, name="elastic-train-mlflow", daemon=True).start()

    def wait_run_id(self, timeout_s: float) -> str | None:
        self._has_answer.clear()
        if self._run_id is None and not self._is_through.is_set():
            self._hurry()
            self._has_answer.wait(timeout_s)
            self._is_awaited.clear()
        return self._run_id

    def finish(self, status: str, timeout_s: float) -> bool:
        if status != "KILLED":  # told to leave, a job goes on later, and computes again what no commit holds
            self.settled = math.inf
        self._status = status
        self._hurry()
        return self._is_through.wait(timeout_s) and self._is_complete

    def _hurry(self) -> None:
        self._num_failures_before = self.num_failures
        self._is_awaited.set()

    def _supervise(self) -> None:
        try:
            with (self._job.run_dir / _LOCK).open("w") as lock:
                locked_by(lock.fileno(), 10 * SEND_EVERY_S)  # held by a `sync`, or by an older term that is stopped
                self._deliver_in_spite_of_failures()
        except OSError as error:
            self._show("cannot be reached", error)
        finally:
            self._is_through.set()
            self._has_answer.set()

    def _deliver_in_spite_of_failures(self) -> None:
        while self._failures_in_a_row < MAX_FAILURES_IN_A_ROW:
            try:
                self._deliver()
                return
            except Exception as error:  # noqa: BLE001 - the supervisor: no tracker's failure may end training
                self._show("cannot be reached", error)
                self._failures_in_a_row += 1
            if self._is_awaited.is_set() and self.num_failures - self._num_failures_before >= MAX_FAILURES_AWAITED:
                self._has_answer.set()
                if self._status is not None:
                    break
            self._pause()
        if self._status is not None and self._delivery.is_open and not self._is_superseded():
            attempt(self._end)  # what cannot be sent does not hide how the run ended

    def _deliver(self) -> None:
        self._run_id = self._delivery.open()
        self._has_answer.set()
        if not self._is_superseded():
            self._describe()
        while not self._is_superseded():
            is_ending = self._status is not None  # read first: what was logged before it was set is in the file
            while piece := self._piece or self._lines.read(self.settled):
                self._piece = piece
                self._delivery.send(piece)
                self._piece, self._failures_in_a_row = [], 0
            self._delivery.tag()
            if is_ending:
                self._is_complete = self._end()
                return
            self._is_awaited.wait(SEND_EVERY_S)
        self._is_complete = True

    def _describe(self) -> bool:
        failed = self._delivery.describe()
        for error in failed:
            self._show("did not take what describes the run", error)
        return not failed

    def _end(self) -> bool:
        assert self._status is not None, "the status is set before the thread is told to end"
        is_described = self._describe()
        self._delivery.end(self._status)
        return is_described

    def _is_superseded(self) -> bool:
        return terms(self._job.run_dir)[-1] > self._term

    def _pause(self) -> None:
        if self._is_awaited.is_set():
            time.sleep(SEND_EVERY_S)
        else:
            self._is_awaited.wait(min(_LONGEST_PAUSE_S, SEND_EVERY_S * 2 ** min(self._failures_in_a_row, 10)))

    def _show(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        if what not in self._told:
            self._told.add(what)
            log.warning("MLflow %s, training goes on with local metrics: %s", what, reason_of(error))


@dataclass(frozen=True, slots=True)
class Synced:
    """What a repair has sent; `status` is None for a run whose end nobody wrote down.

    Of such a run, and of one that was told to leave, the values after its newest commit wait: they will be computed
    again.
    """

    run_id: str
    mlflow_uri: str
    num_sent: int
    num_present: int
    num_waiting: int
    status: str | None

    def __str__(self) -> str:
        sent = f"sent {self.num_sent} values" if self.num_sent else "nothing was missing"
        waiting = f", {self.num_waiting} wait for a commit" if self.num_waiting else ""
        end = f"it is {self.status}" if self.status else "it stays RUNNING: no end was written down"
        return f"MLflow run {self.run_id}: {sent}, {self.num_present} were there already{waiting}; {end}"


def sync(run_dir: Path, mlflow_uri: str | None = None) -> Synced:
    """Send what MLflow does not have of a run's metrics, and how it ended.

    Raises ConfigError if the folder is no run or no tracker is known, StorageError if the tracker cannot be reached or
    a trainer is sending.
    """
    job = _job_of(run_dir, mlflow_uri)
    bound_requests()
    try:
        with (run_dir / _LOCK).open("w") as lock:
            if not locked_by(lock.fileno(), 2 * SEND_EVERY_S):
                raise StorageError(f"{run_dir}: a trainer is running and sends its metrics itself; sync when it ended")
            return _repair(job)
    except tracker_errors() as error:
        if is_no_tracker(error):
            raise ConfigError(
                f"{job.mlflow_uri} is no MLflow database: {reason_of(error)}; name a tracker with --mlflow-uri"
            ) from error
        raise StorageError(f"{job.mlflow_uri}: MLflow cannot be reached, sync later: {reason_of(error)}") from error


def _repair(job: Job) -> Synced:
    end = recorded_end(job.run_dir)
    delivery, lines, settled = Delivery(job, goes_on=end is None), LineageReader(job.run_dir), settled_step(job.run_dir)
    run_id = delivery.open()
    num_sent = num_settled = 0

    def send() -> None:
        nonlocal num_sent, num_settled
        while piece := lines.read(settled):
            num_sent += delivery.send(piece)
            num_settled += count_values(piece)
        delivery.tag()

    failed = [*delivery.describe(), *attempt(send)]
    if end is not None:
        delivery.end(end.status)
    if failed:
        raise StorageError(f"{job.mlflow_uri}: MLflow did not take everything, sync later: {reason_of(failed[0])}")
    num_waiting = count_values(read_metrics(job.run_dir)) - num_settled
    return Synced(run_id, job.mlflow_uri, num_sent, num_settled - num_sent, num_waiting, end.status if end else None)


def count_values(lines: Iterable[Values | Settled]) -> int:
    """Return how many values the lines hold."""
    return sum(len(line.by_name) for line in lines if isinstance(line, Values))


def read_mapping(path: Path, parse: Callable[[str], object]) -> Mapping[str, object]:
    """Read a run's config.yaml or result.json; raises ConfigError for what no run writes."""
    try:
        fields = parse(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}; name the folder of a run") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no keys, it is empty or of another program; name the folder of a run")
    return fields


def _job_of(run_dir: Path, mlflow_uri: str | None) -> Job:
    path = run_dir / "config.yaml"
    if not path.is_file() or not terms(run_dir):
        raise ConfigError(f"{run_dir} is no run's folder: it lacks config.yaml or metrics/; name a run.dir")
    config = read_mapping(path, yaml.safe_load)
    link = read_link(run_dir)
    uri = mlflow_uri or (link.mlflow_uri if link and "***@" not in (link.mlflow_uri or "") else None)
    uri = uri or _text(config, "tracking", "mlflow_uri")
    if uri is None:
        raise ConfigError(f"{run_dir} was not tracked in MLflow; name a tracker with --mlflow-uri")
    experiment = _text(config, "tracking", "experiment") or "elastic-train"
    return Job(run_dir, config, resolve(uri), experiment, _text(config, "run", "name") or run_dir.resolve().name)


def _text(config: Mapping[str, object], section: str, key: str) -> str | None:
    keys = config.get(section)
    value = keys.get(key) if isinstance(keys, dict) else None
    return str(value) if value else None


def code_tags() -> dict[str, str]:
    """Return which code runs: this package's version and torch's, and the commit that the working folder is at."""
    tags = {}
    for tag, package in ((VERSION_TAG, "elastic-train"), (TORCH_TAG, "torch")):
        with suppress(metadata.PackageNotFoundError):  # a checkout that was not installed
            tags[tag] = metadata.version(package)
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no answer from it
        command = ["git", "rev-parse", "--verify", "HEAD"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
        tags[GIT_TAG] = asked.stdout.strip()
    return tags


def _weights_sha256(run_dir: Path) -> str | None:
    try:
        return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
