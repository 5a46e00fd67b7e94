"""Tracking that training never waits for: values go to a local file, and a thread sends the file's lines to MLflow.

The local file is the truth; MLflow may be down, slow or gone. The thread sends lines in order and skips what is at or
below the furthest step that MLflow has of the metric, so a value is there once after restarts, rollbacks and failed
calls. A thread whose run has a newer term stops: the newer one sends in its stead. `sync` does the same afterwards.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from elastic_train.errors import ConfigError, StorageError
from elastic_train.metrics import (
    End,
    MetricsReader,
    MetricsWriter,
    Values,
    metrics_path,
    read_metrics,
    recorded_end,
    terms,
)
from elastic_train.mlflow_run import MlflowRun, bound_requests, locked_by, read_link, resolve, without_password

log = logging.getLogger(__name__)

STATUSES = ("FINISHED", "FAILED", "KILLED")
FLUSH_TIMEOUT_S = {"FINISHED": 20.0, "FAILED": 20.0, "KILLED": 5.0}
SEND_EVERY_S = 1.0
MAX_FAILURES_IN_A_ROW = 500
MAX_FAILURES_AT_END = 3
_LONGEST_PAUSE_S = 60.0
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
    """Sends lines to the job's run in MLflow, each value once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run: MlflowRun | None = None
        self._marks: dict[str, int] = {}

    def open(self) -> str:
        """Find or make the run, describe it, and return its id."""
        run = MlflowRun(self._job.run_dir, self._job.mlflow_uri, self._job.experiment, self._job.run_name)
        run.describe(self._job.config, self._job.config_text())
        self._run = run
        return run.run_id

    def reopen(self) -> None:
        """Set the run RUNNING."""
        self._opened().reopen()

    def send(self, lines: Sequence[Values]) -> int:
        """Send what MLflow does not have, and return how many values that was.

        After a failure MLflow is asked again what it has: a call that timed out may have arrived.
        """
        new, ahead = self._select(lines)
        if new:
            run, self._marks, known = self._opened(), {}, self._marks
            run.append(new)
            self._marks = known | ahead
        return sum(len(line.by_name) for line in new)

    def end(self, status: str) -> None:
        """Set how the run ended."""
        self._opened().end(status, None if status == "FAILED" else _weights_sha256(self._job.run_dir))

    def _select(self, lines: Sequence[Values]) -> tuple[list[Values], dict[str, int]]:
        marks: dict[str, int] = {}
        new = []
        for line in lines:
            fresh = {name: value for name, value in line.by_name.items() if line.step > self._mark(name, marks)}
            if fresh:
                new.append(Values(line.t, line.step, fresh))
                marks |= dict.fromkeys(fresh, line.step)
        return new, marks

    def _mark(self, name: str, ahead: Mapping[str, int]) -> int:
        if name in ahead:
            return ahead[name]
        if name not in self._marks:
            self._marks[name] = self._opened().mark(name)
        return self._marks[name]

    def _opened(self) -> MlflowRun:
        assert self._run is not None, "a run is opened before it is sent to"
        return self._run


