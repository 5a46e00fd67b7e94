"""Assign each member of a group arcs of a circle so that small changes of the group move little.

The group starts with `num_base` members, each with an arc of equal length, its *base*. Remaining members keep as much
of their base as an even share allows. Everything else (bases of lost members, and what the others gave up) forms one
line, from which members are filled up to their even shares, in order.

While the line is a small part of the circle, a loss moves only the lost arc and a part of the line, and a new member
moves only its own share and a part of the line. A member that takes a free base restores the earlier assignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

N = TypeVar("N", int, Fraction)
Arc = tuple[Fraction, Fraction]
"""From lo to before hi, as fractions of the circle; several arcs are ascending and disjoint."""
Part = tuple[int, int]
"""An arc in units of equal fractions of the circle."""


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
