"""ZeRO-2: gradients are sharded like moments, and lanes are assigned by seat."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from elastic_train.job.sharded.share import Summed
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.reduce_scatter_sum import ReduceScatterSum, ReduceScatterTree, within
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.placement.holdings import Run


class Zero2Share(Zero1Share):
    """No gradient is whole: for each flat vector there is only a `home` for this rank's part of its mean."""

    _homes: dict[int, Tensor]
    _dealt: ReduceScatterSum | None = None

    def make_gradients(self) -> None:
        """Allocate nothing until a seat is taken."""
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

    def _begin_sums(self) -> None:
        if self._dealt is not None and self._dealt.is_dirty:  # pending receives still write to the old memory
            self._homes = {}
            self.make_room()
            self.bind_gradients()
        self._dealt = None

    def sum_over(self, trees: Sequence[Summed], column: Group, kind: Reduction) -> GradientSum:
        assert kind == "canonical", "copies have to have the same bits"
        self._begin_sums()
        dealt, by_turn = [self._dealt_tree(one) for one in trees], self.table.gathers_by_unit
        self._dealt = ReduceScatterSum(dealt, self._homes, self.gathering(column), self._wire, by_turn=by_turn)
        return self._dealt

    def gathering(self, column: Group) -> UnitWeights | None:
        """Return the gatherer of weights; None if weights are whole."""
        return None

    def _dealt_tree(self, one: Summed) -> ReduceScatterTree:
        numbers = self.flats_of(one.parameters)
        units = [[flat for flat in unit if flat.number in numbers] for unit in self.flat.units()]
        return ReduceScatterTree(
            [unit for unit in units if unit or self.table.gathers_by_unit],
            one.ranks,
            one.leaves,
            self.seating_of_all(one.ranks, one.repeats),
            one.per_turn,
            one.is_beside and one.repeats == 1,  # expert-parallel ranks are at different points of a pass
        )