class Tracker:
    """One term's values: `log` writes them down, a daemon thread sends them."""

    def __init__(self, writer: MetricsWriter, term: int, job: Job | None) -> None:
        self._writer: MetricsWriter | None = writer
        self._lost = 0
        self._sending = None if job is None else _Sending(job, term)

    @staticmethod
    def start(
        *,
        run_dir: Path,
        term: int,
        config: Mapping[str, object],
        mlflow_uri: str | None,
        experiment: str,
        run_name: str,
    ) -> Tracker:
        """Begin a term's file, and the thread that sends it if there is a tracker; raises StorageError."""
        try:
            writer = MetricsWriter(run_dir, term)
        except OSError as error:
            raise StorageError(f"metrics cannot be written: {error}") from error
        if mlflow_uri is None:
            return Tracker(writer, term, None)
        bound_requests()
        return Tracker(writer, term, Job(run_dir, config, resolve(mlflow_uri), experiment, run_name))

    @property
    def num_failures(self) -> int:
        """How often sending has failed."""
        return 0 if self._sending is None else self._sending.num_failures

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write down a step's values; a disk that is full costs values, never the training."""
        if self._writer is None:
            return
        try:
            self._writer.values(step, values)
        except OSError as error:
            self._lose(error)

    def wait_run_id(self, timeout_s: float) -> str | None:
        """Return the run's id in MLflow once it is known; None if the tracker is down or has not answered in time."""
        return None if self._sending is None else self._sending.wait_run_id(timeout_s)

    def finish(self, status: str) -> None:
        """Write down how the term ended, and give the thread a bounded time to send the rest and say so."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {', '.join(STATUSES)}")
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.end(status)
        except OSError as error:
            self._lose(error)
        if self._sending is not None and not self._sending.finish(status, FLUSH_TIMEOUT_S[status]):
            log.warning("MLflow does not have all metrics yet; `elastic-train sync RUN` sends the rest")

    def _lose(self, error: OSError) -> None:
        self._lost += 1
        if self._lost == 1:
            log.warning("metrics are being lost, training goes on: %s", error)


class _Sending:
    """The thread: opens the run, sends older terms' lines and then its own as they come, and ends the run."""

    def __init__(self, job: Job, term: int) -> None:
        self.num_failures = 0
        self._job, self._term = job, term
        link = read_link(job.run_dir)
        self._run_id = link.run_id if link and link.mlflow_uri == without_password(job.mlflow_uri) else None
        self._has_answer = threading.Event()
        self._is_ending = threading.Event()
        self._is_through = threading.Event()
        self._status: str | None = None
        self._is_complete = False
        threading.Thread(target=self._supervise, name="elastic-train-mlflow", daemon=True).start()

    def wait_run_id(self, timeout_s: float) -> str | None:
        if self._run_id is None:
            self._has_answer.wait(timeout_s)
        return self._run_id

    def finish(self, status: str, timeout_s: float) -> bool:
        self._status = status
        self._is_ending.set()
        return self._is_through.wait(timeout_s) and self._is_complete

    def _supervise(self) -> None:
        delivery, backlog = Delivery(self._job), _Backlog(self._job.run_dir, self._term)
        in_a_row = 0
        try:
            with (self._job.run_dir / _LOCK).open("w") as lock:
                locked_by(lock.fileno(), 10 * SEND_EVERY_S)  # held by a `sync`, or by an older term that is stopped
                while in_a_row < (MAX_FAILURES_AT_END if self._is_ending.is_set() else MAX_FAILURES_IN_A_ROW):
                    try:
                        self._deliver(delivery, backlog)
                        return
                    except Exception as error:  # noqa: BLE001 - the supervisor: no tracker's failure may end training
                        in_a_row = 1 if backlog.has_moved() else in_a_row + 1
                        self._show(error)
                    self._is_ending.wait(min(_LONGEST_PAUSE_S, SEND_EVERY_S * 2 ** min(in_a_row, 10)))
        except OSError as error:
            self._show(error)
        finally:
            self._has_answer.set()
            self._is_through.set()

    def _deliver(self, delivery: Delivery, backlog: _Backlog) -> None:
        self._run_id = delivery.open()
        self._has_answer.set()
        if not self._is_superseded():
            delivery.reopen()
        while not self._is_superseded():
            is_ending = self._is_ending.is_set()  # read first: what was logged before it was set is in the file
            while lines := backlog.next():
                delivery.send(lines)
                backlog.sent()
            if is_ending:
                assert self._status is not None, "the status is set before the thread is told to end"
                delivery.end(self._status)
                break
            self._is_ending.wait(SEND_EVERY_S)
        self._is_complete = True

    def _is_superseded(self) -> bool:
        return terms(self._job.run_dir)[-1] > self._term

    def _show(self, error: Exception) -> None:
        self.num_failures += 1
        self._has_answer.set()
        if self.num_failures == 1:
            reason = str(error).partition("\n")[0][:300]
            log.warning("MLflow cannot be reached, training goes on with local metrics: %s", reason)


