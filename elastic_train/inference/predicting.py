"""Write a trained model's prediction for each row of a dataset to one Parquet file, atomically.

The same loop as in a validation computes the rows, in one lane, so they arrive and are written in the order of their
ids.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from elastic_train.config.schema import BatchConfig
from elastic_train.core.mesh import Mesh
from elastic_train.data.dataset.manifest import Manifest, load_manifest
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.data.parquet.sources import reaching
from elastic_train.errors import ConfigError, StorageError
from elastic_train.inference.opening import Trained
from elastic_train.job.sample_streams import Feed
from elastic_train.parallel.group import Group
from elastic_train.system.files import draft_of, publish
from elastic_train.system.progress_bar import Track, silent
from elastic_train.tasks.task import LaneLoss, Predicting, Task
from elastic_train.training.evaluation import Ranks, evaluate, losses
from elastic_train.training.open_session import make_repeatable

if TYPE_CHECKING:
    from torchmetrics import Metric

ID, FILE, PROBABILITIES = "id", "file", "probabilities"


def predict_rows(
    trained: Trained, data: str, target: Path, batch: int | None = None, track: Track = silent
) -> tuple[int, list[str], list[str]]:
    """Write the id and the prediction of each row of a dataset; return the number of rows, the columns and the classes.

    The classes, in the order of a column of probabilities, are also in that column's metadata.

    `batch` is the number of rows per forward pass, by default the run's micro-batch. Raises ConfigError or DataError if
    the dataset does not fit the task, or the task has no predictions per row.
    """
    if target.exists():
        raise ConfigError(f"{target}: exists already; name another file")
    feed, size = _feed_of(trained, data, batch)
    num_rows, classes = feed.manifests[-1].num_rows, list[str]()
    steps, columns, num_written = feed.validation(range(1)), [ID], 0
    assert steps is not None, "it has a validation set"
    make_repeatable(trained.plan.config)
    with _writing(target) as draft, contextlib.ExitStack() as stack:
        writer = None
        shown = track(steps, f"predicting {data}", -(-num_rows // size), f"batches of {size} rows")
        for rows in _tables(trained, shown, _files_of(feed.manifests[-1])):
            if writer is None:
                schema, classes = _schema_with_classes(rows, trained.plan.task)
                writer = stack.enter_context(pq.ParquetWriter(draft, schema))
                columns = rows.column_names
            writer.write_table(rows.cast(schema))
            num_written += len(rows)
    return num_written, columns, classes


def _schema_with_classes(rows: pa.Table, task: Task) -> tuple[pa.Schema, list[str]]:
    """Return the schema with the names of classes at the column of their probabilities, and these; none without it."""
    number = rows.schema.get_field_index(PROBABILITIES)
    names = list(getattr(task.metrics().get("accuracy"), "names", ())) if number >= 0 else []
    if not names:
        return rows.schema, []
    named = rows.schema.field(number).with_metadata({"classes": json.dumps(names)})
    return rows.schema.set(number, named), names


def _feed_of(trained: Trained, data: str, batch: int | None) -> tuple[Feed, int]:
    """Return the feed that reads a dataset in order, in one lane, and the rows per batch."""
    plan, config = trained.plan, trained.plan.config
    size = batch or config.batch.micro_batch
    if isinstance(plan.task, Predicting):
        plan.task.begin_predicting(load_manifest(data))
    changes = {
        "data": config.data.model_copy(update={"validation": data}),
        "batch": BatchConfig(global_batch=size, micro_batch=size),
    }
    return Feed(config.model_copy(update=changes), plan.task, plan.feed.manifests), size


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """Yield a draft file that becomes the target on success; on failure it is deleted."""
    draft = draft_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        publish(draft, target)
    except OSError as error:
        raise StorageError(f"{target}: cannot write: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def _files_of(manifest: Manifest) -> pa.ChunkedArray | None:
    """Return the files from which the rows were imported; None if the dataset does not name them."""
    if FILE not in manifest.columns:
        return None
    with reaching(manifest.url):
        storage, root = fsspec.core.url_to_fs(manifest.url.rstrip("/"))
        parts = [pq.read_table(f"{root}/{part.path}", filesystem=storage, columns=[FILE]) for part in manifest.files]
        return pa.concat_tables(parts).column(FILE)


def _tables(
    trained: Trained, steps: Iterable[Sequence[LaneBatch]], files: pa.ChunkedArray | None
) -> Iterator[pa.Table]:
    plan, state = trained.plan, trained.state
    with losses(plan.task, state.model, steps, state.shards, alone(), plan.device) as each:
        for batch, loss in each:
            if loss is not None:
                found = _found(plan.task, batch, loss, plan.config.task.path)
                rows = {ID: pa.array(batch.ids), **{name: _array(values) for name, values in found.items()}}
                yield pa.table(rows if files is None else {ID: rows[ID], FILE: files.take(rows[ID]), **rows})


def _found(task: Task, batch: LaneBatch, loss: LaneLoss, path: str) -> Mapping[str, Tensor | Sequence[str]]:
    """Return the task's predictions per row; refuse columns without one entry per row."""
    loss = replace(loss, predictions=None if loss.predictions is None else loss.predictions.detach().cpu())
    if isinstance(task, Predicting):
        found = task.predictions(loss, batch.tensors or {})
    else:
        found = {} if loss.predictions is None else {"prediction": loss.predictions}
    wrong = [name for name, values in found.items() if name == ID or not _has_rows(values, len(batch.ids))]
    if wrong or not found:
        what = f"its column '{wrong[0]}' is the id's, or lacks rows" if wrong else "its `loss` returns no predictions"
        raise ConfigError(
            f"task.path: '{path}' predicts nothing for each row: {what}; give it the methods of "
            "elastic_train.tasks.task.Predicting"
        )
    return found


def _has_rows(values: Tensor | Sequence[str], num: int) -> bool:
    return len(values) == num if not isinstance(values, Tensor) else values.dim() > 0 and len(values) == num


def _array(values: Tensor | Sequence[str]) -> pa.Array:
    """Return one entry per row: a text, a number, or a list of numbers."""
    if not isinstance(values, Tensor):
        return pa.array(values, pa.string())
    plain = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    flat = plain.flatten(1).numpy() if plain.dim() > 1 else plain.numpy()
    if flat.ndim == 1:
        return pa.array(flat)
    offsets = np.arange(len(flat) + 1, dtype=np.int32) * flat.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.reshape(-1)))


_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Alone:
    """A world of one rank."""

    group: Group
    mesh: Mesh = Mesh(0, 1)  # noqa: RUF009 - frozen

    @property
    def owners(self) -> Group:
        return self.group

    @property
    def holders(self) -> Group:
        return self.group


def alone() -> Ranks:
    return Alone(Group(0, 1, None, _TIMEOUT_S))


def evaluate_trained(
    trained: Trained, metrics: Mapping[str, Metric] | None = None, track: Track = silent
) -> dict[str, float | None]:
    """Return loss, number of samples and the task's metrics over the validation set of `trained`.

    `metrics` are the task's own; they hold their states afterwards.
    """
    plan, state = trained.plan, trained.state
    make_repeatable(plan.config)
    batches = plan.feed.validation(range(plan.num_lanes))
    assert batches is not None, "it was opened with a validation set"
    steps = track(batches, "evaluating", plan.feed.num_validation_steps, "steps")
    found = plan.task, state.model, steps, state.shards, alone(), plan.num_lanes, plan.device
    return evaluate(*found, metrics=metrics)
