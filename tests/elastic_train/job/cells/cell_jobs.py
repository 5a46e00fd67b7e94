"""A small job on cells of a few ranks, step by step, in memory: what its tests share.

Ranks that would compute some tokens of a lane each compute all of it here, and their sum is of as many leaves.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job import state as state_module
from elastic_train.job.cells.cell_plan import CellPlan, dims_of
from elastic_train.job.cells.cell_state import CellState
from elastic_train.job.cells.seated_cell import SeatedCellState
from elastic_train.job.reseating import bring, leave_out_unfinished, reseat_columns, roll_forward
from elastic_train.job.reseating.pending_step import settle_pending
from elastic_train.job.reseating.placing import take_place
from elastic_train.job.state import AppliedState, build_state
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import Wire
from elastic_train.tasks.task import TensorPlan
from tests.elastic_train.job.sharded.shard_jobs import (
    CLIPPING,
    GROUPS,
    NUM_LANES,
    Net,
    Offloads,
    compute_lanes,
    facts_of,
)
from tests.fake_memory import FakeMemory
from tests.memory_world import group_of

SIZE = 2
"""Ranks of a cell, unless a test says otherwise."""
CELL = Cell(tensor=SIZE)
Shards = Literal["none", "optimizer", "gradients", "parameters"]
TENSOR_PLAN: TensorPlan = {"blocks.0.0": "column", "blocks.0.3": "row", "blocks.1.0": "column", "blocks.1.3": "row"}
WIDTHS = 602, 90
"""Of matrices that are cut by columns and by rows, with several grains in some."""


class Ranks(NamedTuple):
    """The groups of one rank in one world."""

    world: Group
    cell: Group
    column: Group
    """The ranks that hold this one's part."""
    mesh: Mesh


def build(
    shards: Shards,
    copies: int = 2,
    wire: Wire = "exact",
    cell: Cell = CELL,
    *,
    offload: Offloads = "none",
    is_fp16: bool = False,
) -> AppliedState:
    """Return a state as a process begins with it; a newcomer has the same weights.

    With `is_fp16` losses are scaled as in half precision, in which nothing is computed here.
    """
    torch.manual_seed(1)
    config = OptimizerConfig(lr=0.01, warmup_steps=2, clip_norm=CLIPPING)
    degrees = {"tensor": cell.tensor, "context": cell.context}
    parallel = ParallelConfig(shards=shards, copies=copies, bucket_mb=0.1, wire=wire, offload=offload, **degrees)
    model = Net(WIDTHS).train()
    dims = dims_of(TENSOR_PLAN, model)
    plan = CellPlan(TENSOR_PLAN if cell.tensor > 1 else {}, dims=dims)
    with mock.patch.object(state_module, "host_memory_of", lambda device: FakeMemory(1)):
        return build_state(
            model, config, 50, "cpu", is_fp16=is_fp16, groups=GROUPS, parallel=parallel, cell_plan=plan, dims=dims
        )


def shards_of(state: AppliedState) -> SeatedCellState:
    assert isinstance(state.shards, SeatedCellState), "the state is in shards"
    return state.shards


def meet(name: str, rank: int, size: int, shape: Cell = CELL) -> Ranks:
    """Return the groups of a world whose ranks have this name for it; neighbours make cells."""
    mesh = Mesh(rank, size, shape)
    world = group_of(name, rank, size)
    first, (part, _) = mesh.replica * shape.size, shape.holder_of(rank)
    cell = world.part(f"cell-{mesh.replica}", range(first, first + shape.size))
    return Ranks(world, cell, world.part(f"column-{part}", mesh.by_part[part]), mesh)


def enter(ranks: Ranks, state: AppliedState, who: int, term: int) -> int:
    """Take the place and the seat that a world gives this rank; return how many shards are lost, if any."""
    plan = SimpleNamespace(first_weights=lambda: build("none", cell=ranks.mesh.cell).model.state_dict().items())
    take_place(plan, state, ranks.mesh, ranks.cell, ranks.column)  # type: ignore[arg-type]
    if isinstance(state.shards, SeatedCellState):
        brought = bring(ranks.world, state, state.shards, ("", str(who)), counts=True)
        kept, num_lost = leave_out_unfinished(state.shards, brought)
        if num_lost:
            return num_lost
        brought = list(roll_forward(ranks.world, state, state.shards, kept))
        assert not reseat_columns(ranks.column, state, state.shards, brought).size
    assert isinstance(state.shards, CellState)
    if not isinstance(state.shards, SeatedCellState):
        settle_pending(ranks.world, state, state.shards, counts=True)
    state.shards.trained_in = term
    return 0


def compute(ranks: Ranks, state: AppliedState) -> Tensor:
    """Compute the next step's gradient; return what this rank measures of it."""
    lanes = state.shards.assigned(ranks.mesh.num_replicas, NUM_LANES)[ranks.mesh.replica]
    return compute_lanes(state, lanes, state.shards.sum_of(ranks.column, NUM_LANES), ranks.world)


def train(ranks: Ranks, state: AppliedState, until: int, term: int) -> None:
    """Apply steps as the training loop does."""
    while state.step < until:
        measured = compute(ranks, state)
        state.apply(facts_of(state, term), state.shards.norm_of(ranks.world.all_gather(measured)))
        state.shards.refresh(ranks.world)


def fingerprint(ranks: Ranks, state: AppliedState) -> str:
    """Return the digest of the weights; all ranks of the world call it."""
    return state.shards.digest(ranks.world)


def elements_held(state: AppliedState) -> int:
    """Return how many numbers of moments this rank holds."""
    return sum(moment.numel() for one in shards_of(state).share.runs for moment in one.moments.values())


def elements_of_gradients(state: AppliedState) -> int:
    """Return how many numbers of the mean gradient this rank keeps after a step; none before it."""
    total = shards_of(state).share._sum
    kept = [] if total is None else total.tensors()
    return sum(tensor.numel() for part, tensor in kept if part == "gradients")
