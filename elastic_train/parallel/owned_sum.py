"""The gradient sum where ranks hold shards: every grain's sum is finished by its owner, and its other holders get it.

A rank's lanes add into whole gradients, as where states are replicated. Then each rank sends every owner its part of
that one's grains, which is the first half of an all-reduce, (W - 1) / W of the elements; and each owner sends what it
has finished to the other holders, (copies - 1) / W. What a rank does not hold is left unfinished. Who finishes a grain
shows in no bit: the tree is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from elastic_train.core.lanes import Part, contiguous, merge_plan
from elastic_train.parallel.gradient_sum import TreeSum
from elastic_train.parallel.group import Group
from elastic_train.shards.holdings import Run

Runs = Sequence[Run]


@dataclass(frozen=True, slots=True)
class Shares:
    """Runs of the flat gradients, by rank: what each owns, and `given[owner][holder]` of it that others hold, too."""

    owned: Sequence[Runs]
    given: Sequence[Sequence[Runs]]


class OwnedSum(TreeSum):
    """The sum along the tree, on its holders alone; `flats` are the layout's, empty ones for what is not trained."""

    def __init__(self, flats: list[Tensor], replicas: Group, num_lanes: int, shares: Shares) -> None:
        super().__init__(flats, replicas, contiguous(replicas.size, num_lanes))
        self._shares = shares
        # Every rank begins with its right neighbour, so that no receiver is flooded by all at once.
        self._others = [(replicas.rank + distance) % replicas.size for distance in range(1, replicas.size)]

    def finish(self, divisor: float) -> None:
        mine, rank = self._tree.sums(), self._replicas.rank
        for number, flat in enumerate(self._flats):
            self._reduce(number, {part: buffers[number] for part, buffers in mine.items()})
            for run in self._of(number, self._shares.owned[rank]):
                flat[run.lo : run.hi].div_(divisor)
        self._give()

    def _reduce(self, number: int, mine: dict[Part, Tensor]) -> None:
        """Finish the tree over this rank's grains of one flat vector, from all ranks' parts of them."""
        rank, flat, layout = self._replicas.rank, self._flats[number], self._tree.layout
        owned = self._of(number, self._shares.owned[rank])
        theirs = [(other, part, run) for other in self._others[::-1] for part in layout[other] for run in owned]
        arrived = self._scratch.split([run.hi - run.lo for _, _, run in theirs], flat)
        self._exchange(
            [
                (other, mine[part][run.lo : run.hi])
                for other in self._others
                for part in layout[rank]
                for run in self._of(number, self._shares.owned[other])
            ],
            [(other, tensor) for (other, _, _), tensor in zip(theirs, arrived, strict=True)],
        )
        for run in owned:
            sums = {part: buffer[run.lo : run.hi] for part, buffer in mine.items()}
            sums |= {part: tensor for (_, part, one), tensor in zip(theirs, arrived, strict=True) if one == run}
            whole = next(iter(sums.values()))
            for left, right, parent in merge_plan(list(sums), self._num_lanes):
                whole = sums[parent] = sums.pop(left).add_(sums.pop(right))
            if whole.data_ptr() != flat[run.lo :].data_ptr():
                flat[run.lo : run.hi].copy_(whole)

    def _give(self) -> None:
        """Give what this rank has finished to its other holders, and take what they have."""
        given, rank = self._shares.given, self._replicas.rank
        self._exchange(
            [(other, self._at(run)) for other in self._others for run in given[rank][other]],
            [(other, self._at(run)) for other in self._others[::-1] for run in given[other][rank]],
        )

    def _exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        if sends or receives:
            self._replicas.exchange(sends, receives)

    def _at(self, run: Run) -> Tensor:
        return self._flats[run.flat][run.lo : run.hi]

    @staticmethod
    def _of(number: int, runs: Runs) -> Runs:
        return [run for run in runs if run.flat == number]
