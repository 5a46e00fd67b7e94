"""Arrange grains by length, so that few operations square and sum many of them.

Grains at the edges of parts have many different lengths, which alternate within a tensor. If they do so often, the
tensor's rows are scattered so that grains of one length are adjacent; otherwise, runs of grains of one length are
copied. The arrangement depends on the lengths alone. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s, filled

Lengths = tuple[int, ...]
"""Lengths of a vector's grains, in order; they fill it."""
_ROWS_OF_RUN = 64
"""Number of rows that scatter in about the time of copying one run."""
_FEW_RUNS = 4
_FILLING = 1 << 15
"""Number of zeros that are added in about the time of a separate table."""


class Run(NamedTuple):
    """`num` adjacent grains of one length, from element `lo` of a vector and grain number `first`."""

    vector: int
    lo: int
    num: int
    length: int
    first: int

    @property
    def numel(self) -> int:
        return self.num * self.length

    @property
    def hi(self) -> int:
        return self.lo + self.numel


class Scatter(NamedTuple):
    """Elements [lo, hi) of a vector as rows of `unit` elements, and the target row of each, within [start, stop)."""

    vector: int
    lo: int
    hi: int
    unit: int
    start: int
    stop: int
    rows: Int64s


class Copy(NamedTuple):
    """Runs of grains of one length, to be copied one after another into a table, from `row` on."""

    table: int
    row: int
    runs: tuple[Run, ...]


class Table(NamedTuple):
    """Grains in rows of `width` elements, from element `start` of the room, by length, the longest first.

    `shorter` has (lo, hi, length) for rows [lo, hi) with shorter grains, which are padded with zeros.
    """

    start: int
    width: int
    numbers: Int64s
    shorter: tuple[tuple[int, int, int], ...]

    @property
    def stop(self) -> int:
        return self.start + self.width * len(self.numbers)


class Batch(NamedTuple):
    """Tables that are in the room at once, and the operations that fill them."""

    scatters: tuple[Scatter, ...]
    copies: tuple[Copy, ...]
    tables: tuple[Table, ...]

    @property
    def stop(self) -> int:
        return self.tables[-1].stop


class _Piece(NamedTuple):
    """Adjacent grains of a vector, from element `lo` and grain number `first`, as rows of `unit` elements."""

    vector: int
    lo: int
    first: int
    lengths: Int64s
    unit: int

    @property
    def numel(self) -> int:
        return int(self.lengths.sum())


def width_of(length: int) -> int:
    """Return the smallest power of two that is at least `length`."""
    return 1 << (length - 1).bit_length()


def batches_of(vectors: Sequence[Lengths], room: int, room_of_rows: int) -> tuple[Batch, ...]:
    """Arrange the grains of vectors in batches of about `room` elements, or `room_of_rows` if rows are scattered.

    Grains are numbered vector by vector.
    """
    pieces: list[_Piece] = []
    runs: list[Run] = []
    first = 0
    for number, lengths in enumerate(vectors):
        if lengths:
            some = _split(number, np.array(lengths, dtype=np.int64), first, room, room_of_rows)
            runs += [one for one in some if isinstance(one, Run)]
            pieces += [one for one in some if isinstance(one, _Piece)]
        first += len(lengths)
    pieces.sort(key=lambda piece: piece.unit)
    runs.sort(key=lambda run: (-run.length, run.num))
    scattered = [_scattered(some) for some in filled(pieces, lambda piece: piece.numel, room_of_rows)]
    copied = [_copied(some) for some in filled(runs, lambda run: run.numel, room)]
    return (*scattered, *copied)


