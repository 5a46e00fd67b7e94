"""Ranks that compute some tokens of each row: the part of each."""

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
    """This rank's part of its cell's lanes in one world."""

    task: Running
    part: ContextPart
    peers: Group
    """The ranks that compute the other parts, and this one, by part."""

    def loss(self, model: nn.Module, batch: Batch) -> LaneLoss:
        """Compute this rank's part of a lane's loss."""
        return loss_of(self.task, model, batch, self.part)

    def add_up(self, found: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
        """Return losses and weights of lanes, in ascending order, from those of all parts; alike for all of these."""
        mine = torch.tensor([found[lane] for lane in sorted(found)], dtype=torch.float64).reshape(-1, 2)
        totals = [[tree_sum(one) for one in zip(*rows, strict=True)] for rows in _by_lane(self.peers.all_gather(mine))]
        return {lane: (loss, weight) for lane, (loss, weight) in zip(sorted(found), totals, strict=True)}


def _by_lane(rows: Tensor) -> list[list[list[float]]]:
    """Return every part's values, by lane, of a tensor (parts, lanes, 2)."""
    found: list[list[list[float]]] = rows.transpose(0, 1).tolist()
    return found


def context_of(task: Running, mesh: Mesh, cell: Group, multiple: int = 1) -> Context:
    """Return the part of a rank in its cell, which has a multiple of so many tokens; all ranks of the cell call it."""
    peers = along_axis(cell, mesh, "context")
    part = ContextPart(peers.rank, peers.size, Gathering(peers), multiple)
    return Context(task, part, peers)


def lone_part(degree: int, multiple: int = 1) -> ContextPart:
    """Return a part whose peers are not there, for passes outside of worlds."""
    return ContextPart(0, degree, Gathering(LoneGroup(degree)), multiple)
