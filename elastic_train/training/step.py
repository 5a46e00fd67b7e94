"""One step's sums: run this replica's lanes, share the results with all ranks, and leave the step's mean gradient.

`run_lanes` is the seam: what makes a gradient out of lanes, one lane after another, or along a pipeline's schedule, in
which a rank runs its stage of each. Nothing of the applied state changes here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s, ranges_of
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lanes import lane_seed
from elastic_train.core.mixture.account import sums_of_sources
from elastic_train.core.mixture.dealing import Mixture, RunOrder
from elastic_train.core.schedules import Pass
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import ConfigError, PeerLostError
from elastic_train.job.auditing.auditor import WrongGradient
from elastic_train.job.cells.context import Context
from elastic_train.job.cells.stage import Stage, key_of
from elastic_train.job.generators import seed_generators
from elastic_train.parallel.cells.chunk_sum import by_chunk
from elastic_train.parallel.cells.pipeline import run_schedule
from elastic_train.parallel.group import Group
from elastic_train.parallel.step_tables import Row, StepTables, gather_tables
from elastic_train.system.failpoints import reach
from elastic_train.tasks.task import Batch, LaneLoss, weight_of
from elastic_train.training.session import Session
from elastic_train.training.step_sums import (
    ABLE,
    BUFFERS,
    BUSY,
    COMMIT,
    GIVE_UP,
    GROW,
    LEAVE,
    STOP,
    UNABLE,
    UNREADABLE,
    LaneSums,
    StepSums,
    fold,
)


class Unread(NamedTuple):
    """What one lane gave, as `LaneSums`, while its loss is still being computed by a device."""

    loss: Tensor
    weight: float
    buffers: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that is ready to be applied, unless it is unreadable or wrong; `flags` are this rank's own."""

    sums: StepSums
    flags: int
    buffers: Sequence[tuple[Tensor, Tensor]]
    wrong: Sequence[WrongGradient] = ()
    """What audits have found, alike on all ranks."""


def compute_step(session: Session, lanes: Sequence[LaneBatch]) -> Computed:
    """Run forward and backward of this replica's lanes and leave the whole step's mean gradient in the parameters.

    Where a rank cannot read a sample of the step, all learn of it together, and the gradient is left unfinished. Where
    a forward pass has changed a buffer for the first time, all ranks run their lanes once more, the buffers in the sum.
    """
    if session.plan.config.run.forensic and session.world.mesh.speaks:
        _keep_ids(session, lanes)
    if session.auditor is not None:
        session.auditor.begin()
    while True:
        results = run_lanes(session, lanes)
        # As late as can be: a request to leave or to join, in the midst of a long step, need not wait for the next one.
        flags = _flags(session, lanes)
        reach("reduce")
        sums = fold(_gather(session, lanes, results, flags))
        session.clock.mark("wait")
        if not sums.any_flags & BUFFERS or sums.is_unreadable:
            break
        session.buffers.track()
    if sums.is_unreadable:
        return Computed(sums, flags, ())
    buffers = _exchange(session, sums)
    return Computed(sums, flags, buffers, () if session.auditor is None else session.auditor.compare(session.holes))


def _exchange(session: Session, sums: StepSums) -> Sequence[tuple[Tensor, Tensor]]:
    """Finish the sums over all replicas; return what the buffers become."""
    reach("exchange")
    session.gradients.finish(sums.divisor)
    buffers = session.buffers.finish(sums.buffers)
    session.clock.mark("exchange")
    return buffers


def meet(session: Session, measured: Tensor) -> tuple[Tensor | None, PeerLostError | None]:
    """Return the norm of the step's gradient once every rank holds it: the point of no return.

    No rank applies a step before it knows that all others can. So what a lost rank had applied, the others apply, too:
    where a peer is lost here, its error is returned beside the norm, and this rank leaves the world after it has
    applied the step. Where only peers know the rest of the norm it is None: the next world decides (`job.reseating`).
    Raises PeerLostError in restart mode, whose next world begins with a commit, and WeightsDifferError if ranks that
    should have measured the same have not.
    """
    shards = session.state.shards
    try:
        gathered = session.world.group.all_gather(measured)
    except PeerLostError as error:
        if not session.worlds.is_live:
            raise
        return shards.norm_alone(measured), error
    return shards.norm_of(gathered), None


def run_lanes(session: Session, lanes: Sequence[LaneBatch]) -> dict[int, LaneSums]:
    """Add the gradients and buffers of this replica's lanes to the step's sums; return what each lane gave.

    Where one of the ranks that compute lanes together cannot read a sample, they have none to train on: such a step is
    not applied, and they take part in what it exchanges with others.
    """
    if session.world.cell is not None and not _is_readable(session.world.cell, lanes):
        lanes = [replace(batch, tensors=None) for batch in lanes]
    session.gradients.begin(session.lanes)
    session.buffers.begin(session.lanes)
    results: dict[int, LaneSums | Unread] = {}
    if session.stage is not None:
        results = _run_stage(session, session.stage, lanes)
    else:
        for batch in lanes:
            with session.gradients.lane(batch.lane), session.buffers.lane(batch.lane, is_empty=batch.tensors is None):
                results[batch.lane] = _run_lane(session, batch)
    read, session.lane = _read(results), None
    session.clock.mark("backward")
    session.gradients.serve()
    session.buffers.restore()
    return read if session.context is None else _add_parts(session, session.context, read)


