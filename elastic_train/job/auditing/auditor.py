"""Audits: now and then a lane is computed by another replica, too, and both must have the same gradient, bit for bit.

A device that computes wrongly raises nothing: its lanes' gradients are wrong, and the sum is wrong alike on all ranks.
A lane's gradient depends on weights, samples and seeds alone, so whoever computes it has the same bits. If two replicas
have not, all compute the lane once more, and most of them are right. The step is then repeated, not applied.

An owner's gradient is looked at as its backward pass gives it, parameter by parameter, before it is added to anything.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
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
from elastic_train.job.auditing.staged_lane import sums_of_stage
from elastic_train.job.cells.stage import Stage, key_of
from elastic_train.job.generators import seed_generators
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.group import Group

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

    `group` has all ranks, `cell` those of this one's cell, None where every rank is a replica; `stage` is this one's
    in it, None where a cell does not run in stages.
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
        stage: Stage | None,
    ) -> None:
        self._every, self._plan, self._state = every, plan, state
        self._buffers, self._assigned = buffers, assigned
        self._group, self._mesh, self._cell, self._stage = group, mesh, cell, stage
        self._parameters = [one for one in state.model.parameters() if one.requires_grad]
        self._audits: Sequence[Audit] = ()
        self._seen: dict[int, list[int]] = {}

    def begin(self) -> None:
        """Choose the next step's lanes."""
        self._audits, self._seen = audits_of(self._state.step, self._every, self._assigned), {}

    @contextlib.contextmanager
    def watching(self, lane: int) -> Iterator[None]:
        """Look at the gradient that the backward pass inside gives, if the lane is one of those.

        Each chunk of a stage has a pass of its own.
        """
        if all(audit.lane != lane for audit in self._audits):
            yield
            return
        sums = self._seen.setdefault(lane, [0] * len(self._parameters))
        hooks = [one.register_hook(_noting(sums, number)) for number, one in enumerate(self._parameters)]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def compare(self, holes: Sequence[Hole]) -> list[WrongGradient]:
        """Compute again what other owners have computed, and return what differs, alike on all ranks."""
        if not self._audits:
            return []
        mesh, num = self._mesh, len(self._audits)
        sums = [self._seen.get(audit.lane) for audit in self._audits]
        seen = [_NOTHING if one is None else _joined(one) for one in sums]
        again = [self._compute(one.lane, holes) if one.auditor == mesh.owner else _NOTHING for one in self._audits]
        rows = self._group.all_gather(torch.tensor([*seen, *again])).tolist()
        found = list[WrongGradient]()
        for number, audit in enumerate(self._audits):
            first = {rank: row[number] for rank, row in enumerate(rows) if rank // mesh.cell.crew == audit.owner}
            second = {
                rank: row[num + number] for rank, row in enumerate(rows) if rank // mesh.cell.crew == audit.auditor
            }
            pairs = zip(first.values(), second.values(), strict=True)
            if any(one != other and _NOTHING not in (one, other) for one, other in pairs):
                found.append(self._settle(audit.lane, holes, [first, second]))
        return found

    def _settle(self, lane: int, holes: Sequence[Hole], rounds: list[dict[int, int]]) -> WrongGradient:
        """Let all ranks compute a lane, and say who had what most of them have not; all ranks call it.

        `rounds` have, by rank, what was computed before.
        """
        again = self._group.all_gather(torch.tensor(self._compute(lane, holes))).flatten().tolist()
        had = [(rank, value) for one in [*rounds, dict(enumerate(again))] for rank, value in one.items()]
        had, crew = [one for one in had if one[1] != _NOTHING], self._mesh.cell.crew
        wrong = [rank for place in range(crew) for rank in others([one for one in had if one[0] % crew == place])]
        samples = self._plan.order.samples(self._state.cursor, lane, self._plan.micro_batch).ids.tolist()
        return WrongGradient(lane, tuple(samples), tuple(sorted(set(wrong))), len(wrong), len(had))

    def _compute(self, lane: int, holes: Sequence[Hole]) -> int:
        """Return the checksum of a lane's gradient, computed here; all ranks of a cell call it. No state changes."""
        plan, state = self._plan, self._state
        [[batch]] = plan.feed.training(plan.order, range(lane, lane + 1), state.cursor, 1, holes)
        if not self._is_there(batch):
            return _NOTHING
        assert batch.tensors is not None, "its samples are there"
        tensors = {name: tensor.to(plan.device) for name, tensor in batch.tensors.items()}
        devices = [plan.device] if plan.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._buffers.untouched():
            seed_generators(lane_seed(plan.config.run.seed, state.step, lane))
            if self._stage is not None:
                return _joined(sums_of_stage(self._stage, plan, state, key_of(batch), tensors, self._parameters))
            with plan.autocast():
                loss = plan.task.loss(state.model, tensors)
            gradients = torch.autograd.grad(state.scaler.scale(loss.total), self._parameters, allow_unused=True)
        return _joined([0 if gradient is None else checksum(gradient) for gradient in gradients])

    def _is_there(self, batch: LaneBatch) -> bool:
        """Say whether a lane has samples that all ranks of a cell can read."""
        is_there, cell = batch.tensors is not None and not batch.unreadable, self._cell
        return is_there if cell is None else bool(cell.all_gather(torch.tensor(int(is_there))).all())


def _noting(sums: list[int], number: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        sums[number] = checksum(gradient)

    return note


def _joined(sums: Sequence[int]) -> int:
    return zlib.crc32(np.array(sums, np.int64).tobytes())
