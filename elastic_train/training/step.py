"""One step's sums: run this replica's lanes, exchange the results with all ranks, and leave the step's mean gradient.

`run_lanes` is the interface to the code that turns lanes into a gradient: a rank's passes of its lanes, in program
order. All ranks have equally many turns. In a turn without a lane, a rank computes nothing itself, but still serves the
other ranks' lanes with its experts, its shards of weights, and its shards of the gradients. The applied state does not
change here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic_train.config.combinations import Feature, refused
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.arrays import Int64s, ranges_of
from elastic_train.core.lanes import lane_seed, lanes_by_cell
from elastic_train.core.mixture import Mixture, RunOrder, sums_of_sources
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.errors import PeerLostError
from elastic_train.job.auditor import WrongGradient
from elastic_train.job.cells.stage import key_of
from elastic_train.job.state import known_alone, norm_of
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.cells.pipeline import Passes, run_program
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import AddExperts, Close, Open, Pass
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
    Row,
    StepSums,
    StepTables,
    fold,
    gather_tables,
)


@dataclass(frozen=True, slots=True)
class Computed:
    """A step ready to be applied, unless it is unreadable or wrong; `flags` are this rank's own."""

    sums: StepSums
    flags: int
    buffers: Sequence[tuple[Tensor, Tensor]]
    wrong: Sequence[WrongGradient] = ()
    """Findings of audits, equal on all ranks."""


def compute_step(session: Session, lanes: Sequence[LaneBatch]) -> Computed:
    """Run forward and backward of this replica's lanes and leave the whole step's mean gradient in the parameters.

    If a rank cannot read a sample, all ranks learn of it together, and the gradient stays unfinished. If a forward pass
    has changed a buffer for the first time, all ranks run their lanes again, with the buffers in the sum.
    """
    if session.plan.config.run.forensic and session.world.mesh.speaks:
        _keep_ids(session, lanes)
    if session.auditor is not None:
        session.auditor.begin()
    while True:
        results = run_lanes(session, lanes)
        # As late as possible: a request to leave or join during a long step need not wait for the next one.
        flags = _flags(session, lanes)
        reach("reduce")
        sums = fold(_gather(session, lanes, results, flags))
        session.clock.mark("wait")
        if not sums.any_flags & BUFFERS or sums.is_unreadable:
            break
        if session.stage.is_cut or session.stage.context is not None:
            of: Feature = "pipeline" if session.stage.is_cut else "context"
            raise refused("buffers that change", "a model whose forward pass changes a buffer", of)
        session.buffers.track()
    if sums.is_unreadable:
        return Computed(sums, flags, ())
    buffers = _exchange(session, sums)
    return Computed(sums, flags, buffers, () if session.auditor is None else session.auditor.compare(session.holes))


def _exchange(session: Session, sums: StepSums) -> Sequence[tuple[Tensor, Tensor]]:
    """Finish the sums over all replicas; return the buffers' new values."""
    reach("exchange")
    session.gradients.finish(sums.divisor)
    session.state.shards.add_ties(session.world.group)
    buffers = session.buffers.finish(sums.buffers)
    session.clock.mark("exchange")
    return buffers


def meet(session: Session, measured: Tensor) -> tuple[Tensor | None, PeerLostError | None]:
    """Return the norm of the step's gradient once every rank holds the gradient: the point of no return.

    No rank applies a step before it knows that all others can. So if a lost rank has applied it, the others will, too:
    if a peer is lost here, its error is returned with the norm, and this rank leaves the world after applying the step.
    The norm is None if only peers know the rest of it: the next world decides (`job.reshard`). Raises PeerLostError
    in restart mode, whose next world starts from a commit, and WeightsDifferError if ranks measured different values
    for the same gradient.
    """
    table = session.state.shards.table
    try:
        gathered = session.world.group.all_gather(measured)
    except PeerLostError as error:
        if not session.worlds.is_live:
            raise
        return known_alone(table, measured), error
    return norm_of(gathered, table), None


def run_lanes(session: Session, lanes: Sequence[LaneBatch]) -> dict[int, LaneSums]:
    """Add the gradients and buffers of this replica's lanes to the step's sums; return each lane's results.

    If one rank of the cell cannot read a sample, none of its ranks trains: the step will not be applied, but they still
    take part in its exchanges.
    """
    if session.world.cell is not None and not _is_readable(session.world.cell, lanes):
        lanes = [replace(batch, tensors=None) for batch in lanes]
    session.gradients.begin()
    session.buffers.begin()
    results = run_turns(session, lanes)
    session.buffers.restore()
    return _add_parts(session, results)


def _add_parts(session: Session, results: dict[int, LaneSums]) -> dict[int, LaneSums]:
    """Return the lanes' results, summed over the context-parallel ranks."""
    if (context := session.stage.context) is None:
        return results
    session.clock.mark("rest")
    added = context.add_up({lane: (one.loss, one.weight) for lane, one in results.items()})
    session.clock.mark("wait")
    return {lane: replace(one, loss=added[lane][0], weight=added[lane][1]) for lane, one in results.items()}