def _add_parts(session: Session, context: Context, results: dict[int, LaneSums]) -> dict[int, LaneSums]:
    """Return what lanes give, of what each rank of the cell has computed of their tokens."""
    if session.buffers.has_changed:
        raise ConfigError(
            "the model's forward pass changes a buffer, from which rows in parts would get another value on each rank: "
            "set parallel.context to 1"
        )
    session.clock.mark("rest")
    added = context.add_up({lane: (one.loss, one.weight) for lane, one in results.items()})
    session.clock.mark("wait")
    return {lane: replace(one, loss=added[lane][0], weight=added[lane][1]) for lane, one in results.items()}


def _given(loss: Tensor, weight: float, buffers: int = 0) -> LaneSums | Unread:
    """Return what a lane gave; where a device computes it, without waiting: the next lane is asked for meanwhile."""
    loss = loss.detach()
    return Unread(loss, weight, buffers) if loss.is_cuda else LaneSums(float(loss), weight, buffers)


def _read(results: Mapping[int, LaneSums | Unread]) -> dict[int, LaneSums]:
    """Return what lanes gave, once a device has computed it, and all that it was asked before."""
    unread = [one.loss.double().reshape(()) for one in results.values() if isinstance(one, Unread)]
    losses = iter(torch.stack(unread).tolist() if unread else ())
    return {
        lane: LaneSums(next(losses), one.weight, one.buffers) if isinstance(one, Unread) else one
        for lane, one in results.items()
    }


def _is_readable(cell: Group, lanes: Sequence[LaneBatch]) -> bool:
    """Say whether all ranks of a cell have all samples of its lanes, alike on all of them."""
    return not bool(cell.all_gather(torch.tensor(int(any(batch.unreadable for batch in lanes)))).any())


def _run_stage(session: Session, stage: Stage, lanes: Sequence[LaneBatch]) -> dict[int, LaneSums | Unread]:
    """Run this rank's stage of its replica's lanes; the last stage alone learns what they give."""
    passes = _StagePasses(session, stage, lanes)
    session.clock.mark("rest")
    # All ranks keep to one schedule: those of a stage exchange gradients with those of others in it, pass by pass.
    run_schedule(stage.actions(max(map(len, session.assigned))), stage.links, passes)
    stage.links.finish()
    session.clock.mark("wait")
    return passes.results


def _num_turns(session: Session) -> int:
    """Return how many lanes those of this cell's ranks have that have most."""
    mesh = session.world.mesh
    first = mesh.replica * mesh.cell.expert
    return max(len(lanes) for lanes in session.assigned[first : first + mesh.cell.expert])


class _StagePasses:
    """The passes of a stage within a step."""

    def __init__(self, session: Session, stage: Stage, lanes: Sequence[LaneBatch]) -> None:
        self._session, self._stage, self._lanes = session, stage, lanes
        self._keys, self._sums = [key_of(batch) for batch in lanes], by_chunk(session.gradients)
        self._num_turns = _num_turns(session)
        self.results: dict[int, LaneSums | Unread] = {batch.lane: LaneSums() for batch in lanes}

    def key(self, number: int) -> Hashable | None:
        return self._keys[number] if number < len(self._keys) else None

    def forward(self, one: Pass, given: Tensor | None) -> Tensor:
        session, batch = self._session, self._lanes[one.number]
        session.lane = batch.lane
        assert batch.tensors is not None, "it has samples"
        if given is None:  # with what is given comes the generator's state
            _seed(session, batch.lane)
        tensors = session.to_device(batch.tensors)
        session.clock.mark("to_device")
        reach("forward")
        part = None if session.context is None else session.context.part
        with session.plan.autocast(), self._stage.passing(one, trains=True):
            made = self._stage.run(one.chunk, tensors, given, part)
        session.clock.mark("forward")
        if isinstance(made, Tensor):
            return made
        self.results[batch.lane] = _given(made.total, weight_of(made))
        return session.state.scaler.scale(made.total)

    def backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        lane = self._session.lane = self._lanes[one.number].lane
        reach("backward")
        with self._sums[one.chunk].lane(lane):
            if made.requires_grad:
                with _audited(self._session, lane):
                    torch.autograd.backward(made, gradient)
        self._session.clock.mark("backward")

    def left_out(self, one: Pass) -> None:
        """Take part in what others do with their lanes; where they have one more, this rank has none left."""
        total = self._sums[one.chunk]
        if one.direction == "forward":
            if one.number >= self._num_turns:
                return
            with self._stage.passing(one, trains=True):
                pass
        elif one.number < len(self._lanes):
            with total.lane(self._lanes[one.number].lane):
                pass
        else:
            total.serve()

    def waited(self) -> None:
        self._session.clock.mark("wait")


