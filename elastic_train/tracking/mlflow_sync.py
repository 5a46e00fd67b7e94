"""Sends afterwards what MLflow does not have of a run: it was down, slow or unknown while the run trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from elastic_train.errors import ConfigError, StorageError
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
    locked_by,
    read_link,
    reason_of,
    resolve,
    tracker_errors,
)


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
        with (run_dir / LOCK).open("w") as lock:
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