def _is_readable(cell: Group, lanes: Sequence[LaneBatch]) -> bool:
    """Return True if all ranks of a cell have all samples of its lanes; equal on all of them."""
    return not bool(cell.all_gather(torch.tensor(int(any(batch.unreadable for batch in lanes)))).any())


def _flags(session: Session, lanes: Sequence[LaneBatch]) -> int:
    """Return this rank's requests to the others, sent with the step."""
    flags = LEAVE * session.leave.is_set + GROW * session.worlds.wants_to_grow() + BUSY * session.commits.is_busy
    flags += COMMIT * session.commits.is_overdue() + GIVE_UP * session.commits.is_hopeless()
    flags += BUFFERS * (session.buffers.has_changed and not session.buffers.is_tracking)
    flags += UNABLE * session.commits.is_unable() + ABLE * session.commits.is_confirming_writable
    flags += STOP * (session.watch is not None and session.watch.wants_to_stop)
    return flags + UNREADABLE * any(batch.unreadable for batch in lanes)


def _gather(session: Session, lanes: Sequence[LaneBatch], results: dict[int, LaneSums], flags: int) -> StepTables:
    rows: dict[int, Row] = {}
    for batch in lanes:
        lane, has_samples = results[batch.lane], int(batch.tensors is not None)
        rows[batch.lane] = [lane.loss, lane.weight, batch.num_left_out, batch.num_truncated, has_samples, lane.buffers]
    spoken_for = lanes if session.world.mesh.speaks else ()  # all ranks of a cell have read the same samples
    coverage = _coverage_of(spoken_for)
    rank = [coverage.count, coverage.sum_a, coverage.sum_b, flags, *session.clock.row()]
    for sums in _sums_of_sources(session.plan.order, spoken_for):
        rank += [sums.count, sums.sum_a, sums.sum_b]
    return gather_tables(session.world.group, session.world.mesh, session.assigned, rows, rank)


def _keep_ids(session: Session, lanes: Sequence[LaneBatch]) -> None:
    """Write the samples that this rank reads for the next step to the history."""
    ids = ranges_of(_ids_of(lanes))
    state, world = session.state, session.world
    world.history.read(step=state.step + 1, epoch=state.reached.cursor.epoch, ids=ids, world=world.group.size)


def _coverage_of(lanes: Sequence[LaneBatch]) -> CoverageSums:
    """Return the coverage of this rank's lanes, in one call: a call costs as much as many ids."""
    return CoverageSums.of_ids(_ids_of(lanes))


def _sums_of_sources(order: RunOrder, lanes: Sequence[LaneBatch]) -> Sequence[CoverageSums]:
    """Return the coverage of this rank's lanes by source of a mixture; empty for a single training set."""
    if not isinstance(order, Mixture):
        return ()
    return sums_of_sources(_ids_of(lanes), order.first_id)


def _ids_of(lanes: Sequence[LaneBatch]) -> Int64s:
    return np.concatenate([batch.ids for batch in lanes]) if lanes else np.empty(0, dtype=np.int64)


class Unread(NamedTuple):
    """A lane's results, like `LaneSums`, while a device still computes the loss."""

    loss: Tensor
    weight: float
    buffers: int


class ForwardOutput(NamedTuple):
    """The result of a forward pass: an activation for the next piece, or the loss to start the backward pass from.

    `sums` are those of a lane whose loss was computed.
    """

    tensor: Tensor | None
    sums: LaneSums | Unread | None = None
    loss: LaneLoss | None = None


def run_turns(session: Session, lanes: Sequence[LaneBatch]) -> dict[int, LaneSums]:
    """Add the gradients of this rank's lanes to the step's sums.

    Return each lane's results as far as this rank has them.
    """
    turns = _Turns(session, lanes)
    session.clock.mark("rest")
    with session.plan.keep_casts(len(lanes)), turns.leaf:
        run_program(session.stage.program(max(map(len, session.assigned))), session.stage.links, turns)
    session.clock.mark("wait")
    session.lane, read = None, _read(turns.results)
    session.clock.mark("backward")
    return read


