"""What every rank works out of the same seats, worked out once for all ranks of a job.

Ranks of one job have one layout, so what follows from seats, arcs and grains is the same on all of them. Nothing is
kept from one job to the next: a planted bug may be in what is worked out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch.optim import Optimizer

from elastic_train.core.arrays import Int64s
from elastic_train.job.optimizers.cuts import MakeOptimizer
from elastic_train.job.sharded.elementwise import Slots, slots_of
from elastic_train.shards.arcs import Arc
from elastic_train.shards.domains import Path
from elastic_train.shards.grains import Layout
from elastic_train.shards.holdings import Circle, Run, grains_in, runs_of
from elastic_train.shards.owners import owned_by_some
from elastic_train.shards.recut import Holder, Recut, plan_recut
from elastic_train.shards.seating import Seating
from elastic_train.shards.seats import Seat, seats_of_holders

T = TypeVar("T")
MOST_KNOWN = 1 << 12
"""So many results of a kind are remembered, the last ones."""


class Known:
    """Results by what they follow from."""

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}

    def __call__(self, key: Hashable, work_out: Callable[[], T]) -> T:
        if key not in self._known:
            if len(self._known) == MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = work_out()
        return self._known[key]  # type: ignore[return-value]  # each key has results of one kind


class SameShares:
    """The product's functions of seats, for the ranks of one job."""

    def __init__(self) -> None:
        self._seatings, self._seats, self._plans, self._runs, self._grains, self._owned = (Known() for _ in range(6))
        self._slots = Known()

    def seating(self, layout: Layout, circle: Circle, seats: Sequence[Seat], rank: int) -> Seating:
        common = self._seatings(tuple(seats), lambda: _CommonSeating(layout, circle, seats, 0))
        return _OwnSeating(common, rank)

    def seats_of_holders(
        self, paths: Sequence[Path], copies: int, before: Sequence[Seat | None], is_holder: Sequence[bool]
    ) -> list[Seat]:
        key = tuple(paths), copies, tuple(before), tuple(is_holder)
        return self._seats(key, lambda: seats_of_holders(paths, copies, before, is_holder))

    def plan_recut(self, had: Sequence[Holder], wants: Sequence[Int64s], spans: Int64s) -> Recut:
        key = tuple((one.reached, one.grains.tobytes()) for one in had), _bytes_of(wants)
        return self._plans(key, lambda: plan_recut(had, wants, spans))

    def slots_of(self, optimizer: Optimizer, make: MakeOptimizer, device: torch.device) -> Slots:
        """Return what an optimizer keeps, which is tried out once: all processes of a job make the same one."""
        groups = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
        return self._slots(repr((type(optimizer), groups, device)), lambda: slots_of(optimizer, make, device))

    def runs_of(self, layout: Layout, grains: Int64s) -> list[Run]:
        return self._runs(grains.tobytes(), lambda: runs_of(layout, grains))

    def grains_in(self, circle: Circle, arcs: Sequence[Arc]) -> Int64s:
        return self._grains(tuple(arcs), lambda: grains_in(circle, arcs))

    def owned_by_some(
        self, holdings: Sequence[Int64s], spans: Int64s, owners: Sequence[int]
    ) -> tuple[Sequence[int], list[Int64s]]:
        return self._owned((_bytes_of(holdings), tuple(owners)), lambda: owned_by_some(holdings, spans, owners))


def _bytes_of(arrays: Sequence[Int64s]) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in arrays)


class _CommonSeating(Seating):
    """What all ranks of a world find of their seats."""

    @cached_property
    def runs(self) -> list[list[list[Run]]]:
        return super().given_runs()


class _OwnSeating(Seating):
    """A rank's seating, which asks that of all for what is no rank's own."""

    def __init__(self, common: _CommonSeating, rank: int) -> None:
        self.layout, self.seats, self.rank = common.layout, common.seats, rank
        self.holdings, self._common = common.holdings, common

    @property
    def trained(self) -> list[Int64s]:
        return self._common.trained

    @property
    def owned(self) -> list[Int64s]:
        return self._common.owned

    def given_runs(self) -> list[list[list[Run]]]:
        return self._common.runs
