"""Arcs: what part of a circle every member of a group holds, such that few changes of the group move little.

The group began as `num_base` members with an arc of equal length each, their *base*. Who is left of them keeps as much
of it as a member's even share allows. Everything else (the bases of those that are gone, and what the others gave up)
is one line, out of which members are filled up to their even shares, in their order.

So while the line is a small part of the circle, a loss moves what was lost and a part of the line, a new member gets
its share and nothing else moves but a part of the line; a member that takes a free base restores what was before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

N = TypeVar("N", int, Fraction)
Arc = tuple[Fraction, Fraction]
"""From lo to before hi, in parts of the circle; ascending and apart where there are several."""
Part = tuple[int, int]
"""An arc in equal parts of the circle."""


def arcs_of(bases: Sequence[int | None], num_base: int) -> list[tuple[Arc, ...]]:
    """Return the arcs of every member of a group, by member, from the numbers of their bases, None without one.

    The arcs of all members make up the circle, and each member's are 1 / members of it. All of them begin and end at
    whole parts of num_base * members of the circle, so until they are whole they are counted in these parts.
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
    """Return how much of the circle members hold of their own bases; the rest is the line."""
    return sum(base is not None for base in bases) * min(Fraction(1, num_base), Fraction(1, len(bases)))


def length(arcs: Iterable[tuple[N, N]]) -> N | int:
    """Return the length of arcs that are apart."""
    return sum(hi - lo for lo, hi in arcs)


def overlap(some: Sequence[tuple[N, N]], others: Sequence[tuple[N, N]]) -> N | int:
    """Return the length of what two members' arcs have in common."""
    both = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return length((lo, hi) for lo, hi in both if lo < hi)


def in_parts(by_member: Sequence[Sequence[Arc]]) -> tuple[list[list[Part]], int]:
    """Return arcs in whole numbers, of as many equal parts of the circle as that takes: to compare many of them."""
    num_parts = math.lcm(*{end.denominator for arcs in by_member for arc in arcs for end in arc})

    def counted(end: Fraction) -> int:
        return end.numerator * (num_parts // end.denominator)

    return [[(counted(lo), counted(hi)) for lo, hi in arcs] for arcs in by_member], num_parts


def _kept(base: int, base_length: int, share: int) -> Part:
    lo = base * base_length
    return lo, lo + min(base_length, share)


def _others(kept: dict[int, Part], num_base: int, base_length: int) -> list[Part]:
    """Return what is in nobody's kept arc, in order."""
    ends = [kept[base][1] if base in kept else base * base_length for base in range(num_base)]
    arcs = [(lo, (base + 1) * base_length) for base, lo in enumerate(ends)]
    return [(lo, hi) for lo, hi in arcs if lo < hi]


def _join(arcs: Sequence[Part]) -> list[Part]:
    """Sort arcs, and join those that touch."""
    joined: list[Part] = []
    for lo, hi in sorted(arcs):
        if joined and joined[-1][1] == lo:
            lo = joined.pop()[0]
        joined.append((lo, hi))
    return joined


class _Line:
    """Arcs that are given away from the first on."""

    def __init__(self, arcs: list[Part]) -> None:
        self._arcs = arcs[::-1]

    def take(self, wanted: int) -> list[Part]:
        """Take arcs of a length off the line."""
        taken = []
        while wanted > 0:
            lo, hi = self._arcs.pop()
            middle = min(hi, lo + wanted)
            taken.append((lo, middle))
            wanted -= middle - lo
            if middle < hi:
                self._arcs.append((middle, hi))
        return taken
