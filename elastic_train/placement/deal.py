"""Which lanes a group's ranks compute, in which turn, and how the holders of grains add what comes, along the tree.

A group computes a run of lanes in proportion to its ranks, and deals them out turn by turn: in a turn its ranks compute
neighbouring lanes, in the order of their slots. So leaves reach a holder in the lanes' order, and it keeps at most
1 + log2 L sums of subtrees of its share. Lanes that each rank took in one run would keep that many for every rank.

When all lanes are in, the holders of a grain in different groups send one another their sums, and each finishes the
same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, Part, settle
from elastic_train.placement.holdings import shared_with
from elastic_train.placement.seats import Seat

T = TypeVar("T")


def group_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes of a seat's group: groups' lanes are disjoint, in order, and cover all of them.

    A group has its ranks' part of the lanes, so that no rank has more turns than others because its group is small.
    """
    return _share(seat.place - seat.slot, seat.size, num_ranks, num_lanes)


def deal_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> list[range]:
    """Return the lanes of every turn of a seat's group, by turn; slot s computes the turn's lane s, if there is one.

    A slot without a lane in a turn sends what others need of its holdings, and adds what comes.
    """
    lanes = group_lanes(seat, num_ranks, num_lanes)
    return [lanes[lo : lo + seat.size] for lo in range(0, len(lanes), seat.size)]


def lanes_by_owner(seats: Sequence[Seat], num_lanes: int, context: int = 1, expert: int = 1) -> Assignment:
    """Return every owner's lanes, one for each turn of its group until they are dealt out.

    `seats` are those of all ranks that hold one part of the state: of each cell `context` ranks with some tokens each,
    which compute the same lanes. A cell is `expert` owners. Cells are dealt lanes together if their ranks are in the
    same groups.
    """
    num_cells, first = len(seats) // context, 0
    groups: dict[tuple[int, ...], list[int]] = {}
    for cell in sorted(range(num_cells), key=lambda cell: seats[cell * context].place):
        of_cell = seats[cell * context : (cell + 1) * context]
        groups.setdefault(tuple(seat.group for seat in of_cell), []).append(cell)
    found: dict[int, range] = {}
    for cells in groups.values():
        owners = [cell * expert + place for cell in cells for place in range(expert)]
        lanes = _share(first, len(owners), num_cells * expert, num_lanes)
        found |= {owner: lanes[slot :: len(owners)] for slot, owner in enumerate(owners)}
        first += len(owners)
    return tuple(found[owner] for owner in range(num_cells * expert))


def _share(first: int, size: int, num: int, num_lanes: int) -> range:
    """Return the lanes of some neighbours among `num` that share all of them."""
    return range(first * num_lanes // num, (first + size) * num_lanes // num)


class Chunk(NamedTuple):
    """Grains that one rank sends to another, their numbers ascending."""

    to: int
    grains: Int64s


def sum_chunks(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Chunk]:
    """Return what a rank sends of each of its sums: to holders in other groups, the grains that both hold."""
    others = [(rank + distance) % len(seats) for distance in range(1, len(seats))]
    others = [other for other in others if seats[other].group != seats[rank].group]
    shared = shared_with(holdings[rank], [holdings[other] for other in others])
    return [Chunk(other, grains) for other, grains in zip(others, shared, strict=True) if grains.size]


def subtrees_of(leaves: Iterable[int], num_leaves: int) -> tuple[Part, ...]:
    """Return the largest whole subtrees that some leaves make up, left to right."""
    counter = Counter[None](num_leaves, lambda left, right: None)
    for leaf in leaves:
        counter.push(Part(0, leaf), None)
    return tuple(counter.parts)


class Counter(Generic[T]):
    """The sums of whole subtrees of one holder's share, as a binary counter; `add` may change its first argument.

    Leaves may come in any order; in theirs it has at most 1 + log2 L sums.
    """

    def __init__(self, num_lanes: int, add: Callable[[T, T], T]) -> None:
        self._num_lanes, self._add = num_lanes, add
        self._sums: dict[Part, T] = {}

    @property
    def parts(self) -> dict[Part, T]:
        """The sums so far, by the subtrees that they are of, in the lanes' order."""
        return {part: self._sums[part] for part in sorted(self._sums, key=lambda part: part.lo)}

    def push(self, part: Part, total: T) -> None:
        """Add the sum of one subtree, none of whose lanes were pushed before."""
        part = settle(part, self._num_lanes)
        while part.sibling in self._sums:
            other = self._sums.pop(part.sibling)
            total = self._add(other, total) if part.index % 2 else self._add(total, other)
            part = settle(part.parent, self._num_lanes)
        assert part not in self._sums, f"{part} is there already"
        self._sums[part] = total
