"""Shared code for tests: a small job on cells of a few ranks, step by step, in memory.

Context-parallel ranks each compute all tokens of a lane here, so that their sum has as many leaves. Stages, ranks with
some of the experts, and sequence-parallel ranks run a decoder as the training loop does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Literal, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.lanes import Assignment, lane_seed
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job import build as build_module
from elastic_train.job import gradient_norm
from elastic_train.job.build import build_state
from elastic_train.job.cells.cell_plan import CellPlan, cell_plan_of, dims_of
from elastic_train.job.cells.context import Context
from elastic_train.job.cells.cut_model import along_axis
from elastic_train.job.cells.stage import Stage, stage_of
from elastic_train.job.resharding import gather_peer_states, leave_out_unfinished, roll_forward, take_state
from elastic_train.job.resharding.placing import take_place
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.cells.context_links import Gathering
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import Wire
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.decoder.model import Decoder
from elastic_train.tasks.decoder.shape import DecoderShape
from elastic_train.tasks.placements import ContextPart, Use
from elastic_train.tasks.task import ParameterGroup
from elastic_train.training.session import Session
from elastic_train.training.step import run_lanes
from tests.elastic_train.job.sharded.shard_jobs import (
    CLIPPING,
    GROUPS,
    NUM_LANES,
    Net,
    Offloads,
    close_sums,
    compute_lanes,
    facts_of,
)
from tests.fake_memory import FakeMemory
from tests.memory_machine import when_all_have_ended
from tests.memory_world import group_of

SIZE = 2
"""Ranks per cell, unless a test says otherwise."""
CELL = Cell(tensor=SIZE)
Shards = Literal["none", "optimizer", "gradients", "parameters"]
USES: Mapping[str, Use] = {"blocks.0.0": "column", "blocks.0.3": "row", "blocks.1.0": "column", "blocks.1.3": "row"}
WIDTHS = 602, 90
"""Sizes of matrices that are cut by columns and by rows, with several grains in some."""
SIZES = {"dim": 16, "depth": 4, "heads": 2, "tied": False, "experts": 4, "expert_hidden": 6, "dropout": 0.3}
TASK = CausalLM(model=SIZES, balance_loss=0.1, router_z_loss=0.01)
TOKEN_SIZES = {**SIZES, "experts": 0, "depth": 2}
TOKENS_TASK = CausalLM(model=TOKEN_SIZES)
EMPTY_LANE = 3
Kind = Literal["1f1b", "gpipe", "interleaved"]


class Ranks(NamedTuple):
    """The groups of one rank in one world."""

    world: Group
    cell: Group
    column: Group
    """The ranks that hold the same parameter shard as this one."""
    owners: Group
    """The ranks that sum the same gradients as this one, experts excepted."""
    tokens: Group
    """The ranks that compute the same rows as this one."""
    mesh: Mesh


def build(
    shards: Shards,
    copies: int = 2,
    wire: Wire = "exact",
    cell: Cell = CELL,
    *,
    offload: Offloads = "none",
    is_fp16: bool = False,
    schedule: Kind = "1f1b",
    sequence: bool = False,
) -> AppliedState:
    """Return a process's initial state; a newcomer has the same weights.

    With `is_fp16` losses are scaled as in half precision, though nothing is computed in it here.
    """
    seed_generators(1)
    config = OptimizerConfig(lr=0.01, warmup_steps=2, clip_norm=CLIPPING)
    degrees = {"tensor": cell.tensor, "context": cell.context, "pipeline": cell.stage, "expert": cell.expert}
    how = {
        "shards": shards,
        "copies": copies,
        "wire": wire,
        "offload": offload,
        "schedule": schedule,
        "sequence": sequence,
    }
    parallel = ParallelConfig.model_validate({"bucket_mb": 0.1, **how, **degrees})
    if runs_decoder(cell) or sequence:
        task, sizes = (TOKENS_TASK, TOKEN_SIZES) if sequence else (TASK, SIZES)
        model: nn.Module = Decoder(DecoderShape(vocabulary=11, **sizes)).train()  # type: ignore[arg-type]
        plan, groups = cell_plan_of(task, model, parallel), list[ParameterGroup]()
        assert plan is not None, "it has cells"
    else:
        model, groups = Net(WIDTHS).train(), [*GROUPS]
        plan = CellPlan(USES if cell.tensor > 1 else {}, dims=dims_of(USES, model))
    with mock.patch.object(build_module, "host_memory_of", lambda device: FakeMemory(1)):
        state = build_state(model, config, 50, "cpu", is_fp16, groups, parallel, plan)
    when_all_have_ended(lambda: close_sums(state))
    return state


def runs_decoder(cell: Cell) -> bool:
    """Return True if cells of a shape run a decoder here."""
    return cell.stage * cell.expert > 1


def share_of(state: AppliedState) -> Zero1Share:
    assert isinstance(state.shards.share, Zero1Share), "the state is in shards"
    return state.shards.share


def meet(name: str, rank: int, size: int, shape: Cell = CELL) -> Ranks:
    """Return the groups of the world whose ranks meet under this name; neighbours form cells."""
    mesh = Mesh(rank, size, shape)
    world = group_of(name, rank, size)
    first, (part, _) = mesh.replica * shape.size, shape.holder_of(rank)
    cell = world.part(f"cell-{mesh.replica}", range(first, first + shape.size))
    column, across = world.part(f"column-{part}", mesh.by_part[part]), mesh.across("expert")
    owners = column if shape.expert == 1 else world.part(f"owners-{across[0]}", across)
    return Ranks(world, cell, column, owners, along_axis(cell, mesh, "context"), mesh)


def enter(ranks: Ranks, state: AppliedState, who: int, term: int) -> int:
    """Take the rank's place and shards in a world; return the number of lost shards, if any."""
    shape = ranks.mesh.cell
    sequence = bool(state.shards.cut.plan.shares_tokens)
    first = lambda: build("none", cell=shape, sequence=sequence).model.state_dict().items()  # noqa: E731
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


