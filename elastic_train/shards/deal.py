"""Which lanes a group's ranks compute, in which turn, and how the holders of grains add what comes, along the tree.

A group computes a run of lanes in proportion to its ranks, and deals them out turn by turn: in a turn its ranks compute
neighbouring lanes, in the order of their slots. So leaves reach a holder in the lanes' order, and it keeps at most
1 + log2 L sums of subtrees of its share. Lanes that each rank took in one run would keep that many for every rank.

When all lanes are in, the holders of a grain in different groups send one another their sums, and each finishes the
same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Part, parts_of, settle
from elastic_train.shards.seats import Seat

T = TypeVar("T")


def group_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes of a seat's group: groups' lanes are disjoint, in order, and cover all of them.

    A group has its ranks' part of the lanes, so that no rank has more turns than others because its group is small.
    """
    first = seat.place - seat.slot
    return range(first * num_lanes // num_ranks, (first + seat.size) * num_lanes // num_ranks)


def deal_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> list[range]:
    """Return the lanes of every turn of a seat's group, by turn; slot s computes the turn's lane s, if there is one.

    A slot without a lane in a turn serves: it sends what others need of its holdings, and adds what comes.
    """
    lanes = group_lanes(seat, num_ranks, num_lanes)
    return [lanes[lo : lo + seat.size] for lo in range(0, len(lanes), seat.size)]


def lanes_of(seat: Seat, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes that a seat's rank computes, one in each turn of its group until they are dealt out."""
    lanes = group_lanes(seat, num_ranks, num_lanes)
    return lanes[seat.slot :: seat.size]


class Chunk(NamedTuple):
    """Grains that one rank sends to another, their numbers ascending."""

    to: int
    grains: Int64s


def sum_chunks(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Chunk]:
    """Return what a rank sends of each of its sums: to holders in other groups, the grains that both hold."""
    chunks: list[Chunk] = []
    if not holdings[rank].size:
        return chunks
    for distance in range(1, len(seats)):
        other = (rank + distance) % len(seats)
        if seats[other].group != seats[rank].group:
            both = np.intersect1d(holdings[rank], holdings[other], assume_unique=True)
            chunks += [Chunk(other, both)] if both.size else []
    return chunks


def group_sums(seat: Seat, num_ranks: int, num_lanes: int) -> tuple[Part, ...]:
    """Return the subtrees whose sums each holder of a group has when all of the group's lanes are in."""
    return parts_of(group_lanes(seat, num_ranks, num_lanes), num_lanes)


class Counter(Generic[T]):
    """The sums of whole subtrees of one holder's share, as a binary counter; `add` may change its first argument."""

    def __init__(self, num_lanes: int, add: Callable[[T, T], T]) -> None:
        self._num_lanes, self._add = num_lanes, add
        self._sums: list[tuple[Part, T]] = []

    @property
    def parts(self) -> dict[Part, T]:
        """The sums so far, by the subtrees that they are of, in the lanes' order."""
        return dict(self._sums)

    def push(self, part: Part, total: T) -> None:
        """Add the sum of one subtree, all of whose lanes come after those pushed before."""
        part = settle(part, self._num_lanes)
        assert not self._sums or self._sums[-1][0].lo < part.lo, f"{part} comes after {self._sums[-1][0]}"
        while self._sums and part.index % 2 and self._sums[-1][0] == part.sibling:
            _, left = self._sums.pop()
            total = self._add(left, total)
            part = settle(part.parent, self._num_lanes)
        self._sums.append((part, total))
