"""Which members make up the cells of a world, every one at a place that it keeps if it can.

A cell has stages of some members each, a *group*. The members of a group are of one node; groups of a cell may be of
different ones, and where a node has several, neighbouring stages go together. A cell of one stage is in one node.

A member whose place changes has to be given another part of the state. So a member goes to the place that it had in
the last world, in its old group or in one that lost somebody there; newcomers fill what is then open; and only if there
are too few of them does a member whose group is given up go to another place. Which groups a node has follows from that
(`stages`). Who is left over is a spare: it waits, as one for whom there is no room.

Invariant: cells are whole and disjoint, and each group is of one node; no arrangement of as many cells moves fewer
members.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from rendezvous.membership.records import Member, World
from rendezvous.membership.rules.stages import allot

Group = tuple[Member, ...]
"""The members of one stage of a cell, by place."""


@dataclass(frozen=True, slots=True)
class CellShape:
    """How many members make up a cell: so many stages, each of so many members of one node.

    `copies` is how many members that hold a part hold each share of it, in different cells as far as there are any;
    None where each holds all of it. So many neighbours as `alike` says hold the same part of the state as one another.
    """

    num_stages: int = 1
    stage_size: int = 1
    copies: int | None = None
    alike: int = 1

    @property
    def size(self) -> int:
        return self.num_stages * self.stage_size

    def part_of(self, place: int) -> int:
        """Return which part of the state the member at a place holds, counted from 0."""
        return place // self.alike

    def __str__(self) -> str:
        if self.num_stages == 1:
            return f"{self.size} workers of one node each"
        return f"{self.num_stages} stages each, and a stage of {self.stage_size} workers of one node"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Cells, in the order in which their first members have registered, each by place; and the members left over."""

    cells: tuple[tuple[Member, ...], ...]
    spares: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all cells, in the order of their ranks."""
        return tuple(member for cell in self.cells for member in cell)


def arrange(members: Sequence[Member], shape: CellShape, last: World | None, most: int | None = None) -> Arrangement:
    """Arrange members, in the order in which they have registered, in at most so many cells."""
    nodes: dict[str, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node_id, []).append(member)
    rooms = [len(of_node) // shape.stage_size for of_node in nodes.values()]
    num_cells = sum(rooms) // shape.num_stages if most is None else min(most, sum(rooms) // shape.num_stages)
    if num_cells == 0:
        return Arrangement((), tuple(members))
    had = places_had(members, shape, last)
    seated = [_by_place(of_node, had) for of_node in nodes.values()]
    # A group that is a whole cell is taken or left for who is in it, so all are made.
    num_each = sum(rooms) if shape.num_stages == 1 else num_cells
    counts = allot(rooms, _keeps(seated, shape), shape.num_stages, num_each)
    by_stage: list[list[Group]] = [[] for _ in range(shape.num_stages)]
    for of_node, row in zip(seated, counts, strict=True):
        for stage, group in _groups_of(of_node, row, shape):
            by_stage[stage].append(group)
    order = {member.id: number for number, member in enumerate(members)}
    chosen = [_chosen(groups, num_cells, stage * shape.stage_size, had, order) for stage, groups in enumerate(by_stage)]
    cells = tuple(tuple(chain.from_iterable(groups)) for groups in _joined(chosen))
    taken = {member.id for cell in cells for member in cell}
    return Arrangement(cells, tuple(member for member in members if member.id not in taken))


def is_a_part_left_behind(
    chosen: Sequence[Member], ready: Sequence[Member], shape: CellShape, last: World | None
) -> bool:
    """Say whether some part is kept by too few of those who held it in the last world: others may hold it alone.

    Too few are none; or, where each holds a share, so few that as many are missing as hold each.
    """
    seats = places_had(ready, shape, last)
    had = {name: shape.part_of(place) for name, (_, place) in seats.items()}
    parts = [shape.part_of(number % shape.size) for number in range(len(chosen))]
    kept = [member.id for part, member in zip(parts, chosen, strict=True) if had.get(member.id) == part]
    if set(had.values()) - {had[name] for name in kept}:
        return True
    if shape.copies is None or not seats:
        return False
    return _is_a_share_left_behind(set(seats.values()), {seats[name] for name in kept}, shape.copies, shape, last)


def _is_a_share_left_behind(
    there: Set[tuple[int, int]], kept: Set[tuple[int, int]], copies: int, shape: CellShape, last: World | None
) -> bool:
    """Say whether so many holders of a part are kept from the next world that they may alone hold a share.

    `there` and `kept` are the cells and places that members had in the last world: those that are left of it, and those
    of whom the next one has some. Nobody is waited for if as many of one part are gone: then no wait brings back what
    they held.
    """
    num_cells = 1 + max(cell for cell, _ in there)
    if last is not None:
        num_cells = max(num_cells, len(last.seats) // shape.size)

    def may_lack(members: Set[tuple[int, int]]) -> bool:
        return any(_lacks_a_share(part, members, num_cells, copies, shape) for part in range(shape.size // shape.alike))

    return may_lack(kept) and not may_lack(there)


def _lacks_a_share(part: int, members: Set[tuple[int, int]], num_cells: int, copies: int, shape: CellShape) -> bool:
    """Say whether a share of a part may be held by none of some members: copies are in different cells if they can."""
    places = range(part * shape.alike, (part + 1) * shape.alike)
    gone = [sum((cell, place) not in members for place in places) for cell in range(num_cells)]
    return sum(gone) >= copies and sum(map(bool, gone)) >= min(copies, num_cells)


def places_had(members: Sequence[Member], shape: CellShape, last: World | None) -> dict[str, tuple[int, int]]:
    """Return the cell and the place that members had in the last world, by their ids; newcomers had none.

    A world that etcd does not know any more is known by its members, and they know by which rank it knew them.
    """
    newest = max([0 if last is None else last.term, *(member.rank_in for member in members)])
    found = dict[str, tuple[int, int]]()
    for member in members:
        rank = last.rank_of(member.id) if last is not None and last.term == newest else None
        if rank is None and member.rank >= 0 and member.rank_in == newest:
            rank = member.rank
        if rank is not None:
            found[member.id] = divmod(rank, shape.size)
    return found


@dataclass(frozen=True, slots=True)
class _Seated:
    """A node's members: by the cell and the place that they had, and those that had none."""

    old: Mapping[int, Mapping[int, Member]]
    newcomers: Sequence[Member]

    def of_stage(self, stage: int, shape: CellShape) -> list[dict[int, Member]]:
        """Return what is left of each group of a stage, by place; the largest first."""
        places = range(stage * shape.stage_size, (stage + 1) * shape.stage_size)
        groups = ({place: one for place, one in cell.items() if place in places} for cell in self.old.values())
        return sorted((group for group in groups if group), key=lambda group: -len(group))


