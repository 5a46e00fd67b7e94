"""Audits: a second replica recomputes a lane now and then, and both gradients must agree bit for bit.

A device that computes wrongly raises no error: its lanes' gradients are wrong, and the sum is wrong on every rank. A
lane's gradient depends only on weights, samples and seeds, so every replica must get the same bits. If two replicas
disagree, all replicas recompute the lane and the majority decides. The step is then repeated instead of applied.

The first gradient is checked as the backward pass produces it, per parameter, before it is added to anything. With
expert parallelism, the gradients that the lane gives to experts on other ranks are checked as well, so these ranks take
part in an audit.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.dcp import checksum
from elastic_train.core.accounting import Hole
from elastic_train.core.lanes import Assignment, lane_seed
from elastic_train.core.mesh import Mesh
from elastic_train.errors import UnreadableError
from elastic_train.job.cells.stage import Stage, key_of
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.job.units.generators import seed_generators
from elastic_train.parallel.buffer_mean import BufferMean
from elastic_train.parallel.cells.expert_links import Leaf
from elastic_train.parallel.cells.pipeline import Passes, run_program
from elastic_train.parallel.group import Group
from elastic_train.program.schedules import Pass
from elastic_train.tasks.task import Batch, on_device

_NOTHING = -1
"""Placeholder for a checksum that this rank has not computed."""


class Audit(NamedTuple):
    """A lane to compute twice, its owner and the owner that recomputes it (the same one if there is no other)."""

    lane: int
    owner: int
    auditor: int


@dataclass(frozen=True, slots=True)
class WrongGradient:
    """A lane on which ranks disagree: how many of its computations were wrong, and the ranks that made them.

    Without a majority, all ranks are named.
    """

    lane: int
    samples: tuple[int, ...]
    ranks: tuple[int, ...]
    num_wrong: int
    num_computed: int


class Auditor:
    """A rank's audits in one world; one lane in `every` is computed twice.

    `group` has all ranks, `cell` the ranks of this replica (None if every rank is a replica), and `stage` is the
    pipeline stage that this rank runs.
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
        """Choose the lanes to audit in the next step."""
        self._audits = audits_of(self._state.step, self._every, self._assigned, self._mesh.cell.expert)
        self._seen = {}

    @contextlib.contextmanager
    def watching(self, lane: int) -> Iterator[None]:
        """Record the gradient of the backward pass inside this context if the lane is audited.

        Each chunk of a stage has its own backward pass.
        """
        if (sums := self._sums_of(lane)) is None:
            yield
            return
        with contextlib.ExitStack() as hooks:
            for number, one in enumerate(self._parameters):
                if id(one) not in self._spread:  # experts also get gradients of other lanes: `see`
                    hooks.enter_context(one.register_hook(_noting(sums, number)))  # type: ignore[no-untyped-call]
            yield

    def see(self, lane: int, leaf: Leaf) -> None:
        """Record the gradient that a lane has given to this rank's experts, if the lane is audited."""
        if (sums := self._sums_of(lane)) is not None:
            look_at(leaf, self._parameters, sums)

    def _sums_of(self, lane: int) -> list[int] | None:
        """Return the list for the checksums of a lane's gradient, by parameter; None if the lane is not audited."""
        if all(audit.lane != lane for audit in self._audits):
            return None
        return self._seen.setdefault(lane, [0] * len(self._parameters))

    def compare(self, holes: Sequence[Hole]) -> list[WrongGradient]:
        """Recompute other ranks' audited lanes and return the lanes that differ; every rank gets the same result."""
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
        """Recompute a lane on all replicas and return the ranks that differ from the majority.

        Collective over all ranks. `rounds` has the checksums computed before, by rank.
        """
        lane, size = audit.lane, self._mesh.cell.size
        all_replicas = range(self._mesh.num_replicas)
        again = self._group.all_gather(torch.tensor(self._compute(audit, holes, all_replicas))).flatten().tolist()
        had = [(rank, value) for one in [*rounds, dict(enumerate(again))] for rank, value in one.items()]
        had = [one for one in had if one[1] != _NOTHING]
        wrong = [rank for place in range(size) for rank in others([one for one in had if one[0] % size == place])]
        samples = self._plan.order.samples(self._state.reached.cursor, lane, self._plan.micro_batch).ids.tolist()
        return WrongGradient(lane, tuple(samples), tuple(sorted(set(wrong))), len(wrong), len(had))

    def _compute(self, audit: Audit, holes: Sequence[Hole], replicas: Collection[int]) -> int:
        """Return the checksum of this rank's part of a lane's gradient; `_NOTHING` if `replicas` lacks its replica.

        Collective over all ranks of the world.
        """
        context = self._mesh.cell.context
        ranks = [replica * context + at for replica in replicas for at in range(context)]
        with self._state.shards.share.computing(ranks):  # they may need other ranks' shards
            return self._compute_here(audit, holes) if self._mesh.replica in replicas else _NOTHING

    def _compute_here(self, audit: Audit, holes: Sequence[Hole]) -> int:
        """Return the checksum of this rank's part of a lane's gradient; collective over the replica.

        Of a replica's compute groups, the one at the owner's position computes the lane; the others run only their
        experts. Leaves the state unchanged.
        """
        plan, state, crews = self._plan, self._state, self._mesh.cell.expert
        number, batch, is_there = audit.owner % crews, None, True
        if self._mesh.owner % crews == number:
            lanes, cursor = range(audit.lane, audit.lane + 1), state.reached.cursor
            try:
                [[batch]] = plan.feed.training(plan.order, lanes, cursor, 1, holes)
            except UnreadableError:
                is_there = False
            else:
                is_there = batch.tensors is not None and not batch.unreadable
        if not self._is_there(is_there):
            return _NOTHING
        devices, lane = [plan.device] if plan.device.type == "cuda" else [], None
        with torch.random.fork_rng(devices), self._buffers.untouched():
            if batch is not None and batch.tensors is not None:
                lane = on_device(batch.tensors, plan.device)
                leaf = self._mesh.leaf(audit.lane, plan.num_lanes)
                seed_generators(lane_seed(plan.config.run.seed, state.step, leaf))
            key = None if batch is None else key_of(batch)
            return _joined(StagedLane(self._stage, plan, state, key, lane, self._parameters, number).run())

    def _is_there(self, mine: bool) -> bool:
        """Return True if every rank of the replica that needs the lane's samples can read them."""
        return mine if self._cell is None else bool(self._cell.all_gather(torch.tensor(int(mine))).all())


