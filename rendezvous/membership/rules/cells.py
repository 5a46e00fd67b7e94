"""Arrange members in the cells of a world, each at a place that it keeps if possible.

A cell has stages of some members each, a *group*. The members of a group are on one node; groups of a cell may be on
different nodes, and a node with several has neighbouring stages. A cell of one stage is on one node.

A member whose place changes must receive another part of the state. So a member keeps its place in the last world that
it was in, in its old group or in one that lost that place; newcomers fill the gaps; and only if there are too few of
them does a member of a dissolved group change its place. The members of the newest worlds that still have all parts
come first, but others count: if those worlds took no step, an older one's state is as new. `stages` chooses the groups
of each node accordingly. Members that are left over are spares and wait for room.

Invariant: cells are complete and disjoint, and each group is on one node; no arrangement of as many cells moves fewer
members, of the newest worlds and then of all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rendezvous.membership.records import Member
from rendezvous.membership.rules.stages import allot
from rendezvous.membership.worlds import World

Group = tuple[Member, ...]
"""The members of one stage of a cell, by place."""


class Had(NamedTuple):
    """A member's cell and place in the last world that it was in, and the term of that world."""

    term: int
    cell: int
    place: int


_NOWHERE = Had(-1, -1, -1)


@dataclass(frozen=True, slots=True)
class CellShape:
    """The shape of a cell: `num_stages` stages of `stage_size` members on one node each.

    `copies` is the number of holders of each share of a part, in different cells if possible; None if each holds all of
    it. `alike` neighbours hold the same part of the state.
    """

    num_stages: int = 1
    stage_size: int = 1
    copies: int | None = None
    alike: int = 1

    @property
    def size(self) -> int:
        return self.num_stages * self.stage_size

    def part_of(self, place: int) -> int:
        """Return the index of the part of the state that the member at a place holds."""
        return place // self.alike

    def __str__(self) -> str:
        if self.num_stages == 1:
            return f"{self.size} workers of one node each"
        return f"{self.num_stages} stages each, and a stage of {self.stage_size} workers of one node"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Cells, in order of their first members' registration, each by place; and the members left over."""

    cells: tuple[tuple[Member, ...], ...]
    spares: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Members of all cells, in rank order."""
        return tuple(member for cell in self.cells for member in cell)


def arrange(members: Sequence[Member], shape: CellShape, last: World | None, most: int | None = None) -> Arrangement:
    """Arrange members, in order of registration, in at most `most` cells."""
    nodes: dict[str, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node_id, []).append(member)
    rooms = [len(of_node) // shape.stage_size for of_node in nodes.values()]
    num_cells = sum(rooms) // shape.num_stages if most is None else min(most, sum(rooms) // shape.num_stages)
    if num_cells == 0:
        return Arrangement((), tuple(members))
    had = places_had(members, shape, last)
    since = _since(had, shape)
    seated = [_by_place(of_node, had, since) for of_node in nodes.values()]
    # A group that is a whole cell is chosen by its members, so all are formed.
    num_each = sum(rooms) if shape.num_stages == 1 else num_cells
    counts = allot(rooms, _keeps(seated, shape), shape.num_stages, num_each)
    by_stage: list[list[Group]] = [[] for _ in range(shape.num_stages)]
    for of_node, row in zip(seated, counts, strict=True):
        for stage, group in _groups_of(of_node, row, shape):
            by_stage[stage].append(group)
    order = {member.id: number for number, member in enumerate(members)}
    firsts = range(0, shape.size, shape.stage_size)
    chosen = [_chosen(of, num_cells, first, had, since, order) for first, of in zip(firsts, by_stage, strict=True)]
    cells = tuple(tuple(chain.from_iterable(groups)) for groups in _joined(chosen))
    taken = {member.id for cell in cells for member in cell}
    return Arrangement(cells, tuple(member for member in members if member.id not in taken))


def is_a_part_left_behind(
    chosen: Sequence[Member], ready: Sequence[Member], shape: CellShape, last: World | None
) -> bool:
    """Return True if too few holders of some part from the last world are kept: others may be its only holders.

    Too few means none or, if each holds a share, so few that as many are missing as hold each share.
    """
    seats = places_had(ready, shape, last)
    since = _since(seats, shape)
    had = {name: shape.part_of(seat.place) for name, seat in seats.items() if seat.term >= since}
    parts = [shape.part_of(number % shape.size) for number in range(len(chosen))]
    kept = [member.id for part, member in zip(parts, chosen, strict=True) if had.get(member.id) == part]
    if set(had.values()) - {had[name] for name in kept}:
        return True
    if shape.copies is None or not seats:
        return False
    newest = max(seat.term for seat in seats.values())
    there = {name: (seat.cell, seat.place) for name, seat in seats.items() if seat.term == newest}
    still = {there[name] for name in kept if name in there}
    return _is_a_share_left_behind(set(there.values()), still, shape.copies, shape, last)


def _is_a_share_left_behind(
    there: Set[tuple[int, int]], kept: Set[tuple[int, int]], copies: int, shape: CellShape, last: World | None
) -> bool:
    """Return True if so many holders of a part are left out of the next world that a share may be lost.

    `there` and `kept` are the cells and places, in the last world, of the surviving members and of those in the next
    world. If the survivors already lack as many of one part, waiting cannot restore it, and the result is False.
    """
    num_cells = 1 + max(cell for cell, _ in there)
    if last is not None:
        num_cells = max(num_cells, len(last.seats) // shape.size)

    def may_lack(members: Set[tuple[int, int]]) -> bool:
        return any(_lacks_a_share(part, members, num_cells, copies, shape) for part in range(shape.size // shape.alike))

    return may_lack(kept) and not may_lack(there)


def _lacks_a_share(part: int, members: Set[tuple[int, int]], num_cells: int, copies: int, shape: CellShape) -> bool:
    """Return True if `members` may lack a share of a part; copies are in different cells if possible."""
    places = range(part * shape.alike, (part + 1) * shape.alike)
    gone = [sum((cell, place) not in members for place in places) for cell in range(num_cells)]
    return sum(gone) >= copies and sum(map(bool, gone)) >= min(copies, num_cells)


def places_had(members: Sequence[Member], shape: CellShape, last: World | None) -> dict[str, Had]:
    """Return the places that members had in the last world, or else, by their own records, in an older one.

    Etcd may have lost worlds, and who has left the last one without its state there has that of an older one, if any.
    """
    found = dict[str, Had]()
    for member in members:
        rank = None if last is None or member.rank_in > last.term else last.rank_of(member.id)
        if rank is not None and last is not None and (member.rank_in == last.term or member.after < last.term):
            found[member.id] = Had(last.term, *divmod(rank, shape.size))
        elif member.rank >= 0:
            found[member.id] = Had(member.rank_in, *divmod(member.rank, shape.size))
    return found


def _since(had: Mapping[str, Had], shape: CellShape) -> int:
    """Return the newest term such that members had all parts in it or later; 0 if there is none."""
    parts = set[int]()
    for seat in sorted(had.values(), reverse=True):
        parts.add(shape.part_of(seat.place))
        if len(parts) == shape.size // shape.alike:
            return seat.term
    return 0


@dataclass(frozen=True, slots=True)
class _Seated:
    """A node's members: by their earlier term and cell, and place; and those without.

    Those from worlds `since` a term come first.
    """

    old: Mapping[tuple[int, int], Mapping[int, Member]]
    newcomers: Sequence[Member]
    since: int

    def of_stage(self, stage: int, shape: CellShape) -> list[dict[int, Member]]:
        """Return the remaining members of each group of a stage, by place: the newest worlds' groups first; of these,
        and of the others, the largest."""
        places = range(stage * shape.stage_size, (stage + 1) * shape.stage_size)
        groups = {
            cell: {place: one for place, one in by_place.items() if place in places}
            for cell, by_place in self.old.items()
        }
        ordered = sorted(groups, key=lambda cell: (cell[0] < self.since, -len(groups[cell]), -cell[0]))
        return [groups[cell] for cell in ordered if groups[cell]]

    def counts(self, since: int = 0) -> Counter[int]:
        """Return how many members of worlds since a term had each place."""
        return Counter(place for (term, _), cell in self.old.items() for place in cell if term >= since)


def _by_place(members: Sequence[Member], had: Mapping[str, Had], since: int) -> _Seated:
    old: dict[tuple[int, int], dict[int, Member]] = {}
    newcomers: list[Member] = []
    for member in members:
        seat = had.get(member.id)
        # One process may appear twice, until the lease of its older id ends.
        if seat is None or old.setdefault(seat[:2], {}).setdefault(seat.place, member) is not member:
            newcomers.append(member)
    return _Seated(old, newcomers, since)


def _keeps(seated: Sequence[_Seated], shape: CellShape) -> list[list[list[int]]]:
    """Return the weight of the members that would keep places in each node's first, second... group of each stage.

    A member of the newest worlds outweighs all others, and those of the only node with a part outweigh all of them, as
    they may be its only holders.
    """
    counts, newest = [one.counts() for one in seated], [one.counts(one.since) for one in seated]
    nodes_with = Counter(part for new in newest for part in {shape.part_of(place) for place in new})
    most = sum(count.total() for count in counts) + 1
    return [
        [
            [
                sum((count[place] > number) + most * (new[place] > number) for place in places)
                + (number == 0) * most**2 * 2 * _sole({shape.part_of(one) for one in places if new[one]}, nodes_with)
                for number in range(max(count[place] for place in places))
            ]
            for places in (
                range(stage * shape.stage_size, (stage + 1) * shape.stage_size) for stage in range(shape.num_stages)
            )
        ]
        for count, new in zip(counts, newest, strict=True)
    ]


def _sole(parts: Set[int], nodes_with: Mapping[int, int]) -> int:
    """Return the number of parts that only one node has holders of."""
    return sum(nodes_with[part] == 1 for part in parts)


def _groups_of(seated: _Seated, counts: Sequence[int], shape: CellShape) -> Iterator[tuple[int, Group]]:
    """Yield the given number of groups of each stage, formed from a node's members, with their stages."""
    given_up: list[tuple[int, Member]] = []
    kept: list[tuple[int, dict[int, Member]]] = []
    for stage, number in enumerate(counts):
        old = seated.of_stage(stage, shape)
        groups = [*old[:number], *({} for _ in range(number - len(old)))]
        left = [(place, member) for group in old[number:] for place, member in group.items()]
        for group in groups:
            for place, member in left:
                group.setdefault(place, member)
            left = [one for one in left if group.get(one[0]) is not one[1]]
        kept += [(stage, group) for group in groups]
        given_up += left
    others = iter([*seated.newcomers, *(member for _, member in given_up)])
    for stage, group in kept:
        first = stage * shape.stage_size
        yield stage, tuple(group.get(place) or next(others) for place in range(first, first + shape.stage_size))


