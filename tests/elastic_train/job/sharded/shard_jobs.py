"""Shared code for tests: a small job on sharded state, step by step, in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.lanes import lane_seed, leaf_of
from elastic_train.core.order import Cursor
from elastic_train.job import build as build_module
from elastic_train.job.build import build_state
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState, StepFacts, norm_of
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.buckets import Wire
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.tasks.task import ParameterGroup
from elastic_train.world.equal_weights import digest_of_all
from tests.fake_memory import FakeMemory
from tests.memory_machine import when_all_have_ended
from tests.memory_world import group_of

NUM_LANES, TERM = 7, 3
CLIPPING = 1e-3
"""So small that every step is clipped."""


class Net(nn.Module):
    """Several grains and odd sizes, dropout, tied weights, frozen ones, a buffer, and a parameter that no lane uses."""

    def __init__(self, widths: Sequence[int] = (301, 90)) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 250)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(250, width), nn.Dropout(0.3), nn.GELU(), nn.Linear(width, 250)) for width in widths
        )
        self.head = nn.Linear(250, 301, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(250)
        self.frozen = nn.Parameter(torch.full((5,), 2.0))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)) * self.frozen.sum()  # type: ignore[no-any-return]


GROUPS = (
    ParameterGroup(("norm.weight", "norm.bias"), lr_factor=0.5, weight_decay=0.0),
    ParameterGroup(("frozen",), is_frozen=True),
)

MUON: Mapping[str, Any] = {"name": "muon", "options": {"ns_steps": 1}}
"""Muon whose matrix products, which take CPUs seconds, are a fifth as many."""
Shards = Literal["none", "optimizer", "gradients", "parameters"]
Offloads = Literal["none", "optimizer", "all"]


def build(
    shards: Shards,
    copies: int = 2,
    *,
    seed: int = 1,
    wire: Wire = "exact",
    recipe: Mapping[str, Any] | None = None,
    offload: Offloads = "none",
    gathers: torch.dtype | None = None,
    dims: Mapping[str, int] | None = None,
) -> AppliedState:
    """Return a process's initial state; a newcomer has the same weights, from the seed.

    Offloaded state comes with a fake device, whose copies run at any time that events permit.
    """
    seed_generators(seed)
    config = OptimizerConfig(**{"lr": 0.01, "warmup_steps": 2, "clip_norm": CLIPPING, **(recipe or {})})
    parallel = ParallelConfig(shards=shards, copies=copies, bucket_mb=0.1, wire=wire, offload=offload)
    with mock.patch.object(build_module, "host_memory_of", lambda device: FakeMemory(seed)):
        how: dict[str, Any] = {"groups": GROUPS, "parallel": parallel, "gathers": gathers, "dims": dims}
        state = build_state(Net().train(), config, 50, "cpu", is_fp16=False, **how)
    when_all_have_ended(lambda: close_sums(state))
    return state


def close_sums(state: AppliedState) -> None:
    """Remove the sums' hooks from the model's parameters."""
    state.shards._close_sums()


def shards_of(state: AppliedState) -> Zero1Share:
    assert isinstance(state.shards.share, Zero1Share), "the state is sharded"
    return state.shards.share


def meet(name: str, rank: int, size: int) -> Group:
    """Return the group of the world whose ranks meet under this name."""
    return group_of(name, rank, size)


def compute(group: Group, state: AppliedState) -> Tensor:
    """Compute the next step's gradient; return this rank's measurements of it."""
    lanes = state.shards.table.assigned(NUM_LANES)[group.rank]
    return compute_lanes(state, lanes, state.shards.sum_of(group, NUM_LANES), group)


def compute_lanes(
    state: AppliedState, lanes: Sequence[int], gradients: GradientSum, world: Group, part: int = 0
) -> Tensor:
    """Compute lanes of the next step and finish the sum of all; return this rank's measurements of it.

    `part`: this rank among those that would compute some tokens of each lane.
    """
    gradients.begin()
    for lane in (*lanes, None):  # other ranks may have one lane more
        with gradients.turn(None if lane is None else leaf_of(lane, part, NUM_LANES)):
            if lane is not None:
                state.scaler.scale(loss_of(state, lane)).backward()
    world.barrier()  # the training loop gathers its tables here
    gradients.finish(3.0 * NUM_LANES)
    return state.measure()


def loss_of(state: AppliedState, lane: int) -> Tensor:
    """Return the loss on random data for a lane of the next step."""
    seed_generators(lane_seed(1, state.step, lane))
    tokens = torch.randint(0, 301, (3, 4))
    return state.model(tokens).logsumexp(-1).square().sum()  # type: ignore[no-any-return]


def facts_of(state: AppliedState, term: int = TERM) -> StepFacts:
    cursor = Cursor(epoch=0, offset=state.step + 1)
    return StepFacts(cursor, CoverageSums(), term, SampleAccount())


def train(group: Group, state: AppliedState, until: int, term: int = TERM) -> None:
    """Apply steps as the training loop does."""
    while state.step < until:
        measured = compute(group, state)
        state.apply(facts_of(state, term), norm_of(group.all_gather(measured), state.shards.table))
        state.shards.share.refresh(group)


def fingerprint(group: Group, state: AppliedState) -> str:
    """Return the digest of the weights; all ranks of the group call it."""
    return digest_of_all(state.shards, group)


def replicated(until: int, recipe: Mapping[str, Any] | None = None) -> Sequence[str]:
    """Return the weights after every step of one rank with replicated state; computed once per process."""
    return _replicated(until, json.dumps(recipe or {}))


@cache
def _replicated(until: int, recipe: str) -> Sequence[str]:
    torch.set_num_threads(1)
    state, group, found = build("none", recipe=json.loads(recipe)), Group(0, 1, None, 60), []
    for step in range(until):
        train(group, state, step + 1)
        found.append(fingerprint(group, state))
    return found
