"""Computation and tensor files."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from chaos.sim.job.host import Host
from chaos.sim.job.install.stand_ins import Replacement, within
from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled import commit_files, piece_files, training
from chaos.sim.modelled.memory import Known, memory_of
from chaos.sim.modelled.same_shares import CountedBuffers, RealSum, SameShares
from chaos.sim.modelled.state import ModelledState
from chaos.sim.modelled.tiny_cells import SameColumns, TinyCut
from elastic_train.checkpoint.commits import record
from elastic_train.config.schema import Config
from elastic_train.core.accounting import CoverageSums
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.job import peer_states
from elastic_train.job.cells.stage import Stage
from elastic_train.job.state import AppliedState, norm_of
from elastic_train.parallel import group
from elastic_train.program.schedules import Pass
from elastic_train.system.failpoints import reach
from elastic_train.training import step as training_step
from elastic_train.training import step_sums
from elastic_train.training.session import Session
from elastic_train.training.step import ForwardOutput
from elastic_train.training.step_sums import LaneSums
from elastic_train.world import agreement
from elastic_train.world.world import World

_FORWARD = training_step._Turns.forward
_NORM_OF = norm_of
NUM_LANES_READ = 1 << 12
"""Cached lanes of steps that some process has still to count; all readers share them."""


def tensors(host: Host, *, is_planted: bool) -> Iterable[Replacement]:
    """Yield replacements for computation and tensor files; `is_planted` is True if product code has a planted bug."""

    coverage_of_lane = memory_of(training.sums_of, NUM_LANES_READ)

    def gradient_sum(state: ModelledState | AppliedState, kind: str, world: World, lanes: int) -> training.SampleCounts:
        owners = world.owners
        assert isinstance(owners, SimGroup), "all groups are simulated"
        if isinstance(state, AppliedState):
            return RealSum(state, owners, world.holders, lanes)
        if host.shape.vectors:
            return training.VectorSum(state.model, owners, lanes)
        return training.ModelledSum(state.model, owners)

    def forward(session: Session, batch: LaneBatch, chunk: int, given: Tensor | None) -> ForwardOutput:
        sums = session.gradients
        assert isinstance(sums, training.SampleCounts)
        sums.add(batch.ids)
        coverage = coverage_of_lane(batch.ids)
        step = session.state.step
        loss = math.nan if host.takes_loss_away(step) else float(coverage.sum_a % 65521 + step)
        return ForwardOutput(None, LaneSums(loss, float(coverage.count)))

    def coverage_of(lanes: Sequence[LaneBatch]) -> CoverageSums:
        return sum((coverage_of_lane(batch.ids) for batch in lanes), CoverageSums())

    def first_forward(passes: training_step._Turns, one: Pass, given: Tensor | None) -> Tensor | None:
        if one.number == 0 and (num_lanes := len(passes._session.lanes)):
            reach("forward")
            host.compute(num_lanes)
            reach("backward")
        return _FORWARD(passes, one, given)

    yield from within(
        "elastic_train.training.open_session",
        sum_of_gradients=gradient_sum,
        # Every rank of a cell computes its lanes whole.
        _open_stage=lambda plan, world, state: Stage(plan.task, state.model),
    )
    decided, deciding = Known(), agreement.deciding
    yield from within(
        "elastic_train.world.agreement",
        kernels_of=lambda device: {"device": device.type},
        # All processes share one plan, but their code versions may differ.
        deciding=lambda plan: decided(agreement._version("elastic-train"), lambda: deciding(plan)),
    )
    yield from within(
        "elastic_train.training.step", _coverage_of=coverage_of, fold=memory_of(step_sums.fold), _forward=forward
    )
    yield training_step._Turns, "forward", first_forward
    for name in ("identity", "to_yaml"):  # all processes share one configuration
        yield Config, name, memory_of(getattr(Config, name))
    yield from within("elastic_train.parallel.group", _objects_in=memory_of(group._objects_in))
    yield from within("elastic_train.training.step_sums", _read_tables=memory_of(step_sums._read_tables))
    yield from _files(host)
    yield from _of_cells()
    if host.plan.is_tiny:
        yield from _of_real_models(SameShares(is_planted=is_planted))


def _files(host: Host) -> Iterable[Replacement]:
    """Replace tensor files, and the commit plans of ranks that write pieces of tensors."""
    yield from within(
        "elastic_train.checkpoint.format.layout",
        LEAST_PART_BYTES=host.shape.least_part_bytes,
        plan_attempt=commit_files.plan_attempt,
    )
    written = {"write_part": commit_files.write_part, "finish_attempt": commit_files.finish_attempt}
    yield from within("elastic_train.checkpoint.commits.writer", **written, library_versions=dict)
    snapshot = functools.partial(commit_files.SlowSnapshot, host.copy)
    yield from within("elastic_train.checkpoint.saving.background_saves", Snapshot=snapshot)
    yield from within("elastic_train.checkpoint.saving.save_thread", write_part=commit_files.write_part)
    if host.plan.is_tiny or host.shape.cell > 1:  # ranks write pieces of tensors
        for module in ("saving.background_saves", "commits.writer"):
            yield from within(f"elastic_train.checkpoint.{module}", Planner=piece_files.PiecePlanner)
    yield from within("elastic_train.checkpoint.commits.reader", decode=functools.lru_cache(64)(record.decode))
    yield from within("elastic_train.checkpoint.format.reading", read_leaves=commit_files.read_leaves)


def _of_cells() -> Iterable[Replacement]:
    """Compute once what all ranks of a world derive from gathered data."""
    yield from within("elastic_train.training.step", norm_of=memory_of(_NORM_OF))
    yield from within("elastic_train.job.peer_states", _read=memory_of(peer_states._read))


def _of_real_models(same: SameShares) -> Iterable[Replacement]:
    """Replace the commit plan of a real model, count samples in its buffers, and compute shards once."""
    yield from within("elastic_train.job.reshard", seats_at=same.seats_of, _plan_of=same.plan_of)
    yield from within("elastic_train.placement.table", Seating=same.seating, owned_of=same.owned_of)
    yield from within("elastic_train.world.restore", leave_out_unfinished=same.leave_out_unfinished)
    yield from within("elastic_train.job.state_shards", written_of=same.written_of)
    columns_of = SameColumns().of
    yield from within("elastic_train.job.build", slots_of=same.slots_of, CutModel=TinyCut, columns_of=columns_of)
    yield from within(
        "elastic_train.training.open_session", open_buffers=lambda plan, world, state, *_: CountedBuffers(state)
    )
