"""How the sums of subtrees that ranks have become one: at whom an element's tree is finished, and who gets it.

Where every rank holds the gradient, all of it is finished everywhere (`exchange`). Where ranks hold shards, each rank
sends every owner its part of that one's grains, which is the first half of an all-reduce, (W - 1) / W of the elements;
and each owner sends what it has finished to the other holders, (copies - 1) / W. What a rank does not hold is left
unfinished. Who finishes a grain shows in no bit: the tree is the same. Or the ranks' sums are added in any order.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from elastic_train.parallel.exchange import Scratch, Subtrees, exchange, finish_owned, others_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.placement.holdings import Run

Reduction = Literal["canonical", "fast"]
Runs = Sequence[Run]


class Reduce(Protocol):
    """A way to make one sum of those that ranks have."""

    @property
    def is_ordered(self) -> bool:
        """Whether a rank's leaves are added along the tree; else all go into one buffer."""

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        """Finish the sum over some elements of a flat gradient."""

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        """Divide what was reduced; share what others need of it."""


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
    """all_reduce: coverage stays exact, rounding varies with the world."""

    is_ordered = False

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        assert isinstance(ranks, Group), "this sum never overlaps a pass"
        ranks.all_reduce(elements.flat)


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


@dataclass(frozen=True, slots=True)
class AtOwners:
    """The sum along the tree, on its holders alone; flat gradients are the layout's."""

    shares: Shares

    @property
    def is_ordered(self) -> bool:
        return True

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        """Finish this rank's grains among the elements; other ranks finish theirs."""
        owned = [_within(elements, runs) for runs in self.shares.owned]
        finish_owned(elements, owned, ranks, scratch)

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        """Divide what this rank has finished, give it to its other holders, and take what they have finished."""
        for run in self.shares.owned[ranks.rank]:
            _at(run, flats).div_(divisor)
        others, given, taken = others_of(ranks), self.shares.given, self.shares.taken
        ranks.exchange(
            [(other, _at(run, flats)) for other in others for run in given[other]],
            [(other, _at(run, flats)) for other in others[::-1] for run in taken[other]],
        )


def _at(run: Run, flats: Sequence[Tensor]) -> Tensor:
    return flats[run.flat][run.lo : run.hi]


def _within(elements: Subtrees, runs: Runs) -> list[tuple[int, int]]:
    """Return what runs have of some elements of a flat vector."""
    cuts = [(max(run.lo, elements.lo), min(run.hi, elements.hi)) for run in runs if run.flat == elements.number]
    return [(lo, hi) for lo, hi in cuts if lo < hi]
