"""The tiny model in cells: each place has a parameter shard, whose moments are sharded over its column.

The state is the product's own; only the task's part is here: which parameters are in which stage, and along which
dimension they are split within it. Gradients are element-wise, so every rank computes its own shard without exchanges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled.memory import Known
from chaos.sim.modelled.tiny_model import CUT_DIMS, SHAPES, TinyModel, leaf_of
from elastic_train.config.parallel import ParallelConfig
from elastic_train.core.mesh import Cell
from elastic_train.job.build import columns_of
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.cells.cut_model import Cut, CutModel
from elastic_train.parallel.cells.links import CellLinks
from elastic_train.placement.grains import cut_along
from elastic_train.placement.holdings import Column

UNCUT = 3
"""One in this many consecutive parameters of a stage is not split."""


@lru_cache(64)
def tiny_cuts(cell: Cell) -> Mapping[str, Cut]:
    """Return the cuts of the model: parameters go to stages round-robin, and most are split within a stage."""
    cuts = dict[str, Cut]()
    for number, (name, shape) in enumerate(SHAPES.items()):
        stage, turn = number % cell.stage, number // cell.stage
        degree = 1 if turn % UNCUT == 0 else cell.stage_size
        dim = CUT_DIMS[name]
        if cell.stage > 1 or degree > 1:
            at = [divmod(place, cell.stage_size) for place in range(cell.size)]
            spans = tuple(_span(rank, degree, shape[dim]) if of == stage else (0, 0) for of, rank in at)
            cuts[name] = Cut(dim, torch.Size(shape), spans, cut_along(shape, dim))
    return cuts


def _span(number: int, degree: int, length: int) -> tuple[int, int]:
    return (number * length // degree, (number + 1) * length // degree) if degree > 1 else (0, length)


class TinyCut(CutModel):
    """The product's cut of a model whose shards are independent within a lane."""

    def __init__(self, model: nn.Module, plan: CellPlan, cell: Cell, links: CellLinks) -> None:
        super().__init__(model, plan, cell, links)
        self.shape, self.cuts = cell, tiny_cuts(cell)

    def take_place(self, place: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        super().take_place(place, weights)
        assert isinstance(self.model, TinyModel), "the one real model that is simulated"
        self.model.part_of = lambda ids: _part_of_leaf(ids, self.shape, place)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        cut, cell = self.cuts[name], self.known_cell
        assert isinstance(cell, SimGroup), "the ranks of a simulated cell"
        mine = tensor.detach().clone()
        return cell.fold(mine, lambda parts: _joined(parts, cut)).clone()


def _joined(parts: Sequence[object], cut: Cut) -> Tensor:
    return torch.cat([part for place in cut.givers if isinstance(part := parts[place], Tensor)], cut.dim)


@lru_cache(1 << 14)
def _part_of_leaf(ids: tuple[int, ...], cell: Cell, place: int) -> Mapping[str, Tensor]:
    """Return a place's shard of a lane's sample-dependent gradient."""
    cuts = tiny_cuts(cell)
    leaf = leaf_of(ids)
    return {name: cuts[name].part_of(one, place) if name in cuts else one for name, one in leaf.items()}


class SameColumns:
    """Compute once for all ranks of a job what the places of a cell hold."""

    def __init__(self) -> None:
        self._known = Known()

    def of(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        cut: CutModel,
        parallel: ParallelConfig,
        units: list[str],
        atomic: Collection[int],
    ) -> list[Column]:
        return self._known(parallel.cell, lambda: columns_of(model, optimizer, cut, parallel, units, atomic))
