"""Damage the oldest remaining commit record, whose parent is deleted, and the small files of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from chaos.judge.evidence.run_files import Line, items, part, record_files, whole
from chaos.planted.edits import forge


def _change_oldest(folder: Path, change: Callable[[Line], Line]) -> None:
    """Change the oldest record; digests and parents are recomputed."""
    oldest = json.loads(record_files(folder)[0].read_text())
    place = oldest["term"], oldest["step"]
    forge(folder, lambda record: change(record) if (record["term"], record["step"]) == place else record)


def other_cursor(folder: Path) -> None:
    """The oldest record's cursor is four samples ahead of its applied samples."""
    _change_oldest(
        folder,
        lambda record: {
            **record,
            "cursor": {**(cursor := part(record, "cursor")), "offset": whole(cursor, "offset") + 4},
        },
    )


def other_sums(folder: Path) -> None:
    """The oldest record has the right count but the sums of other samples."""
    _change_oldest(
        folder,
        lambda record: {
            **record,
            "coverage": {**(sums := part(record, "coverage")), "sum_a": whole(sums, "sum_a") ^ 1},
        },
    )


def other_account(folder: Path) -> None:
    """The oldest record lists an unfinished epoch as finished."""
    _change_oldest(
        folder,
        lambda record: {
            **record,
            "account": {
                **part(record, "account"),
                "epochs": [*items(part(record, "account"), "epochs"), part(record, "coverage")],
            },
        },
    )


def other_improvement(folder: Path) -> None:
    """The oldest record has a best validation that no validation gave."""
    best: Line = {"metric": "min loss", "best": 0.125, "best_step": 1, "validated_at": 1, "num_since": 0}
    _change_oldest(folder, lambda record: {**record, "improvement": best})


def older_metrics(folder: Path) -> None:
    """The oldest record has metrics that no validation gave."""
    _change_oldest(folder, lambda record: {**record, "metrics": {"loss": 0.125, "samples": 16.0}})


def other_skips(folder: Path) -> None:
    """The oldest record reports its first step as one without an update."""
    _change_oldest(folder, lambda record: {**record, "skipped_steps": [[0, 1]]})


def other_head(folder: Path) -> None:
    """The head file names a commit of another run."""
    (folder / "head.json").write_text(json.dumps({"commit": "commits/00000099-000000000099.json", "step": 99}))


def other_tracked_run(folder: Path) -> None:
    """The folder names a tracker run that belongs to another job."""
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "mlflow_run_id": "one"}))
    (folder / "mlflow.json").write_text(json.dumps({"job": "job", "run_id": "another", "mlflow_uri": "sqlite:///x"}))


def other_store(folder: Path) -> None:
    """The store's id is not the run's."""
    (folder / "store-id").write_text("another store")
