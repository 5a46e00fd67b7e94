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
from elastic_train.shards.arcs import Arc
from elastic_train.shards.grains import Layout
from elastic_train.shards.seats import Seat


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


class Column(NamedTuple):
    """What ranks with one part of the state hold together, a share each by its seat: a layout's grains and circle.

    Where every rank is a replica, all of them are one column, which holds the whole state.
    """

    layout: Layout
    circle: Circle

    def trained_by(self, seat: Seat | None) -> Int64s:
        """Return the trained grains that a seat holds, ascending; none without a seat."""
        grains = np.empty(0, dtype=np.int64) if seat is None else held(self.circle, seat)
        return np.intersect1d(grains, self.layout.trained, assume_unique=True)

    def missing(self, by_rank: Iterable[Sequence[Arc]]) -> int:
        """Return how many grains are in none of several ranks' arcs."""
        arcs = tuple(dict.fromkeys(arc for arcs in by_rank for arc in arcs))
        return self.layout.num_grains - grains_in(self.circle, arcs).size


def column_of(layout: Layout) -> Column:
    """Return the column of ranks that hold the grains of a layout."""
    return Column(layout, circle_of(layout))


def held(circle: Circle, seat: Seat) -> Int64s:
    """Return the numbers of the grains that a seat holds, ascending: those that begin in its arcs of the circle."""
    return grains_in(circle, seat.arcs)


def grains_in(circle: Circle, arcs: Sequence[Arc]) -> Int64s:
    """Return the numbers of the grains that begin in some arcs of the circle, which may overlap, ascending."""
    slices = [circle.grains[_edge(circle, lo) : _edge(circle, hi)] for lo, hi in arcs]
    return np.unique(np.concatenate([circle.grains[:0], *slices]))


def all_held(circle: Circle, seats: Sequence[Seat]) -> list[Int64s]:
    """Return what every rank of a world holds, by rank."""
    return [held(circle, seat) for seat in seats]


def _edge(circle: Circle, at: Fraction) -> int:
    """Return how many grains begin before a part of the circle's length."""
    return int(np.searchsorted(circle.starts, -(-at.numerator * circle.length // at.denominator)))


def sections_of(circle: Circle, num_sections: int) -> Int64s:
    """Return in which of the circle's equal sections each grain begins, by its number; shape (grains,)."""
    edges = [_edge(circle, Fraction(section, num_sections)) for section in range(1, num_sections)]
    sections = np.empty_like(circle.grains)
    sections[circle.grains] = np.searchsorted(edges, np.arange(circle.grains.size), side="right")
    return sections


def runs_of(layout: Layout, grains: Int64s, sections: Int64s | None = None) -> list[Run]:
    """Return where grains are, their padding included, as the fewest runs of flat vectors; by flat vector, ascending.

    `grains` are ascending. An arc has one run of each flat vector at most; with `sections` of grains, one in each.
    """
    runs: list[Run] = []
    last = 0
    for number in grains[np.lexsort((layout.start[grains], layout.flat_of[grains]))].tolist():
        flat, lo = int(layout.flat_of[number]), int(layout.start[number])
        is_one = sections is None or sections[number] == sections[last]
        if is_one and runs and runs[-1].flat == flat and runs[-1].hi == lo:
            lo = runs.pop().lo
        last = number
        runs.append(Run(flat, lo, int(layout.start[number] + layout.span[number])))
    return runs


def grains_side_by_side(layout: Layout, grains: Int64s, held: Sequence[Run]) -> list[tuple[Run, tuple[int, ...]]]:
    """Return where grains are, without padding, and their lengths: neighbours in one tensor and one run together.

    `grains` are ascending, and `held` are the runs that they are in.
    """
    found: list[tuple[Run, tuple[int, ...]]] = []
    begins = {(run.flat, run.lo) for run in held}
    starts, lengths = layout.start[grains].tolist(), (layout.hi - layout.lo)[grains].tolist()
    flats, tensors = layout.flat_of[grains].tolist(), layout.tensor_of[grains].tolist()
    last = -1
    for flat, tensor, start, length in zip(flats, tensors, starts, lengths, strict=True):
        if found and tensor == last and found[-1][0].hi == start and (flat, start) not in begins:
            run, others = found[-1]
            found[-1] = Run(flat, run.lo, start + length), (*others, length)
        else:
            found.append((Run(flat, start, start + length), (length,)))
        last = tensor
    return found


def by_flat(runs: Sequence[Run]) -> dict[int, list[Run]]:
    """Return runs by the number of their flat vector, in their order."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.flat, []).append(run)
    return found


def num_elements(layout: Layout, grains: Int64s) -> int:
    """Return how many elements grains take, padding included."""
    return int(layout.span[grains].sum())
