"""Compute once for all ranks of a job what follows from the same seats.

Ranks of one job have one layout, or in cells one per place, so results derived from seats, arcs and grains are equal.
Results are not shared between jobs, because a planted bug may affect them; except optimizer slots, among jobs without a
bug: trying the optimizer out takes longer than some jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled.memory import Known, memory_of
from chaos.sim.modelled.tiny_model import TinyModel
from chaos.sim.modelled.training import SampleCounts
from elastic_train.core.arrays import Int64s
from elastic_train.job import reshard
from elastic_train.job.optimizers.rehearsal import MakeOptimizer
from elastic_train.job.peer_states import PeerState, leave_out_unfinished
from elastic_train.job.sharded.elementwise import Slots, slots_of
from elastic_train.job.sharded.held_tree import Held, Written, written_of
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.placement.grains import Layout
from elastic_train.placement.grains import Tensor as LaidOut
from elastic_train.placement.holdings import Circle, Run
from elastic_train.placement.seating import Seating, owned_of
from elastic_train.placement.seats import Seat
from elastic_train.placement.table import Table

NUM_LAYOUTS = 1 << 10
"""Most layouts of processes that are remembered; they are equal, or in cells one kind per place."""
_SLOTS = Known()
"""Optimizer slots, for all jobs without a planted bug."""


class SameShares:
    """The product's functions of seats, cached for the ranks of one job; results of one list live as long as it."""

    def __init__(self, *, is_planted: bool) -> None:
        """`is_planted` is True if a bug replaces some of the product's code."""
        self._owned, self._written = Known(), Known()
        kinds = dict[tuple[LaidOut, ...], int]()
        self._kind_of = memory_of(lambda layout: kinds.setdefault(layout.tensors, len(kinds)), NUM_LAYOUTS)
        self._slots = Known() if is_planted else _SLOTS
        self._common = memory_of(lambda seats: dict[int, _CommonSeating]())
        self.seats_of = memory_of(reshard.seats_at)
        self.plan_of = memory_of(reshard._plan_of)
        self._left = memory_of(lambda brought, table: leave_out_unfinished(table, brought))

    def seating(self, layout: Layout, circle: Circle, seats: Sequence[Seat], rank: int) -> Seating:
        by_layout = self._common(seats)  # seats of a cell mean the same in every place's column
        if id(layout) not in by_layout:
            by_layout[id(layout)] = _CommonSeating(layout, circle, seats, 0)
        return _OwnSeating(by_layout[id(layout)], rank)

    def leave_out_unfinished(self, table: Table, brought: Sequence[PeerState]) -> tuple[list[PeerState], int]:
        return self._left(brought, table)

    def slots_of(self, optimizer: Optimizer, make: MakeOptimizer, device: torch.device) -> list[Slots]:
        """Return the optimizer's slots, tried out once."""
        groups = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
        return self._slots(repr((type(optimizer), groups, device)), lambda: slots_of(optimizer, make, device))

    def owned_of(self, holdings: Sequence[Int64s], spans: Int64s, owners: Sequence[int] | None = None) -> list[Int64s]:
        key = spans.tobytes(), _bytes_of(holdings), None if owners is None else tuple(owners)
        return self._owned(key, lambda: owned_of(holdings, spans, owners))

    def written_of(self, layout: Layout, written: Sequence[Held]) -> Written:
        key = (
            self._kind_of(layout),
            _bytes_of([one.grains for one in written]),
            _bytes_of([one.sections for one in written]),
        )
        return self._written(key, lambda: written_of(layout, written))


def _bytes_of(arrays: Sequence[Int64s]) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in arrays)


class _CommonSeating(Seating):
    """The part of a seating that is equal on all ranks of a world."""

    @cached_property
    def known_runs(self) -> Known:
        return Known()


class _OwnSeating(Seating):
    """A rank's seating, which delegates whatever is not specific to the rank."""

    def __init__(self, common: _CommonSeating, rank: int) -> None:
        self.layout, self.seats, self.rank = common.layout, common.seats, rank
        self.circle, self.holdings, self._common = common.circle, common.holdings, common
        self._runs = common._runs

    @property
    def trained(self) -> list[Int64s]:
        return self._common.trained

    @property
    def owned(self) -> list[Int64s]:
        return self._common.owned

    def owned_by(self, owners: Sequence[int]) -> list[Int64s]:
        return self._common.owned_by(owners)

    def sections_of(self, rank: int) -> Int64s:
        return self._common.sections_of(rank)

    def runs_at(self, rank: int, grains: Int64s) -> list[Run]:
        key = self.seats[rank].num_base, grains.tobytes()
        return self._common.known_runs(key, lambda: self._common.runs_at(rank, grains))


class RealSum(SampleCounts):
    """Stand-in for `GradientSum`: the sum of the state's shards, plus the lanes' samples.

    There is no backward pass: a lane sets its gradients directly, and exchanges that would overlap with the pass
    happen at the lane's end.
    """

    def __init__(self, state: AppliedState, owners: SimGroup, column: Group, num_lanes: int) -> None:
        model = state.model
        assert isinstance(model, TinyModel), "the one real model that is simulated"
        super().__init__(len(model.counts), owners, state.shards.sum_of(owners, num_lanes, column=column))
        self._model = model

    def add(self, ids: Int64s) -> None:
        super().add(ids)
        self._model.add_gradient(tuple(ids.tolist()))

    def finish(self, divisor: float) -> None:
        self._model.gradient = self.counted()
        super().finish(divisor)


class CountedBuffers:
    """Stand-in for `BufferMean`: buffers derived from a step's counts."""

    has_changed = False
    is_tracking = True

    def __init__(self, state: AppliedState) -> None:
        self._state = state

    def begin(self) -> None: ...
    def restore(self) -> None: ...
    def undo(self) -> None: ...

    def lane(self, lane: int, *, is_empty: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def untouched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, digests: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        model = self._state.model
        assert isinstance(model, TinyModel), "the one real model that is simulated"
        return model.counted(self._state.step)
