"""Export a trained model as a transformers folder, atomically.

If the task maps its weights to transformers names, the model is not built: weights are copied from the commit to the
folder's files one by one. Any other model is built and saves itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from elastic_train.checkpoint.commits.weights import Weights
from elastic_train.errors import ConfigError, StorageError
from elastic_train.inference.opening import Opened, open_commit
from elastic_train.inference.weight_files import MOST_BYTES, write_weights
from elastic_train.system.atomic_files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent
from elastic_train.tasks.task import Exporting, ExportingByName, ExportingSome


def export_folder(
    run: str,
    target: Path,
    *,
    commit: str | None = None,
    train: Sequence[str] = (),
    weights: Weights = "trained",
    is_merged: bool = False,
    most_bytes: int = MOST_BYTES,
    track: Track = silent,
) -> int:
    """Write a commit's model and return the folder's size in bytes; raises ConfigError if the task has no such model.

    With `is_merged`, adapters are merged into their base weights. A file has up to `most_bytes` of weights, or one
    weight. For the other arguments see `open_commit`.
    """
    unfinished = draft_of(target)
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another folder")
    with open_commit(run, commit, train=train, weights=weights) as opened:
        try:
            unfinished.mkdir(parents=True)
            _export(opened, unfinished, most_bytes, track, is_merged=is_merged)
            publish(unfinished, target)
        except OSError as error:
            raise StorageError(f"{target}: cannot write: {error.strerror or error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def _export(opened: Opened, folder: Path, most_bytes: int, track: Track, *, is_merged: bool) -> None:
    task = opened.plan.task
    if not isinstance(task, Exporting):
        raise ConfigError(
            f"task.path: '{opened.plan.config.task.path}' has no model of transformers; use --to safetensors"
        )
    if isinstance(task, ExportingSome) and (why := task.why_not_exported()) is not None:
        raise ConfigError(why)
    names = task.begin_export(folder) if isinstance(task, ExportingByName) else None
    if names is None:
        model = opened.plan.build_state().model
        opened.fill(model)
        task.export(model.cpu().eval(), folder, is_merged=is_merged)
        return
    assert isinstance(task, ExportingByName), "it has given names"
    sketch = task.sketch_model()
    assert sketch is not None, "what is not built can be sketched"
    opened.check_fits(sketch)
    _check_has(sketch, names, opened.plan.config.task.path)
    write_weights(folder, opened.weights.renamed(names), most_bytes, track)


def _check_has(model: nn.Module, names: Mapping[str, str], path: str) -> None:
    """Refuse a model whose weights do not match the task's transformers names, e.g. a subclass that builds another."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    written = {id(parameters[name]) for name in names if name in parameters}
    lacking = [name for name in names if name not in parameters]
    if wrong := lacking + [name for name, one in parameters.items() if id(one) not in written]:
        verb = "lacks" if lacking else "has"
        raise ConfigError(
            f"task.path: '{path}' builds a model that transformers cannot load, since it {verb} '{wrong[0]}': use --to "
            "safetensors, or replace `begin_export`, which may return None, and `export`"
        )
