"""Audits: now and then a lane is computed by another replica, too, and both must have the same gradient, bit for bit.

A device that computes wrongly raises nothing: its lanes' gradients are wrong, and the sum is wrong alike on all ranks.
A lane's gradient depends on weights, samples and seeds alone, so whoever computes it has the same bits. If two replicas
have not, all compute the lane once more, and most of them are right. The step is then repeated, not applied.

An owner's gradient is looked at as its backward pass gives it, parameter by parameter, before it is added to anything.
So is what ranks of its cell have of it that compute other lanes beside it, with some of the experts: an audit is a
turn, in which they take part.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.core.accounting import Hole
from elastic_train.core.lanes import Assignment, lane_seed
from elastic_train.core.mesh import Mesh
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.job.auditing.choice import Audit, audits_of, others
from elastic_train.job.auditing.staged_lane import StagedLane, look_at
from elastic_train.job.cells.stage import Stage, key_of
from elastic_train.job.generators import seed_generators
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.cells.expert_links import Leaf
from elastic_train.parallel.group import Group
from elastic_train.tasks.task import Batch, LaneLoss

_NOTHING = -1
"""In place of a checksum: this rank has not computed that."""


@dataclass(frozen=True, slots=True)
class WrongGradient:
    """A lane whose gradient some ranks had other than most: how many computations of it were wrong, and of how many.

    Without a majority all are named.
    """

    lane: int
    samples: tuple[int, ...]
    ranks: tuple[int, ...]
    num_wrong: int
    num_computed: int


class Auditor:
    """A rank's part in the audits of one world, in which one lane of `every` is computed twice.

    `group` has all ranks, `cell` those of this one's cell, None where every rank is a replica; `stage` is what this one
    runs in it.
    """

    def __init__(
        self,
        every: int,
        plan: Plan,
        state: AppliedState,
        buffers: BufferMean,
        assigned: Assignment,
        group: Group,
        mesh: Mesh,
        cell: Group | None,
        stage: Stage,
    ) -> None:
        self._every, self._plan, self._state = every, plan, state
        self._buffers, self._assigned = buffers, assigned
        self._group, self._mesh, self._cell, self._stage = group, mesh, cell, stage
        self._parameters = [one for one in state.model.parameters() if one.requires_grad]
        self._spread = {id(one) for links in stage.experts for unit in links.units for one in unit.stacked}
        self._audits: Sequence[Audit] = ()
        self._seen: dict[int, list[int]] = {}

    def begin(self) -> None:
        """Choose the next step's lanes."""
        self._audits = audits_of(self._state.step, self._every, self._assigned, self._mesh.cell.expert)
        self._seen = {}

    @contextlib.contextmanager
    def watching(self, lane: int) -> Iterator[None]:
        """Look at the gradient that the backward pass inside gives, if the lane is one of those.

        Each chunk of a stage has a pass of its own.
        """
        if (sums := self._sums_of(lane)) is None:
            yield
            return
        hooks = [
            one.register_hook(_noting(sums, number))  # type: ignore[no-untyped-call]
            for number, one in enumerate(self._parameters)
            if id(one) not in self._spread  # whose gradients of other lanes come here, too: `see`
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def see(self, lane: int, leaf: Leaf) -> None:
        """Look at what a lane has given to this rank's experts, if it is one of those."""
        if (sums := self._sums_of(lane)) is not None:
            look_at(leaf, self._parameters, sums)

    def _sums_of(self, lane: int) -> list[int] | None:
        """Return where the checksums of a lane's gradient are noted, by parameter; None if it is not looked at."""
        if all(audit.lane != lane for audit in self._audits):
            return None
        return self._seen.setdefault(lane, [0] * len(self._parameters))

    def compare(self, holes: Sequence[Hole]) -> list[WrongGradient]:
        """Compute again what other owners have computed, and return what differs, alike on all ranks."""
        if not self._audits:
            return []
        mesh, num = self._mesh, len(self._audits)
        sums = [self._seen.get(audit.lane) for audit in self._audits]
        seen = [_NOTHING if one is None else _joined(one) for one in sums]
        crews, size = mesh.cell.expert, mesh.cell.size
        again = [self._compute(one, holes, [one.auditor // crews]) for one in self._audits]
        rows = self._group.all_gather(torch.tensor([*seen, *again])).tolist()
        found = list[WrongGradient]()
        for number, audit in enumerate(self._audits):
            first = {rank: row[number] for rank, row in enumerate(rows) if rank // size == audit.owner // crews}
            second = {
                rank: row[num + number] for rank, row in enumerate(rows) if rank // size == audit.auditor // crews
            }
            pairs = zip(first.values(), second.values(), strict=True)
            if any(one != other and _NOTHING not in (one, other) for one, other in pairs):
                found.append(self._settle(audit, holes, [first, second]))
        return found

    def _settle(self, audit: Audit, holes: Sequence[Hole], rounds: list[dict[int, int]]) -> WrongGradient:
        """Let all cells compute a lane, and say who had what most of them have not; all ranks call it.

        `rounds` have, by rank, what was computed before.
        """
        lane, size = audit.lane, self._mesh.cell.size
        all_replicas = range(self._mesh.num_replicas)
        again = self._group.all_gather(torch.tensor(self._compute(audit, holes, all_replicas))).flatten().tolist()
        had = [(rank, value) for one in [*rounds, dict(enumerate(again))] for rank, value in one.items()]
        had = [one for one in had if one[1] != _NOTHING]
        wrong = [rank for place in range(size) for rank in others([one for one in had if one[0] % size == place])]
        samples = self._plan.order.samples(self._state.cursor, lane, self._plan.micro_batch).ids.tolist()
        return WrongGradient(lane, tuple(samples), tuple(sorted(set(wrong))), len(wrong), len(had))

    def _compute(self, audit: Audit, holes: Sequence[Hole], replicas: Collection[int]) -> int:
        """Return the checksum of what this rank has of a lane's gradient, if its replica is one of those that compute.

        All ranks of the world call it.
        """
        with self._state.shards.computing(replicas):
            return self._compute_here(audit, holes) if self._mesh.replica in replicas else _NOTHING

    def _compute_here(self, audit: Audit, holes: Sequence[Hole]) -> int:
        """Return the checksum of what this rank has of a lane's gradient; all ranks of a cell call it.

        Of a cell's crews that of the owner's place computes it, and the others take part with their experts. No state
        changes.
        """
        plan, state, crews = self._plan, self._state, self._mesh.cell.expert
        number, batch = audit.owner % crews, None
        if self._mesh.owner % crews == number:
            [[batch]] = plan.feed.training(plan.order, range(audit.lane, audit.lane + 1), state.cursor, 1, holes)
        if not self._is_there(batch):
            return _NOTHING
        devices, lane = [plan.device] if plan.device.type == "cuda" else [], None
        with torch.random.fork_rng(devices), self._buffers.untouched():
            if batch is not None and batch.tensors is not None:
                lane = {name: tensor.to(plan.device) for name, tensor in batch.tensors.items()}
                leaf = self._mesh.leaf(audit.lane, plan.num_lanes)
                seed_generators(lane_seed(plan.config.run.seed, state.step, leaf))
            if not self._stage.is_cut:
                return _joined(self._sums_of_pass(lane, number))
            key = None if batch is None else key_of(batch)
            return _joined(StagedLane(self._stage, plan, state, key, lane, self._parameters, number).run())

    def _sums_of_pass(self, batch: Batch | None, number: int) -> list[int]:
        """Return the checksums of a lane's gradients; without a batch, of those that others' lane gives here.

        `number` is that of the crew whose lane it is.
        """
        plan, state, sums = self._plan, self._state, [0] * len(self._parameters)
        with contextlib.ExitStack() as turn:
            for links in self._stage.experts:
                turn.enter_context(links.turn(trains=True))
            if batch is not None:
                with plan.autocast():
                    loss = self._stage.run(0, batch, None)
                assert isinstance(loss, LaneLoss), "all of the model is run"
                scaled = state.scaler.scale(loss.total)
                wanted = [*self._parameters, *(links.anchor for links in self._stage.experts)]
                found = torch.autograd.grad(scaled, wanted, allow_unused=True)[: len(sums)]
                sums = [0 if gradient is None else checksum(gradient) for gradient in found]
        for links in self._stage.experts:
            look_at(links.take_leaves()[number], self._parameters, sums)
        return sums

    def _is_there(self, batch: LaneBatch | None) -> bool:
        """Say whether a lane has samples that all ranks of a cell can read that are to."""
        is_there, cell = batch is None or (batch.tensors is not None and not batch.unreadable), self._cell
        return is_there if cell is None else bool(cell.all_gather(torch.tensor(int(is_there))).all())


def _noting(sums: list[int], number: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        sums[number] = checksum(gradient)

    return note


def _joined(sums: Sequence[int]) -> int:
    return zlib.crc32(np.array(sums, np.int64).tobytes())
