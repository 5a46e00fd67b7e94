"""Holdings: which grains a seat holds, a pure function of the layout and the seat.

All grains stand on one *circle*, around which every flat vector is spread evenly. A group's seats cut the circle into
arcs, an even share each. An arc has a run of neighbouring grains of every flat vector, so that whatever is gathered
together comes from all ranks of the group in equal parts, and no rounding adds up over the flat vectors in favour of
the same slots. Grains of a tensor that is held as a whole all begin where its first one does.

The grains of an arc depend on its ends alone: seats whose arcs share nothing share no grain, whatever the sizes of
their groups. That is what keeps copies apart (see `domains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s
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

    `grains` are their numbers in that order; `starts` is how many elements come before each, or before the first of
    those that it is held with; both of shape (grains,). `length` is the elements of them all, padding included.
    """

    grains: Int64s
    starts: Int64s
    length: int


def circle_of(layout: Layout) -> Circle:
    """Return the order in which every flat vector is spread evenly over the whole: by its grains' middles."""
    lengths = np.array([flat.numel for flat in layout.flats], dtype=np.int64)[layout.flat_of]
    atoms = np.bincount(layout.atom, layout.span, layout.num_grains)[layout.atom]  # the elements of each grain's atom
    middles = (layout.start[layout.atom] + atoms / 2) / lengths  # a single rounding, which every machine does alike
    grains = np.lexsort((layout.start, layout.flat_of, middles)).astype(np.int64)
    spans = layout.span[grains]
    starts = np.empty_like(spans)
    starts[grains] = np.cumsum(spans) - spans
    return Circle(grains, starts[layout.atom][grains], int(spans.sum()))


NO_GRAINS = Circle(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 0)
"""The circle of what is not held by seats."""


class Column(NamedTuple):
    """What ranks with one part of the state hold together: a layout's grains, a share each by its seat on the circle.

    Where every rank is a replica, all of them are one column, which holds the whole state. With no grains on the circle
    each rank of the column holds all of it.
    """

    layout: Layout
    circle: Circle = NO_GRAINS

    @property
    def is_whole(self) -> bool:
        """Whether each rank of the column holds all of it."""
        return self.circle.grains.size < self.layout.num_grains

    def trained_by(self, seat: Seat | None) -> Int64s:
        """Return the trained grains that a rank holds, ascending: all, or those of its seat, and none without one."""
        if self.is_whole:
            return self.layout.trained
        return self.layout.trained_of(grains_in(self.circle, () if seat is None else seat.arcs))

    def missing(self, by_rank: Iterable[Sequence[Arc]]) -> int:
        """Return how many grains none of several ranks holds, by their arcs; none where each of them holds all."""
        if self.is_whole:
            return 0
        return self.layout.num_grains - grains_in(self.circle, (arc for arcs in by_rank for arc in arcs)).size


def column_of(layout: Layout) -> Column:
    """Return the column of ranks that hold the grains of a layout by their seats."""
    return Column(layout, circle_of(layout))


def grains_in(circle: Circle, arcs: Iterable[Arc]) -> Int64s:
    """Return the numbers of the grains that begin in some arcs of the circle, which may overlap, ascending."""
    edges = _edges(circle, (end for arc in arcs for end in arc))
    slices = [circle.grains[lo:hi] for lo, hi in zip(edges[::2], edges[1::2], strict=True)]
    grains = np.sort(np.concatenate([circle.grains[:0], *slices]))
    return grains[np.diff(grains, prepend=-1) > 0]


def all_held(circle: Circle, seats: Sequence[Seat]) -> list[Int64s]:
    """Return the numbers of the grains that every rank of a world holds, by rank."""
    return [grains_in(circle, seat.arcs) for seat in seats]


def shared_with(mine: Int64s, theirs: Sequence[Int64s]) -> list[Int64s]:
    """Return which of some grains are in each of several holdings."""
    is_mine = np.zeros(1 + max((int(grains[-1]) for grains in (mine, *theirs) if grains.size), default=-1), np.bool_)
    is_mine[mine] = True
    return [grains[is_mine[grains]] for grains in theirs]


