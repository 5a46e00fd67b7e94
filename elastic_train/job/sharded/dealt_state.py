"""The applied state in shards, gradients included: they are held like moments, by lanes that are dealt out (ZeRO-2)."""

from __future__ import annotations

from torch import Tensor

from elastic_train.core.lanes import Assignment
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.parallel.dealt_sum import DealtSum
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.shards.deal import lanes_of
from elastic_train.shards.holdings import Run


class DealtState(HeldState):
    """No gradient is whole: of each flat vector there is only a `home` of what this rank holds of its mean."""

    _homes: dict[int, Tensor]
    _dealt: DealtSum | None = None

    def make_gradients(self) -> None:
        """There are none until a seat is taken."""
        self._homes = {}

    def make_room(self) -> None:
        sizes = dict.fromkeys((number for number, flat in enumerate(self.layout.flats) if flat.group is not None), 0)
        for one in self.trained_runs:
            sizes[one.run.flat] += one.run.hi - one.run.lo
        for number, size in sizes.items():
            if number not in self._homes or self._homes[number].numel() != size:
                self._homes[number] = self.flat.zeros(number, size)

    def gradients_at(self, run: Run) -> Tensor:
        start = 0
        for one in (one.run for one in self._runs if one.run.flat == run.flat):
            if one.lo <= run.lo and run.hi <= one.hi:
                return self._homes[run.flat][start + run.lo - one.lo : start + run.hi - one.lo]
            start += one.hi - one.lo
        assert run.lo == run.hi, f"{run} is not held"
        return self._homes[run.flat][:0]

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        seats = self.seated.seats
        return tuple(lanes_of(seat, len(seats), num_lanes) for seat in seats)

    def make_sum(self, replicas: Group, num_lanes: int) -> GradientSum:
        if self._dealt is not None and self._dealt.is_dirty:  # what may still arrive goes to the old memory
            self._homes = {}
            self.make_room()
            self.bind_gradients()
        self._dealt = DealtSum(
            self.flat.units(), self._homes, replicas, num_lanes, self.seated, self.gathering(replicas), self._wire
        )
        return self._dealt

    def gathering(self, replicas: Group) -> UnitWeights | None:
        """Return what gathers weights in a world; None if they are whole."""
        return None
