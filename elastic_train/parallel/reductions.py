"""Reductions of the ranks' subtree sums: which rank finishes an element's tree, and which ranks get the result.

If every rank holds the whole gradient, it is finished everywhere (`exchange`). If ranks hold shards, each rank sends
every owner its sums of the owner's grains: the first half of an all-reduce, (W - 1) / W of the elements. Each owner
then sends the result to the other holders, (copies - 1) / W. Elements that a rank does not hold stay unfinished there.
The owner does not affect the bits, since the tree is the same. Alternatively, sums are added in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from elastic_train.parallel.exchange import Scratch, Subtrees, exchange, finish_owned, move
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Move

Reduction = Literal["canonical", "fast"]
Runs = Sequence[Run]


class Reduce(Protocol):
    """A way to reduce the ranks' sums."""

    @property
    def is_ordered(self) -> bool:
        """True if a rank's leaves are added along the tree; else all go into one buffer."""

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        """Finish the sum over some elements of a flat gradient."""

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        """Divide the reduced elements, and send them to their other holders."""


class Everywhere:
    """The sum along the tree, whole on every rank."""

    is_ordered = True

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        if ranks.size > 1:
            exchange(elements, ranks, scratch)

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        for flat in flats:
            flat.div_(divisor)


class InAnyOrder(Everywhere):
    """An all-reduce: the samples are exact, but rounding depends on the world."""

    is_ordered = False

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        assert isinstance(ranks, Group), "this sum never overlaps a pass"
        ranks.all_reduce(elements.flat)


@dataclass(frozen=True, slots=True)
class AtOwners:
    """The sum along the tree on the ranks that hold it; flat gradients are the layout's.

    `owned` has the runs that each rank owns, and `deliveries` this rank's moves of finished runs to the other holders.
    """

    owned: Sequence[Runs]
    deliveries: Sequence[Move]

    @property
    def is_ordered(self) -> bool:
        return True

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        """Finish this rank's grains among the elements; other ranks finish theirs."""
        owned = [_within(elements, runs) for runs in self.owned]
        finish_owned(elements, owned, ranks, scratch)

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        """Divide the grains that this rank has finished, send them to their other holders, and receive theirs."""

        def at(run: Run) -> Tensor:
            return flats[run.flat][run.lo : run.hi]

        for run in self.owned[ranks.rank]:
            at(run).div_(divisor)
        move(ranks, self.deliveries, at)


def _within(elements: Subtrees, runs: Runs) -> list[Run]:
    """Return the intersection of runs with some elements of a flat vector."""
    number, lo, hi = elements.number, elements.lo, elements.hi
    cuts = [Run(number, max(run.lo, lo), min(run.hi, hi)) for run in runs if run.flat == number]
    return [run for run in cuts if run.lo < run.hi]