def _edges(circle: Circle, ends: Iterable[Fraction]) -> list[int]:
    """Return how many grains begin before some parts of the circle's length."""
    lengths = [-(-at.numerator * circle.length // at.denominator) for at in ends]
    return list(map(int, np.searchsorted(circle.starts, np.array(lengths, dtype=np.int64))))


def sections_of(circle: Circle, num_sections: int) -> Int64s:
    """Return in which of the circle's equal sections each grain begins, by its number; shape (grains,)."""
    edges = _edges(circle, (Fraction(section, num_sections) for section in range(num_sections + 1)))
    sections = np.empty_like(circle.grains)
    sections[circle.grains] = np.repeat(np.arange(num_sections), np.diff(edges))
    return sections


def runs_of(layout: Layout, grains: Int64s, sections: Int64s | None = None) -> list[Run]:
    """Return where grains are, their padding included, as the fewest runs of flat vectors; by flat vector, ascending.

    An arc has one run of each flat vector at most; with `sections` of grains, one in each.
    """
    return runs_of_each(layout, [grains], sections)[0]


def runs_of_each(layout: Layout, holdings: Sequence[Int64s], sections: Int64s | None = None) -> list[list[Run]]:
    """Return the runs of each of several holdings."""
    numbers = np.repeat(np.arange(len(holdings)), [grains.size for grains in holdings])
    grains = np.concatenate([layout.flat_of[:0], *holdings])
    order = np.lexsort((layout.start[grains], layout.flat_of[grains], numbers))
    numbers, grains = numbers[order], grains[order]
    flats, los = layout.flat_of[grains], layout.start[grains]
    his = los + layout.span[grains]
    alike = (numbers, flats) if sections is None else (numbers, flats, sections[grains])
    first, end = _stretches(los, his, *alike)
    runs: list[list[Run]] = [[] for _ in holdings]
    for number, *run in np.stack([numbers[first], flats[first], los[first], his[end - 1]], axis=1).tolist():
        runs[number].append(Run(*run))
    return runs


def grains_side_by_side(layout: Layout, grains: Int64s, held: Sequence[Run]) -> list[tuple[Run, tuple[int, ...]]]:
    """Return where grains are, without padding, and their lengths: neighbours in one tensor and one run together.

    `grains` are ascending, and `held` are the runs that they are in.
    """
    flats, los, lengths = layout.flat_of[grains], layout.start[grains], layout.hi[grains] - layout.lo[grains]
    begins = {(run.flat, run.lo) for run in held}
    run_of = np.cumsum([at in begins for at in zip(flats.tolist(), los.tolist(), strict=True)])
    first, end = _stretches(los, los + lengths, layout.tensor_of[grains], run_of)
    runs = np.stack([flats[first], los[first], (los + lengths)[end - 1]], axis=1).tolist()
    parts = zip(runs, first.tolist(), end.tolist(), strict=True)
    return [(Run(*run), tuple(lengths[lo:hi].tolist())) for run, lo, hi in parts]


def _stretches(los: Int64s, his: Int64s, *alike: Int64s) -> tuple[Int64s, Int64s]:
    """Return where stretches of rows begin, and end: rows that begin where the one before ends, and are `alike`."""
    begins = np.ones(los.size, dtype=np.bool_)
    begins[1:] = los[1:] != his[:-1]
    for column in alike:
        begins[1:] |= column[1:] != column[:-1]
    firsts = np.flatnonzero(begins)
    return firsts, np.append(firsts, los.size)[1:]


def by_flat(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Return runs by the number of their flat vector, in their order."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.flat, []).append(run)
    return found


def num_elements(layout: Layout, grains: Int64s) -> int:
    """Return how many elements grains take, padding included."""
    return int(layout.span[grains].sum())
