"""Prepare a task with its training set: one dataset, or sources that must be read in the same way.

Each source must suit a task prepared with it alone: so errors name the source, and choices that a task makes by
inspection, such as the columns of packed documents, must be the same for all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elastic_train.config.schema import TaskConfig
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.dataset.row_groups import check_columns
from elastic_train.data.dataset.training_sources import Source
from elastic_train.errors import ConfigError, DataError
from elastic_train.tasks.task import LaneLoss, Matching, Task, load_task

if TYPE_CHECKING:
    from torchmetrics import Metric


def prepare(task: Task, config: TaskConfig, manifest: Manifest, sources: Sequence[Source]) -> None:
    """Prepare the configured task with a dataset, which joins `sources` if there are any.

    Raise ConfigError or DataError if the task, the dataset or one of the sources does not fit.
    """
    columns = [_columns_alone(config, source.manifest) for source in sources]
    for source, chosen in zip(sources[1:], columns[1:], strict=True):
        _check_read_alike(source.manifest, chosen, sources[0].manifest, columns[0])
    task.prepare(manifest)
    if isinstance(task, Matching):
        for source in sources[1:]:
            task.check_held_out(source.manifest)


def _columns_alone(config: TaskConfig, manifest: Manifest) -> list[str]:
    """Return the columns that the task would read from a source as its training set."""
    task = load_task(config)
    task.prepare(manifest)
    check_columns(manifest, task.columns())
    return list(task.columns())


def _check_read_alike(manifest: Manifest, mine: list[str], first: Manifest, theirs: list[str]) -> None:
    """Raise DataError if the task would read other columns, or other types, from a source than from the first one."""
    if mine != theirs:
        raise DataError(
            f"{manifest.url}: the task would read its columns {', '.join(mine)}, and {', '.join(theirs)} of "
            f"{first.url}: all sources of a mixture need the same columns, so pack both or neither, or name the "
            "columns in task.params"
        )
    for name in mine:
        if manifest.columns[name] != first.columns[name]:
            raise DataError(
                f"{manifest.url}: column '{name}' is {manifest.columns[name]}, in {first.url} it is "
                f"{first.columns[name]}: sources of a mixture have one type for each column; write one of them again"
            )


def check_states(name: str, metric: Metric) -> None:
    """Reject a metric whose states cannot be combined to the same bits in any world."""
    lists = [state for state, value in metric.metric_state.items() if isinstance(value, list)]
    for state, value in metric.metric_state.items():
        parts = value if isinstance(value, list) else [value]
        is_whole = all(isinstance(part, Tensor) and not part.is_floating_point() for part in parts)
        if not is_whole or len(lists) > 1 or isinstance(metric._defaults[state], list) != isinstance(value, list):
            raise ConfigError(
                f"task.path: metric '{name}': state '{state}' is not an integer count, of which any world adds up the "
                "same: give the metric `thresholds`, or count in tensors of integers (one list of such rows is allowed)"
            )
        reduction = getattr(metric._reductions.get(state), "__name__", None)
        if reduction != ("dim_zero_cat" if lists and state in lists else "dim_zero_sum"):
            raise ConfigError(
                f"task.path: metric '{name}': state '{state}' must be added with dist_reduce_fx 'sum', or 'cat' for a "
                "list of rows of integers"
            )


def value_of(name: str, metric: Metric) -> float:
    """Compute a metric; raise ConfigError if the result is not a single number."""
    return _number(f"metric '{name}'", metric.compute())


def details_of(name: str, metric: Metric) -> dict[str, float]:
    """Return a metric's further values by name; raise ConfigError if one is not a single number."""
    details = getattr(metric, "details", None)
    found = {} if details is None else details()
    return {one: _number(f"metric '{name}': '{one}' of `details`", value) for one, value in found.items()}


def _number(what: str, value: object) -> float:
    if not isinstance(value, Tensor | Real) or (isinstance(value, Tensor) and value.numel() != 1):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"task.path: {what} gives {found}, not one number: have it averaged (average='macro'), or return "
            "a metric for each of its numbers"
        )
    return float(value)


def try_metrics(metrics: Mapping[str, Metric], loss: LaneLoss | None) -> None:
    """Reject metrics that no validation could compute: by their states, and by their result for a loss, if given."""
    for name, metric in metrics.items():
        check_states(name, metric)
        if loss is None or loss.predictions is None:
            continue
        fresh = copy.deepcopy(metric)
        try:
            metric.update(loss.predictions.detach(), loss.targets)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ConfigError(
                f"task.path: metric '{name}' refuses the predictions and targets that `loss` returns: {error}"
            ) from error
        check_states(name, metric)
        _check_states_are_all(name, metric, fresh, loss)


def _check_states_are_all(name: str, metric: Metric, fresh: Metric, loss: LaneLoss) -> None:
    """Reject a metric whose states do not add up, or do not determine its value: ranks combine only states."""
    once = copy.deepcopy(metric.metric_state)
    value = value_of(name, metric)
    if not math.isnan(value):
        details_of(name, metric)
    for state, found in once.items():
        setattr(fresh, state, copy.deepcopy(found))
    fresh._update_count = 1
    if repr(value_of(name, fresh)) != repr(value):  # NaN equals NaN here
        raise ConfigError(
            f"task.path: metric '{name}': its value follows from more than its states, which are what ranks put "
            "together: count with add_state, not in other attributes"
        )
    metric.update(loss.predictions.detach(), loss.targets)  # type: ignore[union-attr]  # it has some
    for state, found in metric.metric_state.items():
        if isinstance(found, Tensor) and not torch.equal(found, 2 * torch.as_tensor(once[state])):
            raise ConfigError(
                f"task.path: metric '{name}': state '{state}' is not twice as large after the same rows twice, so it "
                "cannot be added up over ranks: add counts of rows to it, and nothing else"
            )