def compute(ranks: Ranks, state: AppliedState, schedule: Kind = "1f1b") -> Tensor:
    """Compute the next step's gradient; return this rank's measurements of it."""
    assigned = state.shards.table.assigned(NUM_LANES)
    lanes, gradients = assigned[ranks.mesh.owner], state.shards.sum_of(ranks.owners, NUM_LANES, column=ranks.column)
    if not isinstance(state.model, Decoder):
        return compute_lanes(state, lanes, gradients, ranks.world, ranks.mesh.coordinates.context)
    run_lanes(_session_of(ranks, state, gradients, assigned, schedule), [_batch_of(state, lane) for lane in lanes])
    ranks.world.barrier()  # the training loop gathers its tables here
    gradients.finish(3.0 * NUM_LANES)
    return state.measure()


def _session_of(
    ranks: Ranks, state: AppliedState, gradients: GradientSum, assigned: Assignment, schedule: Kind
) -> Session:
    """Return a session with all that the training loop needs to run a decoder's lanes."""
    cut, mesh, config = state.shards.cut, ranks.mesh, SimpleNamespace(run=SimpleNamespace(seed=1))
    task, context = TASK, None
    if cut.plan.shares_tokens:
        part = ContextPart(ranks.tokens.rank, ranks.tokens.size, Gathering(ranks.tokens), mesh.cell.tensor)
        task, context = TOKENS_TASK, Context(TOKENS_TASK, part, ranks.tokens) if mesh.cell.context > 1 else None
    if mesh.cell.stage > 1:
        stage = stage_of(task, state.model, cut.plan, schedule, mesh, ranks.cell, cut.experts, context)
    else:
        stage = Stage(task, state.model, experts=cut.experts, context=context)
    return SimpleNamespace(  # type: ignore[return-value]
        plan=SimpleNamespace(
            config=config,
            task=task,
            num_lanes=NUM_LANES,
            autocast=contextlib.nullcontext,
            keep_casts=contextlib.nullcontext,
        ),
        world=SimpleNamespace(mesh=mesh, cell=ranks.cell),
        state=state,
        gradients=gradients,
        buffers=mock.Mock(has_changed=False, lane=lambda lane, is_empty: contextlib.nullcontext(), digest=lambda: 0),
        lanes=assigned[mesh.owner],
        assigned=assigned,
        stage=stage,
        auditor=None,
        first=None,
        to_device=lambda tensors: tensors,
        clock=mock.Mock(),
    )


def _batch_of(state: AppliedState, lane: int) -> LaneBatch:
    """Return a micro-batch of the next step; one lane has no samples."""
    if lane == EMPTY_LANE:
        return LaneBatch(lane, 0, 0, 0, np.empty(0, np.int64), None)
    generator = torch.Generator().manual_seed(lane_seed(1, state.step, lane))
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    tensors = {"tokens": tokens, "places": torch.arange(9), "targets": tokens.flatten()[1:]}
    return LaneBatch(lane, 0, 0, 2, np.arange(2), tensors)


def train(ranks: Ranks, state: AppliedState, until: int, term: int, schedule: Kind = "1f1b") -> None:
    """Apply steps as the training loop does."""
    while state.step < until:
        measured = compute(ranks, state, schedule)
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
