"""The turns of a step: a rank's passes of its lanes, in program order, and their contributions to the sums.

All ranks have equally many turns. In a turn without a lane, a rank computes nothing itself, but still serves the other
ranks' lanes with its experts, its shards of weights, and its shards of the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.core.lanes import lane_seed, lanes_by_cell
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.job.cells.stage import key_of
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.cells.pipeline import Passes, run_program
from elastic_train.program.schedules import Pass
from elastic_train.program.step_program import AddExperts, Close, Open
from elastic_train.system.failpoints import reach
from elastic_train.tasks.task import Batch, LaneLoss, weight_of
from elastic_train.training.session import Session
from elastic_train.training.step_sums import LaneSums


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
