"""Assign lanes to a group's ranks per turn, and add leaves along the tree on the ranks that hold the grains.

A group computes a run of lanes in proportion to its ranks. In each turn its ranks compute neighbouring lanes, in slot
order. So leaves reach a holder in lane order, and it keeps at most 1 + log2 L subtree sums of its share. If each rank
took a run of lanes instead, it would keep that many for every rank.

After all lanes, the holders of a grain in different groups exchange their sums, and each finishes the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from elastic_train.core.lanes import Assignment, Part, settle
from elastic_train.placement.seats import Seat

T = TypeVar("T")


def group_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes of a seat's group; the groups' lanes are disjoint, in order, and cover all lanes.

    A group's number of lanes is proportional to its ranks, so that a small group does not need more turns.
    """
    return _share(seat.place - seat.slot, seat.size, num_ranks, num_lanes)


def deal_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> list[range]:
    """Return the lanes of every turn of a seat's group; slot s computes the turn's lane s, if there is one.

    A slot without a lane in a turn still sends the shards that others need, and adds received ones.
    """
    lanes = group_lanes(seat, num_ranks, num_lanes)
    return [lanes[lo : lo + seat.size] for lo in range(0, len(lanes), seat.size)]


def lanes_by_owner(seats: Sequence[Seat], num_lanes: int, context: int = 1, expert: int = 1) -> Assignment:
    """Return every owner's lanes, one per turn of its group until none are left.

    `seats` are those of all ranks with one part of the state. Each cell has `context` of them, which compute the same
    lanes for different tokens, and `expert` owners. Cells whose ranks are in the same groups are assigned lanes
    together.
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
    """Return the lanes of `size` neighbours, from number `first`, among `num` that share all lanes."""
    return range(first * num_lanes // num, (first + size) * num_lanes // num)


def subtrees_of(leaves: Iterable[int], num_leaves: int) -> tuple[Part, ...]:
    """Return the largest whole subtrees that consist of some leaves, left to right."""
    counter = Counter[None](num_leaves, lambda left, right: None)
    for leaf in leaves:
        counter.push(Part(0, leaf), None)
    return tuple(counter.parts)


class Counter(Generic[T]):
    """Sums of whole subtrees of one holder's share, as a binary counter; `add` may change its first argument.

    Leaves may come in any order; in ascending order there are at most 1 + log2 L sums.
    """

    def __init__(self, num_lanes: int, add: Callable[[T, T], T]) -> None:
        self._num_lanes, self._add = num_lanes, add
        self._sums: dict[Part, T] = {}

    @property
    def parts(self) -> dict[Part, T]:
        """The sums so far, by subtree, in lane order."""
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
