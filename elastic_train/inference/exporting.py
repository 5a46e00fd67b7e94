"""Export a trained model as a transformers folder, atomically.

If the task maps its weights to transformers names, the model is not built: weights are copied from the commit to the
folder's files one by one. Any other model is built and saves itself.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from elastic_train.checkpoint.commits.weights import CommitWeights, Kind, Weights, write_safetensors
from elastic_train.errors import ConfigError, StorageError
from elastic_train.inference.opening import Opened, open_commit
from elastic_train.system.files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.wording import first_line
from elastic_train.tasks.task import Exporting, ExportingByName, ExportingSome, sketch_of

MOST_BYTES = 5 * 10**9
"""Largest total size of a file's tensors, as in Hugging Face's own tools."""
_FILE, _INDEX = "model{}.safetensors", "model.safetensors.index.json"


def write_weights(folder: Path, weights: CommitWeights, most_bytes: int, track: Track = silent) -> None:
    """Write weights under their names into a folder that has no weights.

    Tensors are written as they are read, so memory holds one tensor, or a few small ones, whatever a file's size.
    """
    kinds = weights.kinds
    shards = split(kinds, most_bytes)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = _FILE.format("" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}")
        files |= dict.fromkeys(names, file)
        with (folder / file).open("wb") as opened:
            read = weights.tracked(track, f"writing {file}")
            write_safetensors(opened, {name: kinds[name] for name in names}, read, {"format": "pt"})
    if len(shards) > 1:
        sizes = {
            "total_parameters": sum(kind.shape.numel() for kind in kinds.values()),
            "total_size": sum(kind.num_bytes for kind in kinds.values()),
        }
        index = json.dumps({"metadata": sizes, "weight_map": files}, indent=2, sort_keys=True)
        (folder / _INDEX).write_text(index + "\n")


def split(kinds: Mapping[str, Kind], most_bytes: int) -> list[list[str]]:
    """Assign tensors to files in order, each as full as possible; a tensor larger than a file gets its own."""
    shards, shard, num_bytes = list[list[str]](), list[str](), 0
    for name, kind in kinds.items():
        if kind.num_bytes > most_bytes:
            shards.append([name])
            continue
        if num_bytes + kind.num_bytes > most_bytes:
            shards.append(shard)
            shard, num_bytes = [], 0
        shard.append(name)
        num_bytes += kind.num_bytes
    return [*shards, shard] if shard else shards


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
            _share(unfinished)
            publish(unfinished, target)
        except OSError as error:
            raise StorageError(f"{target}: cannot write: {error.strerror or error}") from error
        except SafetensorError as error:  # in place of OSError
            raise StorageError(f"{target}: cannot write: {first_line(error)}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def _share(folder: Path) -> None:
    """Let whoever can read a new folder read its files; safetensors lets their owner alone."""
    with contextlib.suppress(OSError):  # some file systems have no modes of files
        for path in folder.rglob("*"):
            if path.is_file():
                path.chmod(path.stat().st_mode | folder.stat().st_mode & 0o666)


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
    model = sketch_of(task)
    model = task.build_model() if model is None else model
    opened.check_fits(model)
    _check_has(model, names, opened.plan.config.task.path)
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
