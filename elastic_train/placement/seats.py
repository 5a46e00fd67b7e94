"""Assign seats (each rank's group, and the arcs of the circle that it holds there), and lanes by seat.

A new world cuts `copies` groups over its failure domains (`arcs`), and each group cuts the circle into equal arcs. A
following world keeps the groups and bases (`arcs`) as long as copies stay as far apart, no group is much smaller than
in a new cut, and keeping them moves less. The result depends only on the ranks' paths and earlier holdings, so every
rank computes the same.

A group computes a run of lanes in proportion to its ranks. In each turn its ranks compute neighbouring lanes, in slot
order. So leaves reach a holder in lane order, and it keeps at most 1 + log2 L subtree sums of its share. If each rank
took a run of lanes instead, it would keep that many for every rank. After all lanes, the holders of a grain in
different groups exchange their sums, and each finishes the same tree.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from elastic_train.core.lanes import Assignment
from elastic_train.placement.arcs import (
    Arc,
    Groups,
    Path,
    arcs_of,
    are_apart,
    cut_groups,
    in_parts,
    kept_part,
    length,
    overlap,
)

_LEAST_SIZE = Fraction(4, 5)
"""Groups are kept while the smallest has this fraction of an even share: ranks then hold at most a quarter more."""
_LEAST_KEPT = Fraction(1, 2)
"""Groups are kept while members hold this fraction of the circle by their own bases, so that changes move little."""


class Seat(NamedTuple):
    """A rank's seat: `slot` of `size` in its group; `place` is its position in the line of all groups.

    `base` is the number of its base, of `num_base`, None without one; `arcs` are its holdings.
    """

    group: int
    slot: int
    size: int
    place: int
    base: int | None
    num_base: int
    arcs: tuple[Arc, ...]


def seats_of_holders(
    paths: Sequence[Path], copies: int, before: Sequence[Seat | None], is_holder: Sequence[bool]
) -> list[Seat]:
    """Return every rank's seat, by rank, if only some ranks may hold state; these share all of it.

    A rank without state gets a seat without arcs at the end of a group, which sends it weights and assigns it lanes. At
    least one rank must hold state.
    """
    holders = [rank for rank, is_one in enumerate(is_holder) if is_one]
    had = [seat if seat is not None and seat.arcs else None for seat in before or [None] * len(paths)]
    held = seats_of([paths[rank] for rank in holders], copies, [had[rank] for rank in holders])
    firsts = sorted((seat for seat in held if seat.slot == 0), key=lambda seat: seat.group)
    groups = [
        [(rank, seat) for rank, seat in zip(holders, held, strict=True) if seat.group == one.group] for one in firsts
    ]
    for number, rank in enumerate(rank for rank, is_one in enumerate(is_holder) if not is_one):
        turn = number % len(groups)
        groups[turn].append((rank, firsts[turn]._replace(slot=len(groups[turn]), base=None, arcs=())))
    seats: dict[int, Seat] = {}
    for members in groups:
        place = len(seats)
        seats |= {rank: seat._replace(size=len(members), place=place + seat.slot) for rank, seat in members}
    return [seats[rank] for rank in range(len(paths))]


def seats_of_cells(
    paths: Sequence[Path], copies: int, before: Sequence[Sequence[Seat | None]], is_holder: Sequence[bool]
) -> list[Seat]:
    """Return every cell's seat, by cell; each of its ranks has it in its own column, and so computes the same lanes.

    `before` has the earlier seats by place and cell. Of the assignments that the columns would choose, the one that
    moves least over all columns is used.
    """
    ways = [seats_of_holders(paths, copies, had, is_holder) for had in dict.fromkeys(map(tuple, before))]
    return min(ways, key=lambda seats: sum((_moved(seats, had) for had in before), Fraction(0)))


class _Member(NamedTuple):
    """A rank and its base, before it has a seat."""

    rank: int
    base: int | None


_Members = list[list[_Member]]
"""Members of every group."""


def seats_of(paths: Sequence[Path], copies: int, before: Sequence[Seat | None] = ()) -> list[Seat]:
    """Return every rank's seat, by rank; there are min(copies, ranks) groups, numbered from 0.

    `before` has the seats by which ranks hold their current state, None for a rank without state. If they are not of
    one world, because a fault interrupted resharding, groups are cut anew. A domain that replaces a lost one of its
    size takes its places, and no other rank moves.
    """
    assert paths and copies >= 1, f"{copies} copies on {len(paths)} ranks"
    had = list(before) or [None] * len(paths)
    num = min(copies, len(paths))
    ranks = sorted(range(len(paths)), key=_keys(had).__getitem__)
    groups = cut_groups(ranks, paths, num)
    cut = [[_Member(rank, base) for base, rank in enumerate(members)] for members in groups]
    new = _seated(cut, dict(enumerate(map(len, groups))))
    kept = _keeping(ranks, paths, had, num, new)
    return min([*kept, new], key=lambda seats: _moved(seats, had))


def _keeping(
    ranks: Sequence[int], paths: Sequence[Path], had: Sequence[Seat | None], num: int, new: Sequence[Seat]
) -> list[list[Seat]]:
    """Return the seats that keep the last world's groups, for each valid way to add ranks.

    `ranks` are in line order.
    """
    num_bases = _last_groups(had)
    if sorted(num_bases) != list(range(num)):
        return []  # the number of copies has changed, or a group is empty
    newcomers = [rank for rank in ranks if had[rank] is None]
    in_gaps, by_domains, with_mates = (_kept(ranks, had, num) for _ in range(3))
    _add_in_gaps(in_gaps, newcomers, num_bases)
    _add_by_domains(by_domains, newcomers, num_bases, paths)
    ways = [in_gaps, by_domains] if in_gaps != by_domains else [in_gaps]

    def fit(ways: Iterable[_Members]) -> Iterator[list[Seat]]:
        return (seats for groups in ways if _is_fit(seats := _seated(groups, num_bases), new, paths))

    # Prefer groups as soon as they are even enough; drop them if they never are.
    if kept := [seats for groups in ways for seats in itertools.islice(fit(_evened(groups, num_bases, had)), 1)]:
        return kept
    _add_by_domains(with_mates, newcomers, num_bases, paths, joins_mates=True)
    levels = ([path[:depth] for path in paths] for depth in range(max(map(len, paths)), 0, -1))
    return list(fit(_cleared(with_mates, num_bases, domains) for domains in levels))


def _keys(had: Sequence[Seat | None]) -> list[int]:
    """Return the sort keys of ranks: their earlier places, and free places for new ranks."""
    taken = {seat.place for seat in had if seat is not None}
    free = (place for place in itertools.count() if place not in taken)
    return [next(free) if seat is None else seat.place for seat in had]


def _last_groups(had: Sequence[Seat | None]) -> dict[int, int]:
    """Return the number of bases of every group of the last world; empty if the seats are not of one world."""
    seats = [seat for seat in had if seat is not None]
    groups = {(seat.group, seat.num_base) for seat in seats}
    based = [(seat.group, seat.base) for seat in seats if seat.base is not None]
    is_one_world = len({group for group, _ in groups}) == len(groups) and len(set(based)) == len(based)
    return dict(groups) if is_one_world else {}


def _seated(groups: Sequence[Sequence[_Member]], num_bases: Mapping[int, int]) -> list[Seat]:
    """Return the seats of groups of members, by rank."""
    seats: dict[int, Seat] = {}
    for number, members in enumerate(groups):
        ordered = sorted(members, key=lambda member: (member.base is None, member.base or 0))
        arcs = arcs_of([member.base for member in ordered], num_bases[number])
        for slot, (rank, base) in enumerate(ordered):
            seats[rank] = Seat(number, slot, len(members), len(seats), base, num_bases[number], arcs[slot])
    return [seats[rank] for rank in range(len(seats))]


def _kept(ranks: Sequence[int], had: Sequence[Seat | None], num: int) -> _Members:
    """Return the remaining members of each of the last world's groups."""
    groups: _Members = [[] for _ in range(num)]
    for rank in ranks:
        if (seat := had[rank]) is not None:
            groups[seat.group].append(_Member(rank, seat.base))
    return groups


