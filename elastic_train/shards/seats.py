"""Seats: the ranks of a world make `copies` groups, each of which holds everything once, laid over failure domains.

Ranks are put in a line in which domains (racks, in them nodes) stay together, and the line is cut into groups of
neighbours. Each group holds the whole, in the line's order, so the copies of a grain are a group's length apart. Hence
no domain that is at most as long as the smallest group has two of them, even where a group's end cuts through it. A
domain that is longer cannot avoid that in groups of even sizes, and becomes a group by itself. With fewer domains than
groups, each domain gets groups in proportion to its ranks, and the same holds of the domains in it.

So of a grain's holders in any domain, as many are in different domains within it as there are such domains or holders:
where there are `copies` domains, any copies - 1 of them may be lost at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Path = tuple[str, ...]
"""Where a rank is, from the widest domain to the narrowest, such as (rack, node); () for a rank by itself."""


class Seat(NamedTuple):
    """A rank's seat: `slot` of `size` in its group; `place` is where it is in the line of all groups."""

    group: int
    slot: int
    size: int
    place: int


def seats_of(paths: Sequence[Path], copies: int, before: Sequence[int | None] = ()) -> list[Seat]:
    """Return every rank's seat, by rank; there are min(copies, ranks) groups, numbered from 0.

    `before` are the places that ranks had in the last world, None for one that is new: those keep their order, and the
    new ones take the places that are free, so that a domain that replaces one of its size moves nobody else.
    """
    assert paths and copies >= 1, f"{copies} copies on {len(paths)} ranks"
    ranks = sorted(range(len(paths)), key=_keys(before or [None] * len(paths)).__getitem__)
    groups = _groups(ranks, paths, 0, min(copies, len(paths)))
    seats: dict[int, Seat] = {}
    for number, members in enumerate(groups):
        for slot, rank in enumerate(members):
            seats[rank] = Seat(number, slot, len(members), len(seats))
    return [seats[rank] for rank in range(len(paths))]


def _keys(before: Sequence[int | None]) -> list[int]:
    """Return what to order the ranks by: the places that they had, and for new ones the free ones, by rank."""
    taken = {place for place in before if place is not None}
    free = (place for place in range(max(taken, default=-1) + len(before) + 1) if place not in taken)
    return [next(free) if place is None else place for place in before]


def _groups(ranks: list[int], paths: Sequence[Path], depth: int, num: int) -> list[list[int]]:
    """Cut ranks that share the first `depth` names of their paths into `num` groups, none of them empty."""
    if num == 1:
        return [_in_line(ranks, paths, depth)]
    domains = _domains(ranks, paths, depth)
    if len(domains) >= num:
        return _spread(domains, paths, depth, num)
    shares = _apportion([len(domain) for domain in domains], num)
    parts = [_groups(domain, paths, depth + 1, share) for domain, share in zip(domains, shares, strict=True)]
    return [group for part in parts for group in part]


def _spread(domains: list[list[int]], paths: Sequence[Path], depth: int, num: int) -> list[list[int]]:
    """Cut a line of at least `num` domains so that none of them is in two groups at places that hold the same."""
    length = sum(len(domain) for domain in domains)
    longest = max(domains, key=len)
    if num > 1 and len(longest) * num > length:
        others = [domain for domain in domains if domain is not longest]
        return [_in_line(longest, paths, depth + 1), *_spread(others, paths, depth, num - 1)]
    line = [rank for domain in domains for rank in _in_line(domain, paths, depth + 1)]
    return [line[number * length // num : (number + 1) * length // num] for number in range(num)]


def _in_line(ranks: list[int], paths: Sequence[Path], depth: int) -> list[int]:
    """Put the ranks of one domain in a line in which the domains within it stay together."""
    if len(ranks) == 1 or all(len(paths[rank]) <= depth for rank in ranks):
        return ranks
    return [rank for domain in _domains(ranks, paths, depth) for rank in _in_line(domain, paths, depth + 1)]


def _domains(ranks: list[int], paths: Sequence[Path], depth: int) -> list[list[int]]:
    """Sort ranks into the domains that their paths name next, in the order of the domains' first ranks.

    A rank whose path ends here is a domain by itself.
    """
    domains: dict[str | int, list[int]] = {}
    for rank in ranks:
        domains.setdefault(paths[rank][depth] if depth < len(paths[rank]) else rank, []).append(rank)
    return list(domains.values())


def _apportion(sizes: Sequence[int], num: int) -> list[int]:
    """Share `num` groups out to fewer domains, at least one each and no more than each has ranks, by their sizes.

    Each further group goes where the smallest stays largest: it decides how much memory a rank needs (highest averages,
    D'Hondt 1882).
    """
    shares = [1] * len(sizes)
    for _ in range(num - len(sizes)):
        open_ = [number for number, size in enumerate(sizes) if shares[number] < size]
        most = max(open_, key=lambda number: (sizes[number] / (shares[number] + 1), -number))
        shares[most] += 1
    return shares