class _Turns(Passes):
    """A rank's passes within a step."""

    def __init__(self, session: Session, lanes: Sequence[LaneBatch]) -> None:
        self._session, self._stage, self._lanes = session, session.stage, lanes
        mesh, has_experts = session.world.mesh, bool(self._stage.experts)
        self._of_cell = lanes_by_cell(session.assigned, mesh.cell.expert)[mesh.replica] if has_experts else ()
        """Lanes of this rank's cell; in each turn, every rank with other experts computes one of them."""
        self.leaf = contextlib.ExitStack()
        """Contexts of the open leaf."""
        self._loss: LaneLoss | None = None
        """Loss of the process's first lane, which is computed twice."""
        self.results: dict[int, LaneSums | Unread] = {batch.lane: LaneSums() for batch in lanes}

    def key(self, number: int) -> Hashable | None:
        batch = self._lane(number)
        return None if batch is None else key_of(batch)

    def open(self, one: Open) -> None:
        session, batch = self._session, self._lane(one.number)
        if batch is None:
            self.leaf.enter_context(session.gradients.turn(None, one.chunk))
            return
        leaf = session.world.mesh.leaf(batch.lane, session.plan.num_lanes)
        self.leaf.enter_context(session.gradients.turn(leaf, one.chunk))
        self.leaf.enter_context(session.buffers.lane(batch.lane, is_empty=batch.tensors is None))

    def close(self, one: Close) -> None:
        self.leaf.close()

    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        batch = self._lane(one.number)
        with self._passing(one):
            if batch is None or batch.tensors is None:
                return None
            self._session.lane = batch.lane
            output = _forward(self._session, batch, one.chunk, given)
        if output.sums is not None:
            self.results[batch.lane] = output.sums
        self._loss = None if self._session.first is None else output.loss
        return output.tensor

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        with self._passing(one):
            if made is None:
                return
            session, lane = self._session, self._lanes[one.number].lane
            session.lane = lane
            reach("backward")
            if made.requires_grad:
                with contextlib.nullcontext() if session.auditor is None else session.auditor.watching(lane):
                    torch.autograd.backward(made, gradient)
        if session.first is not None and self._loss is not None:
            session.first.check(self._loss, lambda: _again(session, self._lanes[one.number]))
            self._loss = session.first = None
        if digest := session.buffers.digest():
            self.results[lane] = _with_buffers(self.results[lane], digest)
        session.clock.mark("backward")

    def waited(self) -> None:
        self._session.clock.mark("wait")

    def add_experts(self, one: AddExperts) -> None:
        session, links, tree = self._session, self._stage.experts[one.chunk], len(self._stage.experts) + one.chunk
        lanes = self._turn_of_cell(one.number)
        for lane, leaf in zip(lanes, links.take_leaves(), strict=False):
            if session.auditor is not None:
                session.auditor.see(lane, leaf)
            with session.gradients.turn(lane, tree):
                links.add(leaf)
        if not lanes:
            with session.gradients.turn(None, tree):
                pass

    def _lane(self, number: int) -> LaneBatch | None:
        return self._lanes[number] if number < len(self._lanes) else None

    def _turn_of_cell(self, number: int) -> Sequence[int]:
        size = self._session.world.mesh.cell.expert
        return self._of_cell[number * size :][:size]

    def _passing(self, one: Pass) -> contextlib.AbstractContextManager[None]:
        """Return the context of a pass, during which other ranks of the cell may need this rank's experts."""
        if not self._turn_of_cell(one.number):
            return contextlib.nullcontext()
        return self._stage.passing(one, trains=True)


def _forward(session: Session, batch: LaneBatch, chunk: int, given: Tensor | None) -> ForwardOutput:
    """Run a chunk's forward pass of a lane with samples."""
    clock = session.clock
    if given is None:  # otherwise the input carries the generators' state
        clock.mark("rest")
        _seed(session, batch.lane)
    assert batch.tensors is not None, "it has samples"
    tensors = session.to_device(batch.tensors)
    clock.mark("to_device")
    reach("forward")
    watching = contextlib.nullcontext() if session.first is None else session.first.watching()
    with session.plan.autocast(), watching:
        made = session.stage.run(chunk, tensors, given)
    clock.mark("forward")
    if isinstance(made, Tensor):
        return ForwardOutput(made)
    loss, weight = made.total.detach(), weight_of(made)  # enqueue the next lane before reading results from a device
    sums = Unread(loss, weight, 0) if loss.is_cuda else LaneSums(float(loss), weight)
    return ForwardOutput(session.state.scaler.scale(made.total), sums, made)


def _with_buffers(sums: LaneSums | Unread, buffers: int) -> LaneSums | Unread:
    return Unread(sums.loss, sums.weight, buffers) if isinstance(sums, Unread) else replace(sums, buffers=buffers)


def _read(results: Mapping[int, LaneSums | Unread]) -> dict[int, LaneSums]:
    """Return the lanes' results once the device has finished all enqueued work."""
    unread = [one.loss.double().reshape(()) for one in results.values() if isinstance(one, Unread)]
    losses = iter(torch.stack(unread).tolist() if unread else ())
    return {
        lane: LaneSums(next(losses), one.weight, one.buffers) if isinstance(one, Unread) else one
        for lane, one in results.items()
    }


def _again(session: Session, batch: LaneBatch) -> LaneLoss:
    assert batch.tensors is not None, "it has samples"
    tensors: Batch = session.to_device(batch.tensors)
    _seed(session, batch.lane)
    with session.plan.autocast():
        return session.plan.task.loss(session.state.model, tensors)


def _seed(session: Session, lane: int) -> None:
    """Seed the random generators for a lane, or for this rank's part of it."""
    leaf = session.world.mesh.leaf(lane, session.plan.num_lanes)
    seed_generators(lane_seed(session.plan.config.run.seed, session.state.step, leaf))
