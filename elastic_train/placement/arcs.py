"""Assign ranks to groups across failure domains, and each member of a group arcs of a circle.

Small changes of a group move little. The group starts with `num_base` members, each with an arc of equal length, its
*base*. Remaining members keep as much of their base as an even share allows. Everything else (bases of lost members,
and what the others gave up) forms one line, from which members are filled up to their even shares, in order.

While the line is a small part of the circle, a loss moves only the lost arc and a part of the line, and a new member
moves only its own share and a part of the line. A member that takes a free base restores the earlier assignment.

Each group holds everything once, and copies are as far apart as possible. Ranks are put in a line that keeps domains
(racks, and nodes in them) together, and the line is cut into groups of neighbours. Each group holds the whole state in
the line's order, so copies of a grain are a group's length apart. Hence no domain up to the size of the smallest group
has two copies, even if a group boundary cuts it. A larger domain cannot avoid that in groups of even sizes, and becomes
a group of its own. With fewer domains than groups, each domain gets groups in proportion to its ranks, and so on within
it.

So, within any domain, a grain's holders are in as many different subdomains as there are subdomains or holders: with
`copies` domains, any copies - 1 of them may be lost at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

N = TypeVar("N", int, Fraction)
Arc = tuple[Fraction, Fraction]
"""From lo to before hi, as fractions of the circle; several arcs are ascending and disjoint."""
Part = tuple[int, int]
"""An arc in units of equal fractions of the circle."""

Path = tuple[str, ...]
"""Location of a rank, from the widest domain to the narrowest, e.g. (rack, node); () for a rank on its own."""

Groups = list[list[int]]
"""Ranks of every group, by slot."""


def arcs_of(bases: Sequence[int | None], num_base: int) -> list[tuple[Arc, ...]]:
    """Return the arcs of every member of a group; `bases` has the members' base numbers, None without one.

    The arcs cover the circle, and each member has 1 / members of it. All ends are multiples of 1 / (num_base *
    members), so arcs are computed as integers in these units.
    """
    base_length, share = len(bases), num_base
    kept = {base: _kept(base, base_length, share) for base in bases if base is not None}
    assert len(kept) == sum(base is not None for base in bases), f"two members of one base in {bases}"
    line = _Line(_others(kept, num_base, base_length))
    circle = num_base * len(bases)
    found = []
    for base in bases:
        own = [] if base is None else [kept[base]]
        arcs = _join([*own, *line.take(share - sum(hi - lo for lo, hi in own))])
        found.append(tuple((Fraction(lo, circle), Fraction(hi, circle)) for lo, hi in arcs))
    return found


def kept_part(bases: Sequence[int | None], num_base: int) -> Fraction:
    """Return the fraction of the circle that members hold by their own bases; the rest is the line."""
    return sum(base is not None for base in bases) * min(Fraction(1, num_base), Fraction(1, len(bases)))


def length(arcs: Iterable[tuple[N, N]]) -> N | int:
    """Return the total length of disjoint arcs."""
    return sum(hi - lo for lo, hi in arcs)


def overlap(some: Sequence[tuple[N, N]], others: Sequence[tuple[N, N]]) -> N | int:
    """Return the length of the intersection of two members' arcs."""
    both = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return length((lo, hi) for lo, hi in both if lo < hi)