def _chosen(
    groups: Sequence[Group], most: int, first: int, had: Mapping[str, Had], since: int, order: Mapping[str, int]
) -> list[Group]:
    """Return the groups of a stage that are in cells, ordered by their first members; places start at `first`.

    Groups that keep most places of the newest worlds are preferred, then of all, then those that trained last.
    """

    def preferred(group: Group) -> tuple[int, int, int, int, int]:
        seats = [had.get(member.id, _NOWHERE) for member in group]
        kept = [seat for place, seat in enumerate(seats, first) if seat.place == place]
        num_newest, num_trained = (sum(seat.term >= term for seat in of) for term, of in ((since, kept), (0, seats)))
        return -num_newest, -len(kept), -num_trained, -max(seat.term for seat in seats), order[group[0].id]

    return sorted(sorted(groups, key=preferred)[:most], key=lambda group: order[group[0].id])


def _joined(by_stage: Sequence[Sequence[Group]]) -> list[list[Group]]:
    """Join groups of all stages to cells, on the same node as the previous stage if possible."""
    cells = [[group] for group in by_stage[0]]
    for groups in by_stage[1:]:
        near: dict[str, deque[Group]] = {}
        for group in groups:
            near.setdefault(group[0].node_id, deque()).append(group)
        alone: list[list[Group]] = []
        for cell in cells:
            if found := near.get(cell[-1][0].node_id):
                cell.append(found.popleft())
            else:
                alone.append(cell)
        left = {group[0].id for of_node in near.values() for group in of_node}
        for cell, group in zip(alone, (group for group in groups if group[0].id in left), strict=True):
            cell.append(group)
    return cells