class _Backlog:
    """The lines of all terms up to this one, piece by piece; a piece is given again until it was sent."""

    def __init__(self, run_dir: Path, term: int) -> None:
        older = [older for older in terms(run_dir) if older < term]
        self._readers = [MetricsReader(metrics_path(run_dir, number)) for number in (*older, term)]
        self._piece: list[Values] = []
        self._has_moved = False

    def next(self) -> list[Values]:
        while not self._piece:
            lines = self._readers[0].read()
            self._piece = [line for line in lines if isinstance(line, Values)]
            if not lines and len(self._readers) == 1:
                break
            if not lines:
                self._readers.pop(0)
        return self._piece

    def sent(self) -> None:
        self._piece, self._has_moved = [], True

    def has_moved(self) -> bool:
        """Return whether anything was sent since the last question."""
        moved, self._has_moved = self._has_moved, False
        return moved


@dataclass(frozen=True, slots=True)
class Synced:
    """What a repair has sent; `status` is None for a run whose end nobody wrote down."""

    run_id: str
    mlflow_uri: str
    num_sent: int
    num_present: int
    status: str | None

    def __str__(self) -> str:
        sent = f"sent {self.num_sent} values" if self.num_sent else "nothing was missing"
        end = f"it is {self.status}" if self.status else "it stays RUNNING: no end was written down"
        return f"MLflow run {self.run_id}: {sent}, {self.num_present} were there already; {end}"


def sync(run_dir: Path, mlflow_uri: str | None = None) -> Synced:
    """Send what MLflow does not have of a run's metrics, and how it ended.

    Raises ConfigError if the folder is no run or no tracker is known, StorageError if the tracker cannot be reached or
    a trainer is sending.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    job = _job_of(run_dir, mlflow_uri)
    bound_requests()
    with (run_dir / _LOCK).open("w") as lock:
        if not locked_by(lock.fileno(), 2 * SEND_EVERY_S):
            raise StorageError(f"{run_dir}: a trainer is running and sends its metrics itself; sync when it has ended")
        try:
            return _repair(job)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise StorageError(f"{job.mlflow_uri}: MLflow cannot be reached, sync again later: {reason}") from error


def _repair(job: Job) -> Synced:
    delivery = Delivery(job)
    run_id = delivery.open()
    num_sent = num_values = 0
    piece: list[Values] = []
    for line in read_metrics(job.run_dir):
        if isinstance(line, End):
            continue
        piece.append(line)
        num_values += len(line.by_name)
        if len(piece) == 1000:
            num_sent += delivery.send(piece)
            piece = []
    num_sent += delivery.send(piece)
    status = recorded_end(job.run_dir)
    if status is None:
        delivery.reopen()
    else:
        delivery.end(status)
    return Synced(run_id, job.mlflow_uri, num_sent, num_values - num_sent, status)


def _job_of(run_dir: Path, mlflow_uri: str | None) -> Job:
    path = run_dir / "config.yaml"
    if not path.is_file() or not terms(run_dir):
        raise ConfigError(f"{run_dir} is no run's folder: it lacks config.yaml or metrics/; name a run.dir")
    config = yaml.safe_load(path.read_text())
    tracking, run = config.get("tracking") or {}, config.get("run") or {}
    link = read_link(run_dir)
    uri = mlflow_uri or (link.mlflow_uri if link and "***@" not in (link.mlflow_uri or "") else None)
    uri = uri or tracking.get("mlflow_uri")
    if uri is None:
        raise ConfigError(f"{run_dir} was not tracked in MLflow; name a tracker with --mlflow-uri")
    experiment = tracking.get("experiment") or "elastic-train"
    return Job(run_dir, config, resolve(str(uri)), str(experiment), str(run.get("name") or run_dir.resolve().name))


def _weights_sha256(run_dir: Path) -> str | None:
    try:
        return str(json.loads((run_dir / "result.json").read_text())["weights_sha256"])
    except (OSError, ValueError, KeyError):
        return None