def in_parts(by_member: Sequence[Sequence[Arc]]) -> tuple[list[list[Part]], int]:
    """Return arcs as integers, and the number of units in the circle, for comparing many of them."""
    num_parts = math.lcm(*{end.denominator for arcs in by_member for arc in arcs for end in arc})

    def counted(end: Fraction) -> int:
        return end.numerator * (num_parts // end.denominator)

    return [[(counted(lo), counted(hi)) for lo, hi in arcs] for arcs in by_member], num_parts


def _kept(base: int, base_length: int, share: int) -> Part:
    lo = base * base_length
    return lo, lo + min(base_length, share)


def _others(kept: dict[int, Part], num_base: int, base_length: int) -> list[Part]:
    """Return the parts of the circle outside all kept arcs, in order."""
    ends = [kept[base][1] if base in kept else base * base_length for base in range(num_base)]
    arcs = [(lo, (base + 1) * base_length) for base, lo in enumerate(ends)]
    return [(lo, hi) for lo, hi in arcs if lo < hi]


def _join(arcs: Sequence[Part]) -> list[Part]:
    """Sort arcs and join adjacent ones."""
    joined: list[Part] = []
    for lo, hi in sorted(arcs):
        if joined and joined[-1][1] == lo:
            lo = joined.pop()[0]
        joined.append((lo, hi))
    return joined


class _Line:
    """Arcs to give away, in order."""

    def __init__(self, arcs: list[Part]) -> None:
        self._arcs = arcs[::-1]

    def take(self, wanted: int) -> list[Part]:
        """Remove arcs of a total length from the line and return them."""
        taken = []
        while wanted > 0:
            lo, hi = self._arcs.pop()
            middle = min(hi, lo + wanted)
            taken.append((lo, middle))
            wanted -= middle - lo
            if middle < hi:
                self._arcs.append((middle, hi))
        return taken


def paths_of_cells(cells: Sequence[Sequence[Path]]) -> list[Path]:
    """Return each cell's path, given the paths of its ranks by place, all of one length.

    Two cells share a domain if any two of their ranks with the same place do: that domain has two copies of its part.
    """
    depth = min(len(path) for cell in cells for path in cell)
    levels = [_linked(cells, end) for end in range(1, depth + 1)]
    return [tuple(str(level[number]) for level in levels) for number in range(len(cells))]


def _linked(cells: Sequence[Sequence[Path]], depth: int) -> list[int]:
    """Return the first cell of each cell's domain, where domains are the first `depth` names of paths."""
    firsts, before = list(range(len(cells))), list[int]()
    while firsts != before:
        before, lowest = firsts, dict[tuple[int, Path], int]()
        for first, cell in zip(firsts, cells, strict=True):
            for place, path in enumerate(cell):
                lowest[place, path[:depth]] = min(first, lowest.get((place, path[:depth]), first))
        firsts = [min(lowest[place, path[:depth]] for place, path in enumerate(cell)) for cell in cells]
    return firsts


def cut_groups(ranks: Sequence[int], paths: Sequence[Path], num: int) -> Groups:
    """Cut ranks into `num` non-empty groups, in their order where domains allow it."""
    return _groups(list(ranks), paths, 0, num)


def are_apart(groups: Groups, arcs: Sequence[Sequence[Arc]], paths: Sequence[Path]) -> bool:
    """Return True if each domain's holders of anything are in as many different subdomains as possible.

    `arcs` are the holdings, by rank.
    """
    children: dict[Path, set[str | int]] = {}
    for rank, path in enumerate(paths):
        for depth in range(len(path) + 1):
            children.setdefault(path[:depth], set()).add(_within(path, depth, rank))
    parts, _ = in_parts(arcs)
    begins = sorted(
        (lo, number, rank) for number, ranks in enumerate(groups) for rank in ranks for lo, _ in parts[rank]
    )
    holders = dict[int, int]()
    for _, some in groupby(begins, key=itemgetter(0)):
        holders |= {number: rank for _, number, rank in some}
        if not _is_spread(holders.values(), paths, children):
            return False
    return True


def _is_spread(holders: Iterable[int], paths: Sequence[Path], children: dict[Path, set[str | int]]) -> bool:
    found: dict[Path, list[str | int]] = {}
    for rank in holders:
        for depth in range(len(paths[rank]) + 1):
            found.setdefault(paths[rank][:depth], []).append(_within(paths[rank], depth, rank))
    return all(len(set(names)) == min(len(children[path]), len(names)) for path, names in found.items())


def _within(path: Path, depth: int, rank: int) -> str | int:
    """Return the subdomain of a rank, below the first `depth` names of its path."""
    return path[depth] if depth < len(path) else rank


def _groups(ranks: list[int], paths: Sequence[Path], depth: int, num: int) -> Groups:
    """Cut ranks that share the first `depth` names of their paths into `num` non-empty groups."""
    if num == 1:
        return [_in_line(ranks, paths, depth)]
    domains = _domains(ranks, paths, depth)
    if len(domains) >= num:
        return _spread(domains, paths, depth, num)
    shares = _apportion([len(domain) for domain in domains], num)
    parts = [_groups(domain, paths, depth + 1, share) for domain, share in zip(domains, shares, strict=True)]
    return [group for part in parts for group in part]


def _spread(domains: Groups, paths: Sequence[Path], depth: int, num: int) -> Groups:
    """Cut a line of at least `num` domains so that no domain is in two groups at positions that hold the same."""
    length = sum(len(domain) for domain in domains)
    longest = max(domains, key=len)
    if num > 1 and len(longest) * num > length:
        others = [domain for domain in domains if domain is not longest]
        return [_in_line(longest, paths, depth + 1), *_spread(others, paths, depth, num - 1)]
    line = [rank for domain in domains for rank in _in_line(domain, paths, depth + 1)]
    return [line[number * length // num : (number + 1) * length // num] for number in range(num)]


def _in_line(ranks: list[int], paths: Sequence[Path], depth: int) -> list[int]:
    """Put the ranks of one domain in a line that keeps its subdomains together."""
    if len(ranks) == 1 or all(len(paths[rank]) <= depth for rank in ranks):
        return ranks
    return [rank for domain in _domains(ranks, paths, depth) for rank in _in_line(domain, paths, depth + 1)]


def _domains(ranks: list[int], paths: Sequence[Path], depth: int) -> Groups:
    """Group ranks by the next name of their paths, in order of the domains' first ranks.

    A rank whose path ends here is its own domain.
    """
    domains: dict[str | int, list[int]] = {}
    for rank in ranks:
        domains.setdefault(_within(paths[rank], depth, rank), []).append(rank)
    return list(domains.values())


def _apportion(sizes: Sequence[int], num: int) -> list[int]:
    """Distribute `num` groups to fewer domains in proportion to their sizes: at least one, at most one per rank.

    Each further group goes where the smallest group stays largest, because that determines the memory per rank (highest
    averages, D'Hondt 1882).
    """
    shares = [1] * len(sizes)
    for _ in range(num - len(sizes)):
        open_ = [number for number, size in enumerate(sizes) if shares[number] < size]
        most = max(open_, key=lambda number: (sizes[number] / (shares[number] + 1), -number))
        shares[most] += 1
    return shares