def _add_in_gaps(groups: _Members, newcomers: Sequence[int], num_bases: Mapping[int, int]) -> None:
    """Give each new rank the first free base; without one, add it to the smallest group."""
    gaps = [(number, base) for number, members in enumerate(groups) for base in _free(members, num_bases[number])]
    for place, rank in enumerate(newcomers):
        number, base = gaps[place] if place < len(gaps) else (_smallest(groups), None)
        groups[number].append(_Member(rank, base))


def _add_by_domains(
    groups: _Members,
    newcomers: Sequence[int],
    num_bases: Mapping[int, int],
    paths: Sequence[Path],
    *,
    joins_mates: bool = False,
) -> None:
    """Add new ranks by domain, each domain to the smallest group, on free bases if there are any.

    With `joins_mates`, a domain goes to the group that already has most of its ranks, if any.
    """
    domains: dict[Path, list[int]] = {}
    for rank in newcomers:
        domains.setdefault(paths[rank] or (str(rank),), []).append(rank)
    for path, domain in domains.items():
        mates = [sum(joins_mates and paths[member.rank] == path for member in members) for members in groups]
        number = mates.index(max(mates)) if any(mates) else _smallest(groups)
        bases = itertools.chain(_free(groups[number], num_bases[number]), itertools.repeat(None))
        groups[number] += [_Member(rank, base) for rank, base in zip(domain, bases, strict=False)]


