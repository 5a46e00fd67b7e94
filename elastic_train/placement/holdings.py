"""The grains that a seat holds: a pure function of the layout and the seat.

All grains lie on one *circle*, over which every flat vector is spread evenly. A group's seats cut the circle into arcs
of equal share. An arc has a run of adjacent grains of every flat vector, so each unit is gathered in equal parts from
all ranks, and rounding does not accumulate on the same slots. Grains of an atomic tensor all start where its first one
does.

The grains of an arc depend only on its ends: seats with disjoint arcs have disjoint grains, whatever the sizes of their
groups. That keeps copies apart (see `arcs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s, UInt64s
from elastic_train.core.keyed_random import mix64_array
from elastic_train.placement.arcs import Arc
from elastic_train.placement.grains import Layout
from elastic_train.placement.seats import Seat


class Run(NamedTuple):
    """Elements [lo, hi) of one flat vector."""

    flat: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Circle:
    """The fixed order of a layout's grains, from which holdings are cut.

    `grains` are their numbers in that order; `starts` has the number of elements before each grain, or before the first
    grain of its atom; both of shape (grains,). `length` is the total number of elements, padding included.
    """

    grains: Int64s
    starts: Int64s
    length: int


def circle_of(layout: Layout) -> Circle:
    """Return the circle: grains ordered by the relative position of their middles in their flat vectors."""
    lengths = np.array([flat.numel for flat in layout.flats], dtype=np.int64)[layout.flat_of]
    atoms = np.bincount(layout.atom, layout.span, layout.num_grains)[layout.atom]  # the elements of each grain's atom
    middles = (layout.start[layout.atom] + atoms / 2) / lengths  # a single rounding, equal on every machine
    grains = np.lexsort((layout.start, layout.flat_of, middles)).astype(np.int64)
    spans = layout.span[grains]
    starts = np.empty_like(spans)
    starts[grains] = np.cumsum(spans) - spans
    return Circle(grains, starts[layout.atom][grains], int(spans.sum()))


NO_GRAINS = Circle(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0)
"""Circle of state that is not sharded by seats."""


class Column(NamedTuple):
    """A shard group: the ranks with one part of the state, whose grains they hold by their seats on the circle.

    If every rank is a replica, all ranks are one column with the whole state. With no grains on the circle, each rank
    holds the whole part.
    """

    layout: Layout
    circle: Circle = NO_GRAINS

    @property
    def is_whole(self) -> bool:
        """True if each rank of the column holds the whole part."""
        return self.circle is NO_GRAINS  # a part without a grain may be held either way

    def trained_by(self, seat: Seat | None) -> Int64s:
        """Return the trained grains that a rank holds, ascending: all, or those of its seat, none without one."""
        if self.is_whole:
            return self.layout.trained
        return self.layout.trained_of(grains_in(self.circle, () if seat is None else seat.arcs))

    def missing(self, by_rank: Iterable[Sequence[Arc]]) -> int:
        """Return the number of grains that none of several ranks holds, by their arcs; 0 if each rank holds all."""
        if self.is_whole:
            return 0
        [covered] = _stretches_of(self.circle, [[arc for arcs in by_rank for arc in arcs]])
        return self.layout.num_grains - sum(hi - lo for lo, hi in covered)


def column_of(layout: Layout) -> Column:
    """Return the column of ranks that hold a layout's grains by their seats."""
    return Column(layout, circle_of(layout))


def grains_in(circle: Circle, arcs: Sequence[Arc]) -> Int64s:
    """Return the numbers of the grains that start in some arcs, which may overlap, ascending."""
    return grains_in_each(circle, [arcs])[0]


def grains_in_each(circle: Circle, by_rank: Sequence[Sequence[Arc]]) -> list[Int64s]:
    """Return the numbers of the grains in each rank's arcs, by rank, each ascending."""
    holdings = []
    for stretches in _stretches_of(circle, by_rank):
        grains = np.concatenate([circle.grains[:0], *[circle.grains[lo:hi] for lo, hi in stretches]])
        grains.sort()
        holdings.append(grains)
    return holdings