def _split(vector: int, lengths: Int64s, first: int, room: int, room_of_rows: int) -> list[_Piece | Run]:
    """Return the grains of a vector as pieces or runs that fit the room (or have a single grain)."""
    starts = np.cumsum(lengths) - lengths
    changes = np.flatnonzero(np.diff(lengths)) + 1
    unit = int(np.gcd.reduce(lengths))
    if len(changes) >= _FEW_RUNS and int(lengths.sum()) // unit <= _ROWS_OF_RUN * len(changes):
        parts = filled(range(len(lengths)), lengths.tolist().__getitem__, room_of_rows)
        return [
            _Piece(vector, int(starts[some[0]]), first + some[0], lengths[some[0] : some[-1] + 1], unit)
            for some in parts
        ]
    found: list[_Piece | Run] = []
    for lo, hi in pairwise([0, *changes.tolist(), len(lengths)]):
        length = int(lengths[lo])
        most = max(1, room // length)
        found += [Run(vector, int(starts[at]), min(most, hi - at), length, first + at) for at in range(lo, hi, most)]
    return found


def _widths_of(lengths: Int64s) -> dict[int, int]:
    """Return the width of the table for each grain length; lengths descend.

    A length shares the table of the next longer one with the same power of two, unless it needs too many zeros.
    """
    sizes, counts = np.unique(lengths, return_counts=True)
    widths: dict[int, int] = {}
    width = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        if not width or width_of(size) != width_of(width) or (width - size) * count > _FILLING:
            width = size
        widths[size] = width
    return widths


def _scattered(pieces: Sequence[_Piece]) -> Batch:
    """Return the batch of some pieces, sorted by unit."""
    scatters: list[Scatter] = []
    tables: list[Table] = []
    start = 0
    for unit, some in groupby(pieces, key=lambda piece: piece.unit):
        same = list(some)
        lengths = np.concatenate([piece.lengths for piece in same])
        numbers = np.concatenate([piece.first + np.arange(len(piece.lengths)) for piece in same])
        width_by_length = _widths_of(lengths)
        widths = np.array([width_by_length[length] for length in lengths.tolist()])
        order = np.argsort(-lengths, kind="stable")
        places = np.empty_like(widths)
        places[order] = np.cumsum(widths[order]) - widths[order]
        stop = start + int(widths.sum())
        rows = np.repeat(places // unit, lengths // unit) + _counted(lengths // unit)
        at = 0
        for piece in same:
            where = rows[at : at + piece.numel // unit]
            scatters.append(Scatter(piece.vector, piece.lo, piece.lo + piece.numel, unit, start, stop, where))
            at += len(where)
        for width in dict.fromkeys(width_by_length.values()):
            its = order[widths[order] == width]
            tables.append(_table(start, width, numbers[its], lengths[its]))
            start = tables[-1].stop
    return Batch(tuple(scatters), (), tuple(tables))


def _table(start: int, width: int, numbers: Int64s, lengths: Int64s) -> Table:
    edges = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    rows = [(lo, hi, int(lengths[lo])) for lo, hi in pairwise(edges)]
    return Table(start, width, numbers, tuple((lo, hi, length) for lo, hi, length in rows if length < width))


def _counted(counts: Int64s) -> Int64s:
    """Return 0, 1, … up to each count, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def _copied(runs: Sequence[Run]) -> Batch:
    """Return the batch of some runs, sorted by descending length."""
    widths = _widths_of(np.repeat([run.length for run in runs], [run.num for run in runs]))
    tables: list[Table] = []
    copies: list[Copy] = []
    start = 0
    for width, of_width in groupby(runs, key=lambda run: widths[run.length]):
        same = list(of_width)
        row = 0
        for _, of_length in groupby(same, key=lambda run: run.length):
            some = tuple(of_length)
            copies.append(Copy(len(tables), row, some))
            row += sum(run.num for run in some)
        numbers = np.concatenate([run.first + np.arange(run.num) for run in same])
        lengths = np.repeat([run.length for run in same], [run.num for run in same])
        tables.append(_table(start, width, numbers, lengths))
        start = tables[-1].stop
    return Batch((), tuple(copies), tuple(tables))
