"""Record the tracker's content for a finished run next to its histories, for the judge."""

from __future__ import annotations

import json
from pathlib import Path

from elastic_train.tracking.run_folder import RunFolder

TRACKED = "tracked.json"


def note(folder: Path, database_uri: str | None = None) -> None:
    """Write {metric: [[step, value], …]} of the run in MLflow; nothing if it has none, or cannot be reached.

    Read the server's own database, if available, instead of the server.
    """
    run = RunFolder(folder)
    uri, link = run.setting("tracking", "mlflow_uri"), run.link()
    if uri is None or link is None or link.run_id is None:
        return
    from mlflow import MlflowClient  # takes seconds to import; few commands need it
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=database_uri or uri)
    try:
        names = client.get_run(link.run_id).data.metrics
        held = {
            name: [[metric.step, metric.value] for metric in client.get_metric_history(link.run_id, name)]
            for name in names
        }
    except MlflowException:
        return  # the judge reports the missing data
    (folder / TRACKED).write_text(json.dumps(held) + "\n")
