"""Validation over all ranks: each sample once, and the same numbers, to the last bit, at any world size.

The validation set is cut into the run's lanes in file order. Losses are summed by lane and then along the lanes' tree;
metric states are integer counts, which add up exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Mesh
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import ConfigError
from elastic_train.job.cells.stage import Stage
from elastic_train.job.state_shards import StateShards
from elastic_train.parallel.group import Group
from elastic_train.parallel.step_tables import gather_tables, tree_sum
from elastic_train.tasks.task import OWN_VALUES, LaneLoss, Task

if TYPE_CHECKING:
    from torchmetrics import Metric


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
) -> dict[str, float]:
    """Return {"loss": ..., "samples": ..., metric: ...} over the whole validation set, equal on every rank.

    In a pipeline the last stage alone learns of losses, and tells the others what they come to.
    """
    metrics = {name: metric.to(device) for name, metric in task.metrics().items()}
    sums: dict[int, list[float]] = {}
    was_training = model.training
    model.eval()
    try:
        turns = shards.turns(world.owners, (batch for step in steps for batch in step))
        for batch, loss in _losses(task, model, turns, device) if stage is None else stage.losses(turns, device):
            row = sums.setdefault(batch.lane, [0.0, 0.0, 0.0])
            if loss is None:
                continue
            row[0] += float(loss.total.detach())
            row[1] += loss.weight
            row[2] += len(batch.ids)
            with _plain_kernels():
                for metric in metrics.values():
                    metric.update(loss.predictions, loss.targets)
    finally:
        model.train(was_training)
    table = gather_tables(world.group, world.mesh, world.mesh.assigned(num_lanes), sums).lanes
    total, weight, samples = (tree_sum([row[place] for row in table]) for place in range(3))
    own = dict(zip(OWN_VALUES, (total / (weight or 1.0), samples), strict=True))
    values = _merge(metrics, world.owners)
    return {**own, **(values if stage is None else _told(world, values))}


def _losses(
    task: Task, model: nn.Module, batches: Iterable[LaneBatch], device: torch.device
) -> Iterator[tuple[LaneBatch, LaneLoss | None]]:
    """Yield the loss of each lane, None without samples."""
    for batch in batches:
        tensors = batch.tensors
        yield batch, None if tensors is None else task.loss(model, {name: t.to(device) for name, t in tensors.items()})


def _told(world: Ranks, values: dict[str, float]) -> dict[str, float]:
    """Return what the rank has found that knows of its cell's losses."""
    first = world.mesh.replica * world.mesh.cell.size
    told = world.group.all_gather_objects(values)
    found: dict[str, float] = told[first + world.mesh.cell.speaker]
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


def _merge(metrics: Mapping[str, Metric], owners: Group) -> dict[str, float]:
    """Sum the metrics' states over the owners of lanes and compute their values."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        for state_name, state in metric.metric_state.items():
            if not isinstance(state, Tensor) or state.is_floating_point():
                raise ConfigError(
                    f"metric '{name}': state '{state_name}' is not an integer count; give the metric thresholds"
                )
            owners.all_reduce(state)
            setattr(metric, state_name, state)
        values[name] = float(metric.compute())
    return values