def _run_lane(session: Session, batch: LaneBatch) -> LaneSums | Unread:
    """Add one lane's gradient. A lane without samples adds zero."""
    if batch.tensors is None:
        return LaneSums()
    clock, context, session.lane = session.clock, session.context, batch.lane
    clock.mark("rest")
    _seed(session, batch.lane)
    tensors = session.to_device(batch.tensors)
    clock.mark("to_device")
    reach("forward")
    compute = session.plan.task.loss if context is None else context.loss
    first, session.first = session.first, None
    with session.plan.autocast(), contextlib.nullcontext() if first is None else first.watching():
        loss = compute(session.state.model, tensors)
    clock.mark("forward")
    reach("backward")
    with _audited(session, batch.lane):
        torch.autograd.backward(session.state.scaler.scale(loss.total))
    if first is not None:
        first.check(loss, lambda: _again(session, batch.lane, tensors))
    given = _given(loss.total, weight_of(loss), session.buffers.digest())
    clock.mark("backward")
    return given


def _again(session: Session, lane: int, tensors: Batch) -> LaneLoss:
    """Compute a lane's loss another time."""
    _seed(session, lane)
    with session.plan.autocast():
        return session.plan.task.loss(session.state.model, tensors)


def _seed(session: Session, lane: int) -> None:
    """Begin the random numbers of a lane, or of this rank's part of it."""
    leaf = lane if session.context is None else session.context.leaf(lane)
    seed_generators(lane_seed(session.plan.config.run.seed, session.state.step, leaf))


def _audited(session: Session, lane: int) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a lane's backward pass is looked at, if it is to be."""
    return contextlib.nullcontext() if session.auditor is None else session.auditor.watching(lane)


def _flags(session: Session, lanes: Sequence[LaneBatch]) -> int:
    """Return what this rank asks of the others with the step whose lanes it has run."""
    flags = LEAVE * session.leave.is_set + GROW * session.worlds.wants_to_grow() + BUSY * session.commits.is_busy
    flags += COMMIT * session.commits.is_overdue() + GIVE_UP * session.commits.is_hopeless()
    flags += BUFFERS * (session.buffers.has_changed and not session.buffers.is_tracking)
    flags += UNABLE * session.commits.is_unable() + ABLE * session.commits.is_vouching
    flags += STOP * (session.watch is not None and session.watch.wants_to_stop)
    return flags + UNREADABLE * any(batch.unreadable for batch in lanes)


def _gather(session: Session, lanes: Sequence[LaneBatch], results: dict[int, LaneSums], flags: int) -> StepTables:
    """Gather the rows of all lanes and ranks."""
    rows: dict[int, Row] = {}
    for batch in lanes:
        lane, has_samples = results[batch.lane], int(batch.tensors is not None)
        rows[batch.lane] = [lane.loss, lane.weight, batch.num_left_out, batch.num_truncated, has_samples, lane.buffers]
    spoken_for = lanes if session.world.mesh.speaks else ()  # a cell's ranks have all read the same
    coverage = _coverage_of(spoken_for)
    rank = [coverage.count, coverage.sum_a, coverage.sum_b, flags, *session.clock.row()]
    for sums in _sums_of_sources(session.plan.order, spoken_for):
        rank += [sums.count, sums.sum_a, sums.sum_b]
    return gather_tables(session.world.group, session.world.mesh, session.assigned, rows, rank)


def _keep_ids(session: Session, lanes: Sequence[LaneBatch]) -> None:
    """Write the samples that this rank gives to the next step to the history."""
    ids = ranges_of(_ids_of(lanes))
    state, world = session.state, session.world
    world.history.read(step=state.step + 1, epoch=state.cursor.epoch, ids=ids, world=world.group.size)


def _coverage_of(lanes: Sequence[LaneBatch]) -> CoverageSums:
    """Return the sums over the samples that this rank's lanes have read, at once: a call costs as much as many ids."""
    return CoverageSums.of_ids(_ids_of(lanes))


def _sums_of_sources(order: RunOrder, lanes: Sequence[LaneBatch]) -> Sequence[CoverageSums]:
    """Return what this rank's lanes have read of each source of a mixture; nothing of one training set."""
    if not isinstance(order, Mixture):
        return ()
    return sums_of_sources(_ids_of(lanes), order.first_id)


def _ids_of(lanes: Sequence[LaneBatch]) -> Int64s:
    return np.concatenate([batch.ids for batch in lanes]) if lanes else np.empty(0, dtype=np.int64)
