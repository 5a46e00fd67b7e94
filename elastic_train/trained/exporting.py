"""Exporting a trained model as a folder of transformers, which appears whole or not at all."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from elastic_train.errors import ConfigError, StorageError
from elastic_train.tasks.task import Exporting
from elastic_train.trained.opening import Trained


def export_folder(trained: Trained, target: Path, *, is_merged: bool) -> int:
    """Write the folder, and return how many bytes it has; ConfigError if the task has no such model.

    With `is_merged` adapters are added to their base's weights.
    """
    task = trained.plan.task
    if not isinstance(task, Exporting):
        raise ConfigError(
            f"task.path: '{trained.plan.config.task.path}' has no model of transformers; use --to safetensors"
        )
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another folder")
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        task.export(trained.model.cpu().eval(), unfinished, is_merged=is_merged)
        unfinished.rename(target)
    except OSError as error:
        raise StorageError(f"{target}: cannot write: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
