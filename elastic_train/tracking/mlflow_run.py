"""The single MLflow run of a job across all its restarts; every call may be repeated.

<run>/mlflow.json names the job before the run is created, and the run has that name as a tag: the next process finds a
run left by a process killed in between. MLflow itself is asked which steps it has, for all metrics in one call, so no
value is stored twice, whichever process sent it.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from elastic_train.config.credentials import without_password
from elastic_train.system.files import draft_of, locked_by
from elastic_train.tracking.metric_log import Values
from elastic_train.tracking.run_folder import Link, RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

JOB_TAG = "elastic_train.job"
CONFIG_TAG = "elastic_train.config"
WEIGHTS_TAG = "elastic_train.weights_sha256"
ENDED_TAG = "elastic_train.ended_by"
COMMIT_TAG = "elastic_train.commit"
WORLD_TAG = "elastic_train.world"
HOSTS_TAG = "elastic_train.hosts"
IDENTITY_TAG = "elastic_train.config_digest"
VERSION_TAG = "elastic_train.version"
TORCH_TAG = "elastic_train.torch"
GIT_TAG = "mlflow.source.git.commit"  # MLflow's own name, shown on its pages as the run's version
# MLflow's limits: parameters and metrics per call, characters per parameter; tags were 5,000 in older servers.
_PARAMS_A_BATCH, _METRICS_A_BATCH = 100, 1000
_PARAM_CHARS, _TAG_CHARS, _NAME_CHARS = 6000, 5000, 250
_NO_PATH = re.compile(r"^(/|\.\.)|/(?=/|$)|(?<![^/])\.{1,2}(?=/|$)")
_OPEN_TIMEOUT_S = 60.0


def tracker_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that MLflow and its stores raise."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, OSError


def is_no_tracker(error: Exception) -> bool:
    """Return True if an error means that this can never be a tracker, such as a file that is not a database."""
    from sqlalchemy.exc import DatabaseError, OperationalError

    return isinstance(error, DatabaseError) and not isinstance(error, OperationalError)


def bound_requests() -> None:
    """Let MLflow notice within seconds that a tracker is down; user settings are kept."""
    for name, value in (("TIMEOUT", "5"), ("MAX_RETRIES", "1"), ("BACKOFF_FACTOR", "0")):
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def connect(mlflow_uri: str) -> MlflowClient:
    """Return a client; a sqlite database is created and upgraded by one process at a time.

    A new database appears atomically: a process killed during MLflow's migrations would leave a file that no later
    process can repair.
    """
    from mlflow import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    database = sqlite_path(mlflow_uri)
    with _alone(database):
        if database is not None and not database.exists():
            draft = draft_of(database)
            MlflowClient(tracking_uri=f"sqlite:///{draft}")
            draft.replace(database)
        return MlflowClient(tracking_uri=mlflow_uri)


class MlflowRun:
    """The job's run: found or created, described once, appended to, and ended."""

    def __init__(self, run_dir: Path, mlflow_uri: str, experiment: str, run_name: str) -> None:
        self._client = connect(mlflow_uri)
        # A server's folder is not local, whatever its artifact URI looks like.
        self._is_local = sqlite_path(mlflow_uri) is not None
        folder = RunFolder(run_dir)
        link = folder.link() or Link(uuid.uuid4().hex)
        folder.write_link(link)
        run = self._find(link, experiment) or self._make(link, mlflow_uri, experiment, run_name)
        self.run_id: str = run.info.run_id
        folder.write_link(Link(link.job, self.run_id, without_password(mlflow_uri)))

    def description(self, config: Mapping[str, object], text: str) -> list[Callable[[], None]]:
        """Return the independent parts of recording the configuration: parameters, a tag, a file."""
        flat = {metric_name(key): value[:_PARAM_CHARS] for key, value in flatten(config).items()}
        return [lambda: self._set_params(flat), lambda: self.tag({CONFIG_TAG: text}), lambda: self._upload(text)]

    def _set_params(self, params: Mapping[str, str]) -> None:
        """Record new parameters; MLflow does not allow changes."""
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for lo in range(0, len(new), _PARAMS_A_BATCH):
            self._client.log_batch(self.run_id, params=new[lo : lo + _PARAMS_A_BATCH])

    def _upload(self, config_text: str) -> None:
        """Store the configuration as a file if the artifacts are local."""
        folder = self._client.get_run(self.run_id).info.artifact_uri
        if self._is_local and urlsplit(folder).scheme in ("", "file"):
            self._client.log_text(self.run_id, config_text, "config.yaml")

    def marks(self) -> dict[str, int]:
        """Return the furthest step that MLflow has for every metric.

        MLflow stores each metric's latest value and step with the run. `RunData.metrics` omits the step; the public
        `to_proto` does not. The metric history, which grows with the run, is never fetched.
        """
        latest = self._client.get_run(self.run_id).data.to_proto().metrics
        return {metric.key: metric.step for metric in latest}

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags, replacing their earlier values."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(key, text[:_TAG_CHARS]) for key, text in tags.items()])

    def append(self, lines: Sequence[Values]) -> None:
        """Send values in calls of a thousand; all values of a call arrive, or none."""
        metrics = list(_metrics(lines))
        for lo in range(0, len(metrics), _METRICS_A_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[lo : lo + _METRICS_A_BATCH])

    def reopen(self) -> None:
        self._client.update_run(self.run_id, status="RUNNING")

    def end(self, status: str, tags: Mapping[str, str]) -> None:
        self._client.set_terminated(self.run_id, status)
        if tags:
            self.tag(tags)

    def _find(self, link: Link, experiment: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        if link.run_id is not None:
            try:
                run = self._client.get_run(link.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                return run if run.info.lifecycle_stage == "active" else None
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            return None
        runs = self._client.search_runs([found.experiment_id], f"tags.`{JOB_TAG}` = '{link.job}'", max_results=1)
        return runs[0] if runs else None

    def _make(self, link: Link, mlflow_uri: str, experiment: str, run_name: str) -> Run:
        from mlflow.exceptions import MlflowException

        if self._client.get_experiment_by_name(experiment) is None:
            database = sqlite_path(mlflow_uri)
            # MLflow's default is a folder below the current working folder.
            artifacts = None if database is None else (database.parent / "mlruns").as_uri()
            with suppress(MlflowException):  # another job created it first; otherwise the next call raises
                self._client.create_experiment(experiment, artifact_location=artifacts)
        made = self._client.get_experiment_by_name(experiment)
        return self._client.create_run(made.experiment_id, tags={JOB_TAG: link.job}, run_name=run_name)


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return a nested mapping as `section.key` -> text, without passwords in URLs; list sections are numbered."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            flat |= flatten({str(number): each for number, each in enumerate(value)}, f"{prefix}{key}.")
        elif isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = without_password(value) if isinstance(value, str) else str(value)
    return flat


def sqlite_path(mlflow_uri: str) -> Path | None:
    """Return the file of a sqlite database; None for any other tracker."""
    prefix, slashes, path = mlflow_uri.partition(":///")
    return Path(path.partition("?")[0]).absolute() if slashes and prefix.startswith("sqlite") and path else None


def resolve(mlflow_uri: str) -> str:
    """Return the URI with a sqlite file's path made absolute, so that it is valid in every folder."""
    database = sqlite_path(mlflow_uri)
    if database is None:
        return mlflow_uri
    scheme, _, rest = mlflow_uri.partition(":///")
    query = rest.partition("?")
    return f"{scheme}:///{database}{query[1]}{query[2]}"


def _metrics(lines: Sequence[Values]) -> Iterator[Metric]:
    from mlflow.entities import Metric

    for line in lines:
        for name, value in line.by_name.items():
            yield Metric(metric_name(name), value, int(line.t * 1000), line.step)


def metric_name(text: str) -> str:
    """Return a metric's name with what MLflow refuses replaced: characters, and what a path does without (//, /./)."""
    name = re.sub(r"[^\w\-. :/]", "_", text, flags=re.ASCII)[:_NAME_CHARS]
    return _NO_PATH.sub(lambda found: "_" * len(found[0]), name)


@contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """Hold the lock of a sqlite database; continue without it after a minute, as its holder may be frozen."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f"{database.name}.lock").open("w") as file:
        locked_by(file.fileno(), _OPEN_TIMEOUT_S)
        yield
