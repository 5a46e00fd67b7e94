"""The pipeline stage that a rank runs in one world, its schedule, and the ranks before and after it."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from elastic_train.core.lanes import tree_sum
from elastic_train.core.mesh import Mesh
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job.cells.cell_plan import CellPlan
from elastic_train.job.cells.cut_model import along_axis
from elastic_train.job.units.generators import seed_host_generators, seed_validated
from elastic_train.parallel.cells.expert_links import ExpertLinks
from elastic_train.parallel.cells.links import Gathering, LoneGroup
from elastic_train.parallel.cells.pipeline import Links, Passes, StageLinks, run_program
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import Action, Kind, Pass, Pipeline, Scheduled, schedule, step_program
from elastic_train.tasks.placements import ContextPart, Piece, Running, loss_of, run_piece
from elastic_train.tasks.task import Batch, LaneLoss, Task, on_device


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage `number` of a model; it runs some of the modules, in one chunk or several.

    If `plan` names no pieces, there is one stage, which runs the whole model.
    """

    task: Task
    model: nn.Module
    plan: CellPlan = field(default_factory=CellPlan)
    number: int = 0
    kind: Kind = "1f1b"
    links: Links = field(default_factory=Links)
    experts: Sequence[ExpertLinks] = ()
    """Links to ranks of this stage with other experts, by chunk; empty if experts are not spread."""
    context: Context | None = None
    """This rank's part of each row under context parallelism; None if it computes whole rows."""

    @property
    def is_cut(self) -> bool:
        """True if other stages run the rest of the model."""
        return self.plan.num_stages > 1

    def _pipeline(self, num_turns: int, kind: Kind | None = None) -> Pipeline:
        return Pipeline(kind or self.kind, max(1, self.plan.num_stages), num_turns, self.plan.num_chunks)

    def actions(self, num_turns: int, kind: Kind | None = None) -> Sequence[Scheduled]:
        """Return the passes and transfers of `num_turns` micro-batches; `kind` overrides the schedule."""
        return schedule(self._pipeline(num_turns, kind), self.number)

    def program(self, num_turns: int) -> Sequence[Action]:
        """Return this stage's actions in a step of `num_turns` micro-batches."""
        return step_program(self._pipeline(num_turns), self.number, has_experts=bool(self.experts))

    def run(self, chunk: int, batch: Batch, given: Tensor | None, *, trains: bool = True) -> Tensor | LaneLoss:
        """Run a chunk's modules on a micro-batch and the output of the previous piece.

        With context parallelism, compute this rank's part of the rows in training, and whole rows otherwise.
        """
        context = self.context if trains else None
        if not self.is_cut:
            return self.task.loss(self.model, batch) if context is None else context.loss(self.model, batch)
        number = chunk * self.plan.num_stages + self.number
        is_last = number == len(self.plan.pieces) - 1
        if given is not None:  # only the state of torch's generators comes with it
            assert isinstance(self.links, StageLinks), "it came over them"
            seed_host_generators(zlib.crc32(self.links.generators.state().numpy().data))
        assert isinstance(self.task, Running), "it was checked"
        part = None if context is None else context.part
        return run_piece(self.task, self.model, batch, Piece(self.plan.pieces[number], given, part, is_last))

    def losses(self, batches: Iterable[LaneBatch], device: torch.device) -> Iterator[tuple[LaneBatch, LaneLoss | None]]:
        """Run forward passes only; yield each lane's loss on the last stage, None on the others.

        With several chunks per stage, lanes are run in groups of as many as there are stages.
        """
        size = 1 if self.plan.num_chunks == 1 else self.plan.num_stages
        left = iter(batches)
        while num := self._num_together(found := list(islice(left, size))):
            passes = _Forward(self, found, device)
            run_program(self.actions(num, "forward"), self.links, passes)
            yield from zip(found, passes.losses, strict=True)

    def passing(self, one: Pass, *, trains: bool) -> AbstractContextManager[None]:
        """Return the context for a pass whose tokens go to spread experts.

        If nothing runs in it, this rank still takes part with its experts.
        """
        if not self.experts:
            return nullcontext()
        links = self.experts[one.chunk]
        if one.direction == "backward":
            return links.backward_pass(one.number)
        return links.forward_pass(one.number, trains=trains)

    def _num_together(self, found: Sequence[LaneBatch]) -> int:
        """Return the number of lanes to run together, which all ranks of the stage agree on."""
        return self.experts[0].most(len(found)) if self.experts else len(found)


class _Forward(Passes):
    """Forward passes outside a training step."""

    def __init__(self, stage: Stage, batches: Sequence[LaneBatch], device: torch.device) -> None:
        self._stage, self._batches, self._device = stage, batches, device
        self.losses: list[LaneLoss | None] = [None] * len(batches)

    def key(self, number: int) -> Hashable | None:
        return key_of(self._batches[number], trains=False) if number < len(self._batches) else None

    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        with self._stage.passing(one, trains=False):
            if self.key(one.number) is None:
                return None
            made = self._run(one, given)
        if isinstance(made, Tensor):
            return made
        self.losses[one.number] = made
        return made.total

    def _run(self, one: Pass, given: Tensor | None) -> Tensor | LaneLoss:
        batch = self._batches[one.number]
        assert batch.tensors is not None, "it has samples"
        tensors = on_device(batch.tensors, self._device)
        if given is None:
            seed_validated(batch)
        return self._stage.run(one.chunk, tensors, given, trains=False)

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        """Do nothing: the schedule has no backward passes."""


def stage_of(
    task: Task,
    model: nn.Module,
    plan: CellPlan,
    kind: Kind,
    mesh: Mesh,
    cell: Group,
    experts: Sequence[ExpertLinks] = (),
    context: Context | None = None,
) -> Stage:
    """Return a rank's stage in its cell."""
    number, stride = mesh.coordinates.stage, mesh.cell.stage_size
    goes_round = plan.num_chunks > 1
    before = (mesh.place - stride) % mesh.cell.size if number or goes_round else None
    after = (mesh.place + stride) % mesh.cell.size if number < plan.num_stages - 1 or goes_round else None
    device = next(model.parameters()).device
    return Stage(task, model, plan, number, kind, StageLinks(cell, before, after, device), experts, context)


def key_of(batch: LaneBatch, *, trains: bool = True) -> Hashable | None:
    """Return the key of lanes whose activations have equal shapes; None for a lane without samples.

    Validation has its own keys: its rows are whole even under context parallelism, and routers add no loss.
    """
    if batch.tensors is None:
        return None
    return trains, *((name, tensor.shape, tensor.dtype) for name, tensor in sorted(batch.tensors.items()))


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
