"""How two runs differ: configuration, final metrics, and whether their weights have the same bits.

A run is named by its folder, which is read without MLflow, or by its MLflow run id. Keys and values are compared as
MLflow stores them, text by dotted name, so that a folder can be compared with a run whose folder is gone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic_train.errors import ConfigError
from elastic_train.system.wording import first_line
from elastic_train.tracking.metric_log import final_metrics
from elastic_train.tracking.mlflow_run import (
    WEIGHTS_TAG,
    bound_requests,
    connect,
    flatten,
    resolve,
    sqlite_path,
    tracker_errors,
    without_password,
)
from elastic_train.tracking.run_folder import RunFolder

DEFAULT_MLFLOW_URI = "sqlite:///mlflow.db"
_ABSENT = "-"
_BY_GRAINS = 3
"""The first format of commits with the weights' hash of today; results did not always name theirs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one run; `weights_sha256` is None if no result names it.

    `format` is that of the commits by whose rule the hash was made, None where that is not known, as in MLflow.
    """

    name: str
    config: Mapping[str, str]
    metrics: Mapping[str, float]
    weights_sha256: str | None
    format: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side."""

    a: Finding
    b: Finding

    def config(self) -> dict[str, tuple[str | None, str | None]]:
        """Return the keys whose values differ, None where a run lacks the key."""
        keys = sorted({*self.a.config, *self.b.config})
        pairs = {key: (self.a.config.get(key), self.b.config.get(key)) for key in keys}
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    def metrics(self) -> dict[str, tuple[float | None, float | None]]:
        """Return the final values of all metrics, None where a run lacks the metric."""
        names = sorted({*self.a.metrics, *self.b.metrics})
        return {name: (self.a.metrics.get(name), self.b.metrics.get(name)) for name in names}

    def same_weights(self) -> bool | None:
        """Return whether the weights are equal bit for bit; None if a run's are not known, or hashed otherwise."""
        if self.a.weights_sha256 is None or self.b.weights_sha256 is None or self._rules_differ():
            return None
        return self.a.weights_sha256 == self.b.weights_sha256

    def _rules_differ(self) -> bool:
        """Say whether the hashes were made by the rules of different versions: until format 2, or since."""
        rules = {found.format >= _BY_GRAINS for found in (self.a, self.b) if found.format is not None}
        return len(rules) > 1

    def to_json(self) -> str:
        """Return the comparison as JSON; a value that is not finite becomes a string, because JSON has none."""
        return json.dumps(
            {
                "a": self.a.name,
                "b": self.b.name,
                "config": {key: {"a": a, "b": b} for key, (a, b) in self.config().items()},
                "metrics": {
                    key: {"a": _finite(a), "b": _finite(b), "difference": _finite(_difference(a, b))}
                    for key, (a, b) in self.metrics().items()
                },
                "weights": {"a": self.a.weights_sha256, "b": self.b.weights_sha256, "same": self.same_weights()},
            },
            indent=2,
            allow_nan=False,
        )

    def render(self) -> RenderableType:
        """Return the comparison for a terminal."""
        why = "versions with different hashes made the runs" if self._rules_differ() else "a run has no result"
        answer = {True: "the same bits", False: "different", None: f"unknown ({why})"}[self.same_weights()]
        parts: list[RenderableType] = [Text(f"a: {self.a.name}\nb: {self.b.name}"), Text(f"weights: {answer}")]
        config = Table("key", "a", "b", title="configuration, where it differs", title_justify="left")
        for key, (of_a, of_b) in self.config().items():
            config.add_row(*(Text(_ABSENT if cell is None else cell) for cell in (key, of_a, of_b)))
        metrics = Table("metric", "a", "b", "b - a", title="final metrics", title_justify="left")
        for name, (a, b) in self.metrics().items():
            metrics.add_row(Text(name), *(Text(_shown(value)) for value in (a, b, _difference(a, b))))
        parts.append(config if config.row_count else Text("configuration: no key differs"))
        parts.append(metrics if metrics.row_count else Text("metrics: neither run has any"))
        return Group(*parts)


def compare(run_a: str | Path, run_b: str | Path, mlflow_uri: str | None = None) -> Comparison:
    """Compare two runs, each a folder or an MLflow run id; raises ConfigError for one that does not exist."""
    return Comparison(_find(run_a, mlflow_uri), _find(run_b, mlflow_uri))


def _find(run: str | Path, mlflow_uri: str | None) -> Finding:
    folder = Path(run)
    if folder.is_dir():
        return _from_folder(folder)
    if folder.name == str(run) and folder.suffix == "":
        return _from_mlflow(str(run), mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_MLFLOW_URI)
    raise ConfigError(f"{run}: there is no such folder, and it is not an MLflow run id")


def _from_folder(folder: Path) -> Finding:
    run = RunFolder(folder)
    config, result = run.config(), run.result() or {}
    weights, measured = result.get("weights_sha256"), result.get("metrics")
    validation = {
        f"validation/{name}": value for name, value in (measured if isinstance(measured, dict) else {}).items()
    }
    metrics = {**final_metrics(folder), **validation}
    rule = result.get("format", _BY_GRAINS - 1)
    known = rule if isinstance(rule, int) else None
    return Finding(str(folder), flatten(config), metrics, None if weights is None else str(weights), known)


def _from_mlflow(run_id: str, mlflow_uri: str) -> Finding:
    uri = resolve(mlflow_uri)
    _refuse_missing_database(run_id, uri)
    bound_requests()
    try:
        run = connect(uri).get_run(run_id)
    except tracker_errors() as error:
        reason = first_line(error)
        raise ConfigError(
            f"{run_id}: neither a folder nor a run in MLflow at {without_password(mlflow_uri)}: {reason}; "
            "name a run.dir or a run id, and the tracker with --mlflow-uri"
        ) from error
    return Finding(f"MLflow run {run_id}", run.data.params, run.data.metrics, run.data.tags.get(WEIGHTS_TAG))


def _refuse_missing_database(run_id: str, uri: str) -> None:
    """Raise ConfigError rather than let MLflow create an empty database."""
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise ConfigError(f"{run_id}: there is no such folder, and no MLflow database {database}; set --mlflow-uri")


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _shown(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.6g}"
