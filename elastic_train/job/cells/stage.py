"""A rank's stage of a pipeline in one world: which modules it runs, when, and who goes on with what they make."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from elastic_train.core.mesh import Mesh
from elastic_train.core.schedules import Action, Kind, Pass, Pipeline, schedule
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.generators import seed_host_generators, seed_validated
from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.cells.pipeline import run_schedule
from elastic_train.parallel.cells.stage_links import StageLinks
from elastic_train.parallel.group import Group
from elastic_train.tasks.placements import ContextPart, Piece, Running, run_piece
from elastic_train.tasks.task import Batch, LaneLoss


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `number` of a model in stages, each of which runs some of the modules, in one chunk or in several."""

    task: Running
    model: nn.Module
    plan: CellPlan
    number: int
    kind: Kind
    links: StageLinks
    experts: Sequence[ExpertLinks] = ()
    """Those to ranks of this stage that have other experts, by chunk, if they are spread."""

    def actions(self, num_lanes: int, kind: Kind | None = None) -> Sequence[Action]:
        """Return what this stage does in a step of so many lanes; by its own kind of schedule, or by another."""
        return schedule(Pipeline(kind or self.kind, self.plan.num_stages, num_lanes, self.plan.num_chunks), self.number)

    def run(self, chunk: int, batch: Batch, given: Tensor | None, part: ContextPart | None = None) -> Tensor | LaneLoss:
        """Run the modules of a chunk on a lane's micro-batch, or a part of its rows, and what the piece before has
        made."""
        number = chunk * self.plan.num_stages + self.number
        is_last = number == len(self.plan.pieces) - 1
        if given is not None:  # with which the state of torch's generators has come, and no other's
            seed_host_generators(zlib.crc32(self.links.generators.state().numpy().data))
        return run_piece(self.task, self.model, batch, Piece(self.plan.pieces[number], given, part, is_last))

    def losses(self, batches: Iterable[LaneBatch], device: torch.device) -> Iterator[tuple[LaneBatch, LaneLoss | None]]:
        """Run forward passes alone; yield each lane's loss on the last stage, and None on the others.

        Where stages have several chunks, a lane comes by again, and as many as there are stages go round together.
        """
        size = 1 if self.plan.num_chunks == 1 else self.plan.num_stages
        left = iter(batches)
        while num := self._num_together(found := list(islice(left, size))):
            passes = _Forward(self, found, device)
            run_schedule(self.actions(num, "forward"), self.links, passes)
            yield from zip(found, passes.losses, strict=True)
        self.links.finish()

    def passing(self, one: Pass, *, trains: bool) -> AbstractContextManager[None]:
        """Return the context of a forward pass whose tokens go to experts, wherever these are.

        If none is run in it, this rank takes part in the others' with its experts.
        """
        return self.experts[one.chunk].forward_pass(one.number, trains=trains) if self.experts else nullcontext()

    def _num_together(self, found: Sequence[LaneBatch]) -> int:
        """Return how many lanes go round together on all ranks of the stage: all keep to one schedule."""
        return self.experts[0].most(len(found)) if self.experts else len(found)


class _Forward:
    """Forward passes outside of a step."""

    def __init__(self, stage: Stage, batches: Sequence[LaneBatch], device: torch.device) -> None:
        self._stage, self._batches, self._device = stage, batches, device
        self.losses: list[LaneLoss | None] = [None] * len(batches)

    def key(self, number: int) -> Hashable | None:
        return key_of(self._batches[number], trains=False) if number < len(self._batches) else None

    def forward(self, one: Pass, given: Tensor | None) -> Tensor:
        tensors = self._batches[one.number].tensors
        assert tensors is not None, "it has samples"
        batch = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        if given is None:
            seed_validated(self._batches[one.number])
        with self._stage.passing(one, trains=False):
            made = self._stage.run(one.chunk, batch, given)
        if isinstance(made, Tensor):
            return made
        self.losses[one.number] = made
        return made.total

    def backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        """The schedule has none."""

    def left_out(self, one: Pass) -> None:
        with self._stage.passing(one, trains=False):
            pass

    def waited(self) -> None: ...


def stage_of(
    task: Running,
    model: nn.Module,
    plan: CellPlan,
    kind: Kind,
    mesh: Mesh,
    cell: Group,
    experts: Sequence[ExpertLinks] = (),
) -> Stage:
    """Return the stage of a rank in its cell."""
    number, stride = mesh.coordinates.stage, mesh.cell.stage_size
    goes_round = plan.num_chunks > 1
    before = (mesh.place - stride) % mesh.cell.size if number or goes_round else None
    after = (mesh.place + stride) % mesh.cell.size if number < plan.num_stages - 1 or goes_round else None
    device = next(model.parameters()).device
    return Stage(task, model, plan, number, kind, StageLinks(cell, before, after, device), experts)


def key_of(batch: LaneBatch, *, trains: bool = True) -> Hashable | None:
    """Return what lanes have in common whose activations have one form; None for one without samples.

    In a validation rows are whole, also where they are trained in parts, and routers add nothing to a loss.
    """
    if batch.tensors is None:
        return None
    return trains, *((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.tensors.items()))
