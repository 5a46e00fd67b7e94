"""The applied state in shards, gradients included: they are held like moments, by lanes that are dealt out (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor

from elastic_train.core.lanes import Assignment, Lanes
from elastic_train.core.mesh import ALONE, Cell
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.parallel.buckets import Turns
from elastic_train.parallel.dealt_sum import DealtSum, within
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.shards.deal import lanes_by_owner
from elastic_train.shards.holdings import Run
from elastic_train.shards.seating import Seating


class DealtState(HeldState):
    """No gradient is whole: of each flat vector there is only a `home` of what this rank holds of its mean."""

    _homes: dict[int, Tensor]
    _dealt: Sequence[DealtSum] = ()

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
        if run.lo == run.hi:
            return self._homes[run.flat][:0]
        return within(run, self._homes[run.flat], [one.run for one in self._runs if one.run.flat == run.flat])

    def assigned(self, num_replicas: int, num_lanes: int, cell: Cell = ALONE) -> Assignment:
        return lanes_by_owner(self.seated.seats, num_lanes, cell.context, cell.expert)

    def begin_sums(self) -> None:
        if any(one.is_dirty for one in self._dealt):  # what may still arrive goes to the old memory
            self._homes = {}
            self.make_room()
            self.bind_gradients()
        self._dealt = ()

    def sum_of_flats(
        self,
        replicas: Group,
        lanes: Sequence[Lanes],
        numbers: Container[int],
        turns: Turns | None = None,
        seating: Seating | None = None,
        *,
        per_turn: int = 1,
        is_beside: bool = True,
        weights: UnitWeights | None = None,
    ) -> GradientSum:
        units = [[flat for flat in unit if flat.number in numbers] for unit in self.flat.units()]
        total = DealtSum(
            [unit for unit in units if unit or weights is not None],
            self._homes,
            replicas,
            lanes,
            self.seated if seating is None else seating,
            weights,
            self._wire,
            per_turn=per_turn,
            is_beside=is_beside and seating is None,  # experts' ranks are at different places of a pass
        )
        self._dealt = (*self._dealt, total)
        return total
