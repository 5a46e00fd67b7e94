"""The gradient sum where ranks hold shards: every grain's sum is finished by its owner, and its other holders get it.

A rank's lanes add into whole gradients, as where states are replicated. Then each rank sends every owner its part of
that one's grains, which is the first half of an all-reduce, (W - 1) / W of the elements; and each owner sends what it
has finished to the other holders, (copies - 1) / W. What a rank does not hold is left unfinished. Who finishes a grain
shows in no bit: the tree is the same.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elastic_train.core.lanes import Lanes, Part, merge_plan
from elastic_train.parallel.gradient_sum import TreeSum
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.shards.holdings import Run

Runs = Sequence[Run]


@dataclass(frozen=True, slots=True)
class Shares:
    """Runs of the flat gradients, by rank: what each owns, and what this one gives others of its own, and is given."""

    owned: Sequence[Runs]
    given: Sequence[Runs]
    taken: Sequence[Runs]

    def within(self, flats: Container[int]) -> Shares:
        """Return what they have of some flat vectors, by number."""
        owned, given, taken = (
            [[run for run in runs if run.flat in flats] for runs in by_rank]
            for by_rank in (self.owned, self.given, self.taken)
        )
        return Shares(owned, given, taken)


class OwnedSum(TreeSum):
    """The sum along the tree, on its holders alone; `flats` are the layout's, empty ones for what is not trained.

    `assigned` are the lanes of each rank of the group, which may be those of other leaves of a tree.
    """

    def __init__(self, flats: list[Tensor], replicas: Group, assigned: Sequence[Lanes], shares: Shares) -> None:
        super().__init__(flats, replicas, assigned)
        self._shares = shares
        # Every rank begins with its right neighbour, so that no receiver is flooded by all at once.
        self._others = [(replicas.rank + distance) % replicas.size for distance in range(1, replicas.size)]

    def reduce(self, number: int, lo: int, hi: int, mine: Mapping[Part, list[Tensor]], ranks: PointToPoint) -> None:
        """Finish this rank's grains among the elements; other ranks finish theirs."""
        rank, flat, layout = self._replicas.rank, self._flats[number], self._tree.layout
        shares = [_within(number, lo, hi, runs) for runs in self._shares.owned]
        theirs = [(other, part, run) for other in self._others[::-1] for part in layout[other] for run in shares[rank]]
        arrived = self._scratch.split([run.hi - run.lo for _, _, run in theirs], flat)
        ranks.exchange(
            [
                (other, mine[part][number][run.lo : run.hi])
                for other in self._others
                for part in layout[rank]
                for run in shares[other]
            ],
            [(other, tensor) for (other, _, _), tensor in zip(theirs, arrived, strict=True)],
        )
        for run in shares[rank]:
            sums = {part: buffers[number][run.lo : run.hi] for part, buffers in mine.items()}
            sums |= {part: tensor for (_, part, one), tensor in zip(theirs, arrived, strict=True) if one == run}
            whole = next(iter(sums.values()))
            for left, right, parent in merge_plan(list(sums), self._num_lanes):
                whole = sums[parent] = sums.pop(left).add_(sums.pop(right))
            if whole.data_ptr() != flat[run.lo :].data_ptr():
                flat[run.lo : run.hi].copy_(whole)

    def divide(self, divisor: float) -> None:
        for run in self._shares.owned[self._replicas.rank]:
            self._at(run).div_(divisor)
        self._give()

    def _give(self) -> None:
        """Give what this rank has finished to its other holders, and take what they have."""
        given, taken = self._shares.given, self._shares.taken
        self._replicas.exchange(
            [(other, self._at(run)) for other in self._others for run in given[other]],
            [(other, self._at(run)) for other in self._others[::-1] for run in taken[other]],
        )

    def _at(self, run: Run) -> Tensor:
        return self._flats[run.flat][run.lo : run.hi]


def _within(number: int, lo: int, hi: int, runs: Runs) -> Runs:
    """Return what runs have of elements [lo, hi) of a flat vector."""
    cuts = [Run(number, max(run.lo, lo), min(run.hi, hi)) for run in runs if run.flat == number]
    return [run for run in cuts if run.lo < run.hi]
