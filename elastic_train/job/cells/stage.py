"""A rank's stage of a pipeline in one world: which modules it runs, when, and who goes on with what they make."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Mesh
from elastic_train.core.schedules import Action, Kind, schedule
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.parallel.cells.stage_links import Activation, StageLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.task import Batch, LaneLoss, StagePlan, Staging


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `number` of a model in stages, each of which runs some of the modules."""

    task: Staging
    model: nn.Module
    plan: StagePlan
    number: int
    kind: Kind
    links: StageLinks

    @property
    def is_last(self) -> bool:
        return self.number == len(self.plan) - 1

    def actions(self, num_lanes: int) -> Sequence[Action]:
        """Return what this stage does in a step of so many lanes."""
        return schedule(self.kind, self.number, len(self.plan), num_lanes)

    def run(self, batch: Batch, given: Tensor | None) -> Tensor | LaneLoss:
        """Run this stage's modules on a lane's micro-batch and what the stage before has made."""
        made = self.task.run_stage(self.model, self.plan[self.number], batch, given)
        assert isinstance(made, LaneLoss) == self.is_last, "the last stage returns a loss, and no other does"
        return made

    def losses(self, batches: Iterable[LaneBatch], device: torch.device) -> Iterator[tuple[LaneBatch, LaneLoss | None]]:
        """Run forward passes alone; yield each lane's loss on the last stage, and None on the others."""
        for batch in batches:
            made: Tensor | LaneLoss | None = None
            if batch.tensors is not None:
                key = key_of(batch)
                given = self.links.exchange(awaits=key) if self.number else None
                made = self.run({name: tensor.to(device) for name, tensor in batch.tensors.items()}, given)
                if isinstance(made, Tensor):
                    self.links.exchange(activation=Activation(key, made))
            yield batch, made if isinstance(made, LaneLoss) else None
        self.links.finish()


def stage_of(task: Staging, model: nn.Module, plan: StagePlan, kind: Kind, mesh: Mesh, cell: Group) -> Stage:
    """Return the stage of a rank in its cell."""
    number, stride = mesh.coordinates.stage, mesh.cell.size // mesh.cell.stage
    before = mesh.place - stride if number else None
    after = mesh.place + stride if number < len(plan) - 1 else None
    return Stage(task, model, plan, number, kind, StageLinks(cell, before, after))


def key_of(batch: LaneBatch) -> Hashable | None:
    """Return what lanes have in common whose activations have one form; None for one without samples."""
    if batch.tensors is None:
        return None
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.tensors.items()))