def all_held(circle: Circle, seats: Sequence[Seat]) -> list[Int64s]:
    """Return the numbers of the grains that every rank holds, by rank."""
    return grains_in_each(circle, [seat.arcs for seat in seats])


def shared_with(mine: Int64s, theirs: Sequence[Int64s]) -> list[Int64s]:
    """Return the intersection of some grains with each of several holdings, the same object if all of one is shared."""
    each = _once(theirs)
    every = np.concatenate([mine[:0], *each.values()])
    is_mine = np.zeros(1 + max(int(grains.max(initial=-1)) for grains in (mine, every)), dtype=np.bool_)
    is_mine[mine] = True
    is_shared = is_mine[every]
    shared, sizes = every[is_shared], [grains.size for grains in each.values()]
    ends = [0, *np.append(0, np.cumsum(is_shared))[np.cumsum(sizes, dtype=np.int64)].tolist()]
    found = {
        number: grains if hi - lo == grains.size else shared[lo:hi]
        for (number, grains), (lo, hi) in zip(each.items(), pairwise(ends), strict=True)
    }
    return [found[id(grains)] for grains in theirs]


def _once(holdings: Iterable[Int64s]) -> dict[int, Int64s]:
    """Return each object once, by its identity: in a large world, many ranks want or send the same grains."""
    return {id(grains): grains for grains in holdings}


def signs_of(holdings: Sequence[Int64s], num_grains: int) -> UInt64s:
    """Return a random number for each grain that identifies the set of ranks that hold it, 0 for none."""
    each, signs = _once(holdings), np.zeros(num_grains, dtype=np.uint64)
    of_rank = mix64_array(np.arange(1, 1 + len(holdings), dtype=np.uint64))
    of_object = dict.fromkeys(each, np.uint64(0))
    for grains, sign in zip(holdings, of_rank, strict=True):
        of_object[id(grains)] ^= sign
    for number, grains in each.items():
        signs[grains] ^= of_object[number]
    return signs


def equal_ones(grains: Int64s, signs: UInt64s) -> list[Int64s]:
    """Return the grains of each sign, ascending, in the order of first grains; `signs` has one per grain."""
    order = np.lexsort(signs.view(np.uint16).reshape(-1, 4).T)  # by 16 bits at a time: in linear time
    changes = np.flatnonzero(np.diff(signs[order])) + 1
    return sorted(np.split(grains[order], changes), key=itemgetter(0)) if grains.size else []


def holders_of(grains: Sequence[int], holdings: Sequence[Int64s], num_grains: int) -> list[list[int]]:
    """Return the ranks that hold each of some grains, ascending."""
    ranks: dict[int, list[int]] = {}
    for rank, held in enumerate(holdings):
        ranks.setdefault(id(held), []).append(rank)
    each, places = _once(holdings), np.full(num_grains, -1)
    places[grains] = np.arange(len(grains))
    at = places[np.concatenate([*each.values()])]
    of_object = np.repeat(np.arange(len(each)), [held.size for held in each.values()])[at >= 0]
    by_number, found = list(ranks.values()), [list[int]() for _ in grains]
    for place, number in zip(at[at >= 0].tolist(), of_object.tolist(), strict=True):
        found[place] += by_number[number]
    return list(map(sorted, found))


