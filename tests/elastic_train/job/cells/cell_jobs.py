"""Shared code for tests: a small job on cells of a few ranks, step by step, in memory.

Context-parallel ranks each compute all tokens of a lane here, so that their sum has as many leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Literal, NamedTuple

from torch import Tensor

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job import gradient_norm
from elastic_train.job.build import build_state
from elastic_train.job.cells.cell_plan import CellPlan, dims_of
from elastic_train.job.resharding import gather_peer_states, leave_out_unfinished, roll_forward, take_state
from elastic_train.job.resharding.placing import take_place
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import Wire
from elastic_train.tasks.placements import Use
from tests.elastic_train.job.sharded.shard_jobs import (
    CLIPPING,
    GROUPS,
    NUM_LANES,
    Net,
    close_sums,
    compute_lanes,
    facts_of,
)
from tests.memory_machine import when_all_have_ended
from tests.memory_world import group_of

SIZE = 2
"""Ranks per cell, unless a test says otherwise."""
CELL = Cell(tensor=SIZE)
Shards = Literal["none", "optimizer", "gradients", "parameters"]
USES: Mapping[str, Use] = {"blocks.0.0": "column", "blocks.0.3": "row", "blocks.1.0": "column", "blocks.1.3": "row"}
WIDTHS = 602, 90
"""Sizes of matrices that are cut by columns and by rows, with several grains in some."""


class Ranks(NamedTuple):
    """The groups of one rank in one world."""

    world: Group
    cell: Group
    column: Group
    """The ranks that hold the same parameter shard as this one."""
    mesh: Mesh


def build(shards: Shards, copies: int = 2, wire: Wire = "exact", cell: Cell = CELL) -> AppliedState:
    """Return a process's initial state; a newcomer has the same weights."""
    seed_generators(1)
    config = OptimizerConfig(lr=0.01, warmup_steps=2, clip_norm=CLIPPING)
    parallel = ParallelConfig(
        bucket_mb=0.1, shards=shards, copies=copies, wire=wire, tensor=cell.tensor, context=cell.context
    )
    model = Net(WIDTHS).train()
    plan = CellPlan(USES if cell.tensor > 1 else {}, dims=dims_of(USES, model))
    state = build_state(model, config, 50, "cpu", is_fp16=False, groups=[*GROUPS], parallel=parallel, cell_plan=plan)
    when_all_have_ended(lambda: close_sums(state))
    return state


def share_of(state: AppliedState) -> Zero1Share:
    assert isinstance(state.shards.share, Zero1Share), "the state is in shards"
    return state.shards.share


def meet(name: str, rank: int, size: int, shape: Cell = CELL) -> Ranks:
    """Return the groups of the world whose ranks meet under this name; neighbours form cells."""
    mesh = Mesh(rank, size, shape)
    world = group_of(name, rank, size)
    first, (part, _) = mesh.replica * shape.size, shape.holder_of(rank)
    cell = world.part(f"cell-{mesh.replica}", range(first, first + shape.size))
    return Ranks(world, cell, world.part(f"column-{part}", mesh.by_part[part]), mesh)


def enter(ranks: Ranks, state: AppliedState, who: int, term: int) -> int:
    """Take the rank's place and shards in a world; return the number of lost shards, if any."""
    shape = ranks.mesh.cell
    first = lambda: build("none", cell=shape).model.state_dict().items()  # noqa: E731
    plan = SimpleNamespace(first_weights=first)
    take_place(plan, state, ranks.mesh, ranks.cell)  # type: ignore[arg-type]
    brought = gather_peer_states(ranks.world, state, state.shards, ("", str(who)))
    kept, num_lost = leave_out_unfinished(state.shards, brought)
    if num_lost:
        return num_lost
    brought = list(roll_forward(ranks.world, state, state.shards, kept))
    assert not take_state(ranks.column, state, state.shards, brought).lost.size
    state.shards.trained_in = term
    return 0


def compute(ranks: Ranks, state: AppliedState) -> Tensor:
    """Compute the next step's gradient; return this rank's measurements of it."""
    lanes = state.shards.table.assigned(NUM_LANES)[ranks.mesh.owner]
    gradients = state.shards.sum_of(ranks.column, NUM_LANES)
    return compute_lanes(state, lanes, gradients, ranks.world, ranks.mesh.coordinates.context)


def train(ranks: Ranks, state: AppliedState, until: int, term: int) -> None:
    """Apply steps as the training loop does."""
    while state.step < until:
        measured = compute(ranks, state)
        state.apply(facts_of(state, term), gradient_norm.norm_of(ranks.world.all_gather(measured), state.shards.table))
        state.shards.share.refresh(ranks.column)


def fingerprint(ranks: Ranks, state: AppliedState) -> str:
    """Return the digest of the weights; all ranks of the world call it."""
    return state.shards.digest(ranks.world)


def elements_held(state: AppliedState) -> int:
    """Return the number of moment elements that this rank holds."""
    return sum(moment.numel() for one in share_of(state).runs for moment in one.moments.values())


def elements_of_gradients(state: AppliedState) -> int:
    """Return the number of elements of the mean gradient that this rank keeps after a step; 0 before the first."""
    total = state.shards._sum
    kept = [] if total is None else total.tensors()
    return sum(tensor.numel() for part, tensor in kept if part == "gradients")
