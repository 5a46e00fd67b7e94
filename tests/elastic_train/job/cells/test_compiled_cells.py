"""Blocks compiled between their exchanges: one hash for any number of cells, and after a lost rank.

Ranks in memory, with a real plan, warm-up and compiler. Each process compiles before it has peers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from elastic_train.config import sources
from elastic_train.errors import PeerLostError
from elastic_train.job import gradient_norm
from elastic_train.job.plan import Plan, make_plan
from elastic_train.job.resharding.placing import take_place
from elastic_train.job.state import AppliedState
from elastic_train.job.warm_up import warm_up
from elastic_train.parallel.group import Group
from elastic_train.training.open_session import _open_stage
from elastic_train.training.step import run_lanes
from elastic_train.world.world import World, form_cells
from tests.conftest import write_rows
from tests.elastic_train.job.sharded.shard_jobs import facts_of
from tests.elastic_train.training.jobs import config
from tests.memory_machine import Machine, in_memory
from tests.memory_world import group_of

pytestmark = pytest.mark.slow
STEPS = 3
MODEL = {"vocabulary": 64, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 2, "hidden": 24, "dropout": 0.1}
EXPERTS = {"experts": 4, "shared_hidden": 8}


class Row(NamedTuple):
    """The options of a job with cells of two or four ranks."""

    parallel: dict[str, object]
    has_experts: bool = False
    is_like_one: bool = False
    """True if the degree does not change the bits, so that one rank gets the same."""
    lost_at: float = 0.15
    """When a rank is lost: the share of its exchanges that are done, of which the first third are the first step's."""

    def __str__(self) -> str:
        return "-".join(self.parallel)


ROWS = [
    pytest.param(Row({"tensor": 2, "recompute": "units"}), marks=pytest.mark.hunt),
    pytest.param(Row({"tensor": 2, "sequence": True}, lost_at=0.65), marks=pytest.mark.hunt),
    Row({"expert": 2}, has_experts=True, is_like_one=True),
    pytest.param(Row({"context": 2}, lost_at=0.65), marks=pytest.mark.hunt),
]


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """Reset the compiler; ranks as threads restore torch's stance in any order, though it is global."""
    yield
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def plan_of(folder: Path, row: Row) -> Plan:
    """Return the plan of a job with rows of one length, six lanes, and compiled blocks."""
    params = {"model": {**MODEL, **(EXPERTS if row.has_experts else {})}, "max_tokens": 16, "fixed_width": True}
    job: dict[str, object] = {
        "task": {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": params},
        "batch": {"global_batch": 24, "micro_batch": 4},
        "optimizer": {"lr": 0.01, "clip_norm": 1e-3},
        "epochs": 1,
        "parallel": row.parallel,
        "compile": True,
    }
    write_rows(folder / "rows" / "train", 97, seed=1)
    write_rows(folder / "rows" / "validation", 5, seed=2)
    return make_plan(sources.load(Path(config(folder, folder / "rows", job)), environ={}, arguments=[]))


def enter(plan: Plan, state: AppliedState, group: Group, term: int) -> World:
    """Form the cells of a world, and take this rank's place in them."""
    nothing: Any = None
    world = World(group, term, nothing, nothing, nothing, nothing, nothing, 0.0, save_store=nothing)
    world = form_cells(world, plan.config.parallel)
    take_place(plan, state, world.mesh, world.cell)
    return world


def train(plan: Plan, state: AppliedState, world: World) -> str:
    """Apply steps as the training loop does; return the digest of the weights."""
    shards, mesh = state.shards, world.mesh
    assigned = mesh.assigned(plan.num_lanes)
    gradients = shards.sum_of(world.owners, plan.num_lanes, column=world.holders)
    session: Any = SimpleNamespace(
        plan=plan,
        world=world,
        state=state,
        gradients=gradients,
        buffers=mock.Mock(has_changed=False, lane=lambda lane, is_empty: contextlib.nullcontext(), digest=lambda: 0),
        assigned=assigned,
        stage=_open_stage(plan, world, state),
        auditor=None,
        first=None,
        to_device=lambda tensors: tensors,
        clock=mock.Mock(),
    )
    while state.step < STEPS:
        cursor = plan.order.cursor_at(state.step, plan.micro_batch)
        [batches] = plan.feed.training(plan.order, assigned[mesh.owner], cursor, num_steps=1)
        run_lanes(session, batches)
        world.group.barrier()
        gradients.finish(300.0)
        state.apply(facts_of(state), gradient_norm.norm_of(world.group.all_gather(state.measure()), shards.table))
    return shards.digest(world.group)


def live(who: int, num: int, plan: Plan) -> tuple[str, int] | None:
    """Train in a world, and after a lost rank in one of complete cells without the last; return the hash and the number
    of uncompiled calls."""
    torch.set_num_threads(1)
    state, cell = plan.build_state(), plan.config.parallel.cell
    warm_up(plan, state)
    assert state.compiled is not None
    try:
        digest = train(plan, state, enter(plan, state, whole := group_of("whole", who, num), 1))
    except PeerLostError:
        whole.abandon()
        if who >= (num := num - cell.size):
            return None
        digest = train(plan, state, enter(plan, state, group_of("left", who, num), 2))
    return digest, state.compiled._num_plain


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_is_compiled_between_exchanges_has_one_hash_in_any_world(row: Row, tmp_path: Path) -> None:
    """The last rank is lost in a pass; its cell leaves with it, and the other computes all lanes."""
    plan = plan_of(tmp_path, row)
    size = plan.config.parallel.cell.size
    machine = Machine(2 * size)
    seen = {*in_memory(live, size, plan), *machine.run(lambda who: live(who, 2 * size, plan))}
    if row.is_like_one:
        seen.update(in_memory(live, 1, plan_of(tmp_path / "one", row._replace(parallel={}))))
    [seen_in_all] = seen
    assert seen_in_all is not None and seen_in_all[1] == 0, "no call was left to kernels that are not compiled"
    after = int(row.lost_at * machine.num_exchanges[-1])
    found = {one for one in in_memory(live, 2 * size, plan, lose=(2 * size - 1, after)) if one}
    assert found == seen, f"lost at exchange {after}"
