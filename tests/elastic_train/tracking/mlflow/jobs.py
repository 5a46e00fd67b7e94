"""Jobs that log to a real MLflow database, and how to look at what arrived there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.core.lineage import Interval
from elastic_train.system.files import write_atomically
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.tracker import Tracker
from tests.conftest import PATIENCE_S
from tests.elastic_train.tracking.unqueued import Unqueued

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DOWN = "http://127.0.0.1:1"
EXPERIMENT = "tests"
CONFIG: dict[str, object] = {
    "run": {"dir": "runs/x", "name": "x", "seed": 1},
    "batch": {"global_batch": 64},
    "tracking": {"mlflow_uri": None, "experiment": EXPERIMENT},
}


def start(
    run_dir: Path,
    mlflow_uri: str | None,
    term: int = 1,
    config: dict[str, object] | None = None,
    step: int = 0,
    lineage: tuple[tuple[int, int, int], ...] = (),
    tags: dict[str, str] | None = None,
    files: BackgroundFiles | None = None,
) -> Tracker:
    run_dir.mkdir(exist_ok=True)
    resolved = config or CONFIG
    write_atomically(run_dir / "config.yaml", json.dumps(resolved))
    return Tracker.start(
        files=files or Unqueued(),
        run_dir=run_dir,
        term=term,
        config=resolved,
        mlflow_uri=mlflow_uri,
        experiment=EXPERIMENT,
        run_name="x",
        intervals=[Interval(*interval) for interval in lineage or ((term - 1, 0, step),) if step or lineage],
        settled=step,
        tags=tags,
    )


def steps(client: MlflowClient, run_id: str, name: str = "loss") -> Counter[int]:
    return Counter(metric.step for metric in client.get_metric_history(run_id, name))


def run_of(client: MlflowClient, tracker: Tracker) -> Run:
    run_id = tracker.wait_run_id(PATIENCE_S)
    assert run_id is not None
    return client.get_run(run_id)


def values(client: MlflowClient, run_id: str, name: str = "loss") -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))
