"""Which members make up the cells of a world: `size` of one node each, every one at a place that it keeps if it can.

A member whose place changes has to be given another part of the state. So a member goes to the place that it had in
the last world, in its old cell or in one that lost somebody there; newcomers fill what is then open; and only if there
are too few of them does a member whose cell is given up go to another place. Who is left over is a spare: it waits, as
one for whom there is no room.

Invariant: cells are whole, all of one node, and disjoint; no arrangement of as many cells moves fewer members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rendezvous.membership.records import Member, World


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Cells, in the order in which their first members have registered, each by place; and the members left over."""

    cells: tuple[tuple[Member, ...], ...]
    spares: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all cells, in the order of their ranks."""
        return tuple(member for cell in self.cells for member in cell)


def arrange(members: Sequence[Member], size: int, last: World | None, most: int | None = None) -> Arrangement:
    """Arrange members, in the order in which they have registered, in at most so many cells."""
    nodes: dict[str, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node_id, []).append(member)
    cells = [cell for of_node in nodes.values() for cell in _cells_of(of_node, size, last)]
    order = {member.id: number for number, member in enumerate(members)}
    # Those that trained last are let go last.
    cells.sort(key=lambda cell: (-sum(_had(member, size, last) is not None for member in cell), order[cell[0].id]))
    chosen = sorted(cells[:most], key=lambda cell: order[cell[0].id])
    taken = {member.id for cell in chosen for member in cell}
    return Arrangement(tuple(chosen), tuple(member for member in members if member.id not in taken))


def is_a_part_left_behind(chosen: Sequence[Member], ready: Sequence[Member], size: int, last: World | None) -> bool:
    """Say whether only members that are not chosen had some place in the last world: they alone may hold its part."""
    seated = {member.id for member in chosen}
    held = {had[1] for member in chosen if (had := _had(member, size, last)) is not None}
    spare = {had[1] for member in ready if member.id not in seated and (had := _had(member, size, last)) is not None}
    return not spare <= held


def _had(member: Member, size: int, last: World | None) -> tuple[int, int] | None:
    """Return the cell and the place that a member had in the last world; None for a newcomer."""
    rank = None if last is None else last.rank_of(member.id)
    return None if rank is None else divmod(rank, size)


def _cells_of(members: Sequence[Member], size: int, last: World | None) -> Iterator[tuple[Member, ...]]:
    """Yield as many cells as the members of a node make."""
    old: dict[int, dict[int, Member]] = {}
    newcomers: list[Member] = []
    for member in members:
        if (had := _had(member, size, last)) is None:
            newcomers.append(member)
        else:
            old.setdefault(had[0], {})[had[1]] = member
    by_size = sorted(old.values(), key=lambda cell: -len(cell))
    num_cells = len(members) // size
    kept = [*by_size[:num_cells], *({} for _ in range(num_cells - len(by_size)))]
    given_up = [(place, member) for cell in by_size[num_cells:] for place, member in cell.items()]
    for cell in kept:
        for place, member in given_up:
            cell.setdefault(place, member)
        given_up = [one for one in given_up if cell.get(one[0]) is not one[1]]
    left = iter([*newcomers, *(member for _, member in given_up)])
    for cell in kept:
        for place in range(size):
            if place not in cell:
                cell[place] = next(left)
        yield tuple(cell[place] for place in range(size))
