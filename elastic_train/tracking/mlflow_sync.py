"""Send what MLflow lacks of a run afterwards: because it was down, slow or not configured during training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic_train.config.credentials import is_left_out, without_password
from elastic_train.errors import ConfigError, StorageError
from elastic_train.system.files import locked_by
from elastic_train.system.wording import first_line
from elastic_train.tracking.delivery import (
    LOCK,
    SEND_EVERY_S,
    Delivery,
    Job,
    attempt,
    count_values,
)
from elastic_train.tracking.metric_log import (
    LineageReader,
    read_metrics,
    recorded_end,
    settled_step,
    terms,
)
from elastic_train.tracking.mlflow_run import (
    bound_requests,
    is_no_tracker,
    resolve,
    tracker_errors,
)
from elastic_train.tracking.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Synced:
    """The result of `sync`; `status` is None for a run without a recorded end.

    Values after the newest commit of such a run, or of one that was asked to leave, wait: their steps will be
    recomputed.
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
        end = f"it is {self.status}" if self.status else "it stays RUNNING, because no end was recorded"
        return f"MLflow run {self.run_id}: {sent}, {self.num_present} were already there{waiting}; {end}"


def sync(run_dir: Path, mlflow_uri: str | None = None) -> Synced:
    """Send a run's metrics that MLflow lacks, and how the run ended.

    Raise ConfigError if the folder is not a run's or no tracker is known, StorageError if the tracker cannot be reached
    or a trainer is sending.
    """
    job = _job_of(run_dir, mlflow_uri)
    shown = without_password(job.mlflow_uri)
    bound_requests()
    with (run_dir / LOCK).open("w") as lock:
        if not locked_by(lock.fileno(), 2 * SEND_EVERY_S):
            raise StorageError(f"{run_dir}: a trainer is running and sends its metrics itself; sync after it has ended")
        try:
            return _repair(job)
        except tracker_errors() as error:
            if is_no_tracker(error):
                raise ConfigError(
                    f"{shown} is not an MLflow database: {first_line(error)}; name a tracker with --mlflow-uri"
                ) from error
            raise StorageError(f"{shown}: MLflow cannot be reached; sync later: {first_line(error)}") from error


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
        raise StorageError(
            f"{without_password(job.mlflow_uri)}: MLflow did not take everything; sync later: {first_line(failed[0])}"
        )
    num_waiting = count_values(read_metrics(job.run_dir)) - num_settled
    return Synced(run_id, job.mlflow_uri, num_sent, num_settled - num_sent, num_waiting, end.status if end else None)


def _job_of(run_dir: Path, mlflow_uri: str | None) -> Job:
    folder = RunFolder(run_dir)
    config = folder.config()
    if not terms(run_dir):
        raise ConfigError(f"{run_dir} has no metrics to send; name the run.dir of a run that has trained")
    link = folder.link()
    known = [uri for uri in (mlflow_uri, link and link.mlflow_uri, folder.setting("tracking", "mlflow_uri")) if uri]
    if not known:
        raise ConfigError(f"{run_dir} was not tracked in MLflow; name a tracker with --mlflow-uri")
    uri = next((each for each in known if not is_left_out(each)), None)
    if uri is None:
        raise ConfigError(f"{run_dir} was tracked at {known[0]}: its user and password are not kept, give --mlflow-uri")
    experiment = folder.setting("tracking", "experiment") or "elastic-train"
    return Job(run_dir, config, resolve(uri), experiment, folder.setting("run", "name") or run_dir.resolve().name)
