"""Validation over all ranks: each sample once, and the same numbers, to the last bit, at any world size.

The validation set is cut into the run's lanes in file order. Losses are summed by lane and then along the lanes' tree;
metric states are integers: counts, which add up exactly, or lists of rows, which are put in order. Random numbers begin
anew for each micro-batch, by its place.

A value without a target to judge by is no number, None: it is not best, and no early stopping goes by it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Mesh
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.job.cells.stage import Stage
from elastic_train.job.generators import seed_validated
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.devices.switches import TrainingModes
from elastic_train.parallel.group import Group
from elastic_train.parallel.step_tables import gather_tables, tree_sum
from elastic_train.tasks.preparing import check_states, value_of
from elastic_train.tasks.task import OWN_VALUES, LaneLoss, Task, mean_loss, weight_of

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger(__name__)


class Judged(NamedTuple):
    """The value of a metric, a sentence about it, and more numbers by their names."""

    value: float
    remark: str | None
    details: Mapping[str, float]


class Ranks(Protocol):
    """Who evaluates: all ranks, and those that have a replica's part of the lanes; a `World` is one."""

    @property
    def group(self) -> Group:
        """All ranks."""

    @property
    def mesh(self) -> Mesh:
        """Who is who among them."""

    @property
    def owners(self) -> Group:
        """One rank of every owner of lanes."""


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    steps: Iterable[Sequence[LaneBatch]],
    shards: StateShards,
    world: Ranks,
    num_lanes: int,
    device: torch.device,
    stage: Stage | None = None,
    remark: Callable[[str], None] = log.warning,
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, float | None]:
    """Return {"loss": ..., "samples": ..., metric: ...} over the whole validation set, equal on every rank.

    Without a target, loss and metrics are None; so is a metric that is undefined though the loss is a number. `remark`
    gets a sentence for each. A metric is NaN where predictions are. `metrics` are the task's, of a caller who reads
    more of them than their values.

    In a pipeline the last stage alone learns of losses, and tells the others what they come to.
    """
    cut = stage if stage is not None and stage.is_cut else None
    metrics = {name: metric.to(device) for name, metric in (metrics or task.metrics()).items()}
    sums: dict[int, list[float]] = {}
    with losses(task, model, steps, shards, world, device, cut) as each:
        for batch, loss in each:
            row = sums.setdefault(batch.lane, [0.0, 0.0, 0.0, 0.0])
            if loss is None:
                continue
            row[0] += float(loss.total.detach())
            row[1] += weight_of(loss)
            row[2] += len(batch.ids)
            row[3] += _has_nan(loss.predictions)
            with _plain_kernels():
                for metric in metrics.values():
                    metric.update(loss.predictions, loss.targets)
    table = gather_tables(world.group, world.mesh, world.mesh.assigned(num_lanes), sums).lanes
    total, weight, samples, num_nan = (tree_sum([row[place] for row in table]) for place in range(4))
    mean = mean_loss(total, weight)
    judged = _merge(metrics, world.owners, is_nan=num_nan > 0)
    if cut is not None:
        judged = _told(world, judged)
    if mean is None:
        remark("no sample of the validation set has a target: its loss and metrics are no numbers, and decide nothing")
        return {**dict(zip(OWN_VALUES, (None, samples), strict=True)), **dict.fromkeys(judged)}
    found: dict[str, float | None] = dict(zip(OWN_VALUES, (mean, samples), strict=True))
    for name, (value, text, details) in judged.items():
        found[name] = value
        if math.isnan(value) and not num_nan and math.isfinite(mean):
            remark(f"the metric '{name}' is undefined for the targets of the validation set: it decides nothing")
            found[name] = None
        elif text is not None:
            remark(f"the metric '{name}': {text}")
        found |= details
    return found


@contextlib.contextmanager
def losses(
    task: Task,
    model: nn.Module,
    steps: Iterable[Sequence[LaneBatch]],
    shards: StateShards,
    world: Ranks,
    device: torch.device,
    cut: Stage | None = None,
) -> Iterator[Iterator[tuple[LaneBatch, LaneLoss | None]]]:
    """Give each micro-batch and its loss, None without samples, by a model that is in eval mode meanwhile.

    `cut` is this rank's stage of a pipeline, whose last one alone gives losses.
    """
    modes, was_training = TrainingModes(model), model.training
    model.eval()
    try:
        turns = shards.turns(world.owners, (batch for step in steps for batch in step))
        with torch.no_grad():
            yield _losses(task, model, turns, device) if cut is None else cut.losses(turns, device)
    finally:
        model.train(was_training)
        modes.set_back()


def _has_nan(predictions: Tensor | None) -> bool:
    return predictions is not None and predictions.is_floating_point() and bool(predictions.isnan().any())


def _losses(
    task: Task, model: nn.Module, batches: Iterable[LaneBatch], device: torch.device
) -> Iterator[tuple[LaneBatch, LaneLoss | None]]:
    """Yield the loss of each lane, None without samples."""
    for batch in batches:
        tensors = batch.tensors
        seed_validated(batch)
        yield batch, None if tensors is None else task.loss(model, {name: t.to(device) for name, t in tensors.items()})


def _told(world: Ranks, judged: dict[str, Judged]) -> dict[str, Judged]:
    """Return what the rank has found that knows of its cell's losses."""
    first = world.mesh.replica * world.mesh.cell.size
    by_rank = world.group.all_gather_objects(judged)
    found: dict[str, Judged] = by_rank[first + world.mesh.cell.speaker]
    return found


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Leave deterministic mode: counts are integers, exact in any order, and its bincount takes quadratic memory."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _merge(metrics: Mapping[str, Metric], owners: Group, *, is_nan: bool) -> dict[str, Judged]:
    """Put the metrics' states of all owners of lanes together and compute their values; NaN if predictions are."""
    judged: dict[str, Judged] = {}
    for name, metric in metrics.items():
        check_states(name, metric)
        for state_name, state in metric.metric_state.items():
            if isinstance(state, Tensor):
                owners.all_reduce(state)
            setattr(metric, state_name, state if isinstance(state, Tensor) else [_all_rows(state, owners)])
        if is_nan:
            judged[name] = Judged(math.nan, None, {})
            continue
        value, details = value_of(name, metric), getattr(metric, "details", None)
        more = {} if details is None or math.isnan(value) else details()
        judged[name] = Judged(value, getattr(metric, "remark", None), more)
    return judged


def _all_rows(parts: Sequence[Tensor], owners: Group) -> Tensor:
    """Return the rows of all owners, in ascending order."""
    own = torch.cat([part.cpu().long() for part in parts]) if parts else torch.zeros(0, dtype=torch.int64)
    shapes = owners.all_gather_objects(list(own.shape))
    longest = max(shapes, key=lambda shape: (len(shape), shape))
    room = torch.zeros([max(1, longest[0]), *longest[1:]], dtype=torch.int64)
    if own.numel():
        room[: len(own)] = own
    gathered = owners.all_gather(room)
    rows = torch.cat([part[: shape[0]] for part, shape in zip(gathered, shapes, strict=True)])
    if rows.dim() == 1:
        return rows.sort().values
    for column in reversed(range(rows[0].numel() if len(rows) else 0)):
        rows = rows[rows.flatten(1)[:, column].argsort(stable=True)]
    return rows