def _by_place(members: Sequence[Member], had: Mapping[str, tuple[int, int]]) -> _Seated:
    old: dict[int, dict[int, Member]] = {}
    newcomers: list[Member] = []
    for member in members:
        cell, place = had.get(member.id, (-1, -1))
        # One process may be there twice, until the lease of its older id ends.
        if cell < 0 or old.setdefault(cell, {}).setdefault(place, member) is not member:
            newcomers.append(member)
    return _Seated(old, newcomers)


def _keeps(seated: Sequence[_Seated], shape: CellShape) -> list[list[list[int]]]:
    """Return how many members would stay at their places in each node's first, second... group of each stage.

    Those of the only node that has a part count for more than all others: nobody else may hold it.
    """
    counts = [Counter(place for cell in one.old.values() for place in cell) for one in seated]
    nodes_with = Counter(part for count in counts for part in {shape.part_of(place) for place in count})
    alone = sum(count.total() for count in counts) + 1
    return [
        [
            [
                sum(count[place] > number for place in places)
                + (number == 0) * alone * _sole({shape.part_of(one) for one in places if count[one]}, nodes_with)
                for number in range(max(count[place] for place in places))
            ]
            for places in (
                range(stage * shape.stage_size, (stage + 1) * shape.stage_size) for stage in range(shape.num_stages)
            )
        ]
        for count in counts
    ]


def _sole(parts: Set[int], nodes_with: Mapping[int, int]) -> int:
    """Count the parts of which no other node has anybody who held them."""
    return sum(nodes_with[part] == 1 for part in parts)


def _groups_of(seated: _Seated, counts: Sequence[int], shape: CellShape) -> Iterator[tuple[int, Group]]:
    """Yield so many groups of each stage, made of a node's members, and their stages."""
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
    groups: Sequence[Group], most: int, first: int, had: Mapping[str, tuple[int, int]], order: Mapping[str, int]
) -> list[Group]:
    """Return the groups of a stage, whose places are those from `first` on, that are in cells, by their first members.

    Those that keep most places are let go last, and of these those that trained last.
    """

    def preferred(group: Group) -> tuple[int, int, int]:
        places = [had.get(member.id, (-1, -1))[1] for member in group]
        num_kept = sum(place == first + number for number, place in enumerate(places))
        return -num_kept, -sum(place >= 0 for place in places), order[group[0].id]

    return sorted(sorted(groups, key=preferred)[:most], key=lambda group: order[group[0].id])


def _joined(by_stage: Sequence[Sequence[Group]]) -> list[list[Group]]:
    """Join groups of all stages to cells: each with one of the next stage in its node, as long as there are any."""
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