def _noting(sums: list[int], number: int) -> Callable[[Tensor], None]:
    def note(gradient: Tensor) -> None:
        sums[number] = checksum(gradient)

    return note


def _joined(sums: Sequence[int]) -> int:
    return zlib.crc32(np.array(sums, np.int64).tobytes())


def audits_of(step: int, every: int, assigned: Assignment, num_crews: int = 1) -> list[Audit]:
    """Return the audits of a step: one for every `every` lanes, cycling through all lanes and all pairs of replicas.

    A step audits each lane at most once. A replica has `num_crews` owners; the one at the same position as the lane's
    owner recomputes it.
    """
    num_lanes, num_owners = sum(map(len, assigned)), len(assigned)
    num_replicas = num_owners // num_crews
    owner_of = {lane: owner for owner, lanes in enumerate(assigned) for lane in lanes}
    first, end = step * num_lanes // every, (step + 1) * num_lanes // every
    audits = []
    for number in range(first, end):
        lane = number % num_lanes
        owner, turn = owner_of[lane], number // num_lanes
        away = 1 + turn % (num_replicas - 1) if num_replicas > 1 else 0
        audits.append(Audit(lane, owner, (owner + away * num_crews) % num_owners))
    return audits


def others(had: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks whose value differs from the majority's, once per wrong value; without a majority, all ranks."""
    counts = Counter(value for _, value in had).most_common(2)
    is_clear = len(counts) < 2 or counts[0][1] > counts[1][1]
    return [rank for rank, value in had if not is_clear or value != counts[0][0]]


def look_at(leaf: Leaf, parameters: Sequence[nn.Parameter], sums: list[int]) -> None:
    """Record the checksums of a lane's expert gradients, by parameter."""
    for number, one in enumerate(parameters):
        if (gradient := leaf.get(id(one))) is not None:
            sums[number] = checksum(gradient)


@dataclass(slots=True)
class StagedLane(Passes):
    """The passes of one lane in a stage, or in the whole model; all stages of the replica run theirs.

    `lane` is the shape key of the micro-batch. Without a batch, run only this rank's experts, for the lane of compute
    group `crew`.
    """

    stage: Stage
    plan: Plan
    state: AppliedState
    lane: Hashable | None
    batch: Batch | None
    parameters: Sequence[nn.Parameter]
    crew: int = 0
    sums: list[int] = field(init=False)
    """Checksum of each parameter's gradient; 0 for parameters of other stages."""
    _given: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = [0] * len(self.parameters)

    def run(self) -> list[int]:
        """Run all passes and return the checksums."""
        run_program(self.stage.actions(1), self.stage.links, self)
        return self.sums

    def key(self, number: int) -> Hashable | None:
        return self.lane

    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        if given is not None:
            self._given[one.chunk] = given
        with self.stage.passing(one, trains=True):
            if self.batch is None:
                return None
            with self.plan.autocast():
                made = self.stage.run(one.chunk, self.batch, given)
        return made if isinstance(made, Tensor) else self.state.scaler.scale(made.total)

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        with self._seeing_experts(one):
            if made is not None:
                self._backward(one, made, gradient)

    def _backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        given = self._given.pop(one.chunk, None)
        if not made.requires_grad:  # the first stage has no trained parameters
            return
        anchors = [self.stage.experts[one.chunk].anchor] if self.stage.experts else []
        inputs = [*self.parameters, *anchors, *([] if given is None else [given])]
        found = torch.autograd.grad(made, inputs, gradient, allow_unused=True)
        for number in range(len(self.parameters)):
            if (own := found[number]) is not None:
                self.sums[number] = checksum(own)
        if given is not None:
            given.grad = found[-1]

    @contextlib.contextmanager
    def _seeing_experts(self, one: Pass) -> Iterator[None]:
        """Record the gradients that the backward pass inside, or another compute group's, gives this rank's experts."""
        with self.stage.passing(one, trains=True):
            yield
        if self.stage.experts:
            look_at(self.stage.experts[one.chunk].take_leaves()[self.crew], self.parameters, self.sums)
