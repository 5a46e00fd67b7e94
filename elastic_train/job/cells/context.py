"""Context parallelism: ranks that each compute some of the tokens of every row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Mesh
from elastic_train.job.cells.cut_model import along_axis
from elastic_train.parallel.cells.context_links import Gathering
from elastic_train.parallel.cells.graph_edges import LoneGroup
from elastic_train.parallel.group import Group
from elastic_train.parallel.step_tables import tree_sum
from elastic_train.tasks.placements import ContextPart, Running, loss_of
from elastic_train.tasks.task import Batch, LaneLoss


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's part of its cell's rows in one world."""

    task: Running
    part: ContextPart
    peers: Group
    """The ranks with the parts of the same rows, this one included, by part."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        """Compute this rank's part of a lane's loss."""
        return loss_of(self.task, model, batch, self.part)

    def add_up(self, found: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
        """Return the total losses and weights of lanes, in ascending order; equal on all context-parallel ranks."""
        mine = torch.tensor([found[lane] for lane in sorted(found)], dtype=torch.float64).reshape(-1, 2)
        totals = [[tree_sum(one) for one in zip(*rows, strict=True)] for rows in _by_lane(self.peers.all_gather(mine))]
        return {lane: (loss, weight) for lane, (loss, weight) in zip(sorted(found), totals, strict=True)}


def _by_lane(rows: Tensor) -> list[list[list[float]]]:
    """Return the values of every part, by lane, from a tensor (parts, lanes, 2)."""
    found: list[list[list[float]]] = rows.transpose(0, 1).tolist()
    return found


def context_of(task: Running, mesh: Mesh, cell: Group, multiple: int = 1) -> Context:
    """Return a rank's part of the rows; its token count is a multiple of `multiple`. Collective over the cell."""
    peers = along_axis(cell, mesh, "context")
    part = ContextPart(peers.rank, peers.size, Gathering(peers), multiple)
    return Context(task, part, peers)


def lone_part(degree: int, multiple: int = 1) -> ContextPart:
    """Return a part without peers, for passes outside a world."""
    return ContextPart(0, degree, Gathering(LoneGroup(degree)), multiple)