def _stretches_of(circle: Circle, by_rank: Sequence[Sequence[Arc]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the disjoint stretches of the circle's grains that each rank's arcs cover, in order."""
    edges = iter(_edges(circle, (end for arcs in by_rank for arc in arcs for end in arc)))
    for arcs in by_rank:
        stretches, last = [], 0
        for lo, hi in sorted((next(edges), next(edges)) for _ in arcs):
            stretches.append((max(lo, last), hi))
            last = max(last, hi)
        yield [(lo, hi) for lo, hi in stretches if lo < hi]


def _edges(circle: Circle, ends: Iterable[Fraction]) -> list[int]:
    """Return the number of grains that start before each of some fractions of the circle."""
    lengths = [-(-at.numerator * circle.length // at.denominator) for at in ends]
    edges: list[int] = np.searchsorted(circle.starts, np.array(lengths, dtype=np.int64)).tolist()
    return edges


def sections_of(circle: Circle, num_sections: int) -> Int64s:
    """Return the equal section of the circle in which each grain starts, by grain number; shape (grains,)."""
    edges = _edges(circle, (Fraction(section, num_sections) for section in range(num_sections + 1)))
    sections = np.empty_like(circle.grains)
    sections[circle.grains] = np.repeat(np.arange(num_sections), np.diff(edges))
    return sections


def runs_of(layout: Layout, grains: Int64s, sections: Int64s | None = None) -> list[Run]:
    """Return the positions of grains, padding included, as the fewest runs of flat vectors; by flat vector, ascending.

    An arc has at most one run per flat vector, or one per section if `sections` are given.
    """
    return runs_of_each(layout, [grains], sections)[0]


def runs_of_each(layout: Layout, holdings: Sequence[Int64s], sections: Int64s | None = None) -> list[list[Run]]:
    """Return the runs of each of several holdings; equal objects have one list."""
    each = _once(holdings)
    numbers = np.repeat(np.arange(len(each)), np.array([grains.size for grains in each.values()], dtype=np.int64))
    grains = np.concatenate([layout.flat_of[:0], *each.values()])
    order = np.argsort(numbers * len(layout.flats) + layout.flat_of[grains], kind="stable")  # grains are in order there
    numbers, grains = numbers[order], grains[order]
    flats, los = layout.flat_of[grains], layout.start[grains]
    his = los + layout.span[grains]
    alike = (numbers, flats) if sections is None else (numbers, flats, sections[grains])
    first, end = stretches(los, his, *alike)
    runs = list(map(Run, flats[first].tolist(), los[first].tolist(), his[end - 1].tolist()))
    edges = [0, *np.cumsum(np.bincount(numbers[first], minlength=len(each))).tolist()]
    found = {number: runs[lo:hi] for number, (lo, hi) in zip(each, pairwise(edges), strict=True)}
    return [found[id(grains)] for grains in holdings]


def grains_side_by_side(layout: Layout, grains: Int64s, held: Sequence[Run]) -> list[tuple[Run, tuple[int, ...]]]:
    """Return grains' positions, without padding, and their lengths; adjacent grains in one tensor and run are joined.

    `grains` are ascending, and `held` are the runs that contain them.
    """
    flats, los, lengths = layout.flat_of[grains], layout.start[grains], layout.hi[grains] - layout.lo[grains]
    begins = {(run.flat, run.lo) for run in held}
    run_of = np.cumsum([at in begins for at in zip(flats.tolist(), los.tolist(), strict=True)])
    first, end = stretches(los, los + lengths, layout.tensor_of[grains], run_of)
    runs = np.stack([flats[first], los[first], (los + lengths)[end - 1]], axis=1).tolist()
    parts = zip(runs, first.tolist(), end.tolist(), strict=True)
    return [(Run(*run), tuple(lengths[lo:hi].tolist())) for run, lo, hi in parts]


def stretches(los: Int64s, his: Int64s, *alike: Int64s) -> tuple[Int64s, Int64s]:
    """Return starts and ends of stretches of rows: each row starts where the previous one ends, with equal `alike`."""
    begins = np.ones(los.size, dtype=np.bool_)
    begins[1:] = los[1:] != his[:-1]
    for column in alike:
        begins[1:] |= column[1:] != column[:-1]
    firsts = np.flatnonzero(begins)
    return firsts, np.append(firsts, los.size)[1:]


def by_flat(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Return runs by the number of their flat vector, in order."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.flat, []).append(run)
    return found


def num_elements(layout: Layout, grains: Int64s) -> int:
    """Return the number of elements of grains, padding included."""
    return int(layout.span[grains].sum())