def _cleared(groups: _Members, num_bases: Mapping[int, int], domains: Sequence[Path]) -> _Members:
    """Prevent a group's domains from taking over arcs of which they have a copy; `domains` are by rank.

    All members of a group share its free bases. So if one of their domains has a copy of a free base, a single member
    takes it: one without a copy, whose own base is then free. That moves twice what was lost instead of everything.
    """
    cleared: _Members = []
    for number, members in enumerate(groups):
        here, copies = {domains[rank] for rank, _ in members}, _copies(groups, number, num_bases, domains)
        bases = dict(members)
        for base in _free(members, num_bases[number]):
            if here & copies[base]:
                able = (rank for rank, own in bases.items() if own is not None and not here & copies[own])
                taker = next((rank for rank in able if domains[rank] not in copies[base]), None)
                bases |= {} if taker is None else {taker: base}
        cleared.append([_Member(*pair) for pair in bases.items()])
    return cleared


def _copies(
    groups: _Members, number: int, num_bases: Mapping[int, int], domains: Sequence[Path]
) -> Mapping[int, set[Path]]:
    """Return the domains in which other groups hold a part of each base of a group by their own bases."""
    found: dict[int, set[Path]] = defaultdict(set)
    for other, members in enumerate(groups):
        for rank, base in members if other != number else ():
            if base is not None:
                lo, hi = base * num_bases[number], (base + 1) * num_bases[number]
                for at in range(lo // num_bases[other], -(-hi // num_bases[other])):
                    found[at].add(domains[rank])
    return found


def _evened(groups: _Members, num_bases: Mapping[int, int], had: Sequence[Seat | None]) -> Iterator[_Members]:
    """Yield the groups, then again after each move of a rank from the largest to the smallest, until they are even.

    The moved rank is one that already holds the middle of a free base, if any, to move little.
    """
    while True:
        yield groups
        largest, smallest = max(range(len(groups)), key=lambda number: len(groups[number])), _smallest(groups)
        if len(groups[largest]) - len(groups[smallest]) < 2:
            return
        base = next(iter(_free(groups[smallest], num_bases[smallest])), None)
        middle = Fraction(2 * (base or 0) + 1, 2 * num_bases[smallest])
        mover = next((member for member in groups[largest] if _has(had[member.rank], middle)), groups[largest][-1])
        groups[largest].remove(mover)
        groups[smallest].append(_Member(mover.rank, base))


def _smallest(groups: _Members) -> int:
    return min(range(len(groups)), key=lambda number: len(groups[number]))


def _free(members: Sequence[_Member], num_base: int) -> list[int]:
    """Return the bases that no member has, in order."""
    return sorted(set(range(num_base)) - {member.base for member in members})


def _has(seat: Seat | None, at: Fraction) -> bool:
    return seat is not None and any(lo <= at < hi for lo, hi in seat.arcs)


def _is_fit(kept: Sequence[Seat], new: Sequence[Seat], paths: Sequence[Path]) -> bool:
    """Return True if kept groups are large enough, close enough to their bases, and copies as far apart as possible."""
    num = 1 + max(seat.group for seat in kept)
    needed = min(_LEAST_SIZE * len(paths) / num, Fraction(min(seat.size for seat in new)))
    if min(seat.size for seat in kept) < needed:
        return False
    groups: Groups = [[] for _ in range(num)]
    for rank, seat in enumerate(kept):
        groups[seat.group].append(rank)
    parts = (kept_part([kept[rank].base for rank in ranks], kept[ranks[0]].num_base) for ranks in groups)
    return min(parts) >= _LEAST_KEPT and are_apart(groups, [seat.arcs for seat in kept], paths)


def _moved(seats: Sequence[Seat], had: Sequence[Seat | None]) -> Fraction:
    """Return the amount that ranks receive, as a fraction of the whole state."""
    arcs, num_parts = in_parts([*(seat.arcs for seat in seats), *(old.arcs if old else () for old in had)])
    pairs = zip(arcs[: len(seats)], arcs[len(seats) :], strict=True)
    return Fraction(sum(length(now) - overlap(now, before) for now, before in pairs), num_parts)


def group_lanes(seat: Seat, num_ranks: int, num_lanes: int) -> range:
    """Return the lanes of a seat's group; the groups' lanes are disjoint, in order, and cover all lanes.

    A group's number of lanes is proportional to its ranks, so that a small group does not need more turns.
    """
    return _lanes_of(seat.place - seat.slot, seat.size, num_ranks, num_lanes)


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
        lanes = _lanes_of(first, len(owners), num_cells * expert, num_lanes)
        found |= {owner: lanes[slot :: len(owners)] for slot, owner in enumerate(owners)}
        first += len(owners)
    return tuple(found[owner] for owner in range(num_cells * expert))


def _lanes_of(first: int, size: int, num: int, num_lanes: int) -> range:
    """Return the lanes of `size` neighbours, from number `first`, among `num` that share all lanes."""
    return range(first * num_lanes // num, (first + size) * num_lanes // num)
