"""The part of the applied state that a rank holds: its place's part of each tensor, and its share of that part.

Three numbers determine it: the number of parts that a replica's ranks cut the state into (`Cell.num_parts`), the number
of ranks that hold each part (a *column*; all ranks without parts), and the number of copies that a column keeps. If
every rank holds the whole state, there is one part and as many copies as ranks.

Commits have whole tensors: each rank writes the spans that it owns, which follow from its seat in its column and the
column's part of the model, and reads back its part and share. So a commit can be continued at any degree and in any
mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.state_tree import Pieces, Span, StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.cells.cut_model import Cut, CutModel
from elastic_train.job.sharded.held_tree import Held, Written, cut_at, in_whole, with_tensors, written_of
from elastic_train.job.sharded.share import Share, Summed
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.parallel.group import Group
from elastic_train.placement.seating import Seating, Transfer
from elastic_train.placement.table import Table

Weights = Iterable[tuple[str, Tensor]]
"""Weights and buffers by name."""


class Place(NamedTuple):
    """Progress of a state: its step and the term that applied it; (0, 0) for a new state."""

    step: int
    term: int


@dataclass(slots=True, kw_only=True)
class StateShards:
    """The shards of weights, optimizer, scheduler and scaler that a rank holds.

    `cut` is the model, whole until a world assigns this rank a place; `hold` makes a column's share once the model is
    cut for it, from a table of which nobody has taken a seat, such as `at_first`.
    """

    cut: CutModel
    at_first: Table
    hold: Callable[[Table], Share]
    order: list[str] = field(default_factory=list)
    """Execution order of the blocks, once a pass has recorded it."""
    trained_in: int = 0
    """Term of the last world in which this rank trained."""
    _share: Share | None = None
    _sum: GradientSum | None = None

    def __post_init__(self) -> None:
        if not self.at_first.cell.holds_parts:
            self.cut.place = 0
            self._share = self.hold(replace(self.at_first, size=self.at_first.cell.size))

    @property
    def share(self) -> Share:
        """This rank's share of its place's part."""
        assert self._share is not None, "no world has given this rank a place"
        return self._share

    @property
    def table(self) -> Table:
        """Holdings of every rank in the world in which this one took its seat; nobody's before its first seat."""
        return self.at_first if self._share is None else self._share.table

    def enter(self, mesh: Mesh, cell: Group | None, first: Callable[[], Weights] = tuple) -> bool:
        """Take the place that a world assigns to this rank; return True if it held nothing of that place's part.

        `cell` has the ranks of this rank's cell, None if it is alone. `first` returns the initial weights, which it
        needs unless it still has all of them.
        """
        is_new = self.cut.place is None or mesh.cell.part_of(self.cut.place) != mesh.cell.part_of(mesh.place)
        if is_new:
            self._close_sums()  # the old share's, before the model is cut differently
            self._share = None  # a seat of the old part means nothing in the new column
        self.cut.become_part()  # it may have become whole when the last world broke
        if cell is not None:
            self.cut.bind(mesh, cell)
        here = replace(self.at_first, rank=mesh.rank, size=mesh.size)
        if is_new:
            self.cut.take_place(mesh.place, None if self.cut.place is None and self.cut.has_weights else first())
            self._share = self.hold(here)
        self.cut.place = mesh.place
        if here.is_whole:
            self.share.sit(here)
        return is_new

    def sum_of(
        self, owners: Group, num_lanes: int, kind: Reduction = "canonical", column: Group | None = None
    ) -> GradientSum:
        """Bind the gradients and return the sum over all lanes, which leaves each mean on the ranks that hold it.

        `owners` has one rank of every owner of lanes, and `column` the ranks that hold this rank's part, by default the
        same. Closes the previous world's sum.
        """
        self._close_sums()
        column, table = column or owners, self.table
        trees = _trees(self.cut, table.cell, owners, column, table.assigned(num_lanes))
        self._sum = self.share.sum_over(trees, column, kind)
        return self._sum

    def add_ties(self, ranks: Group) -> None:
        """Add the gradients that the first and the last stage have of tied weights; `ranks` are the world's."""
        table = self.table
        if not self.cut.plan.pieces or not table.ties:
            return
        mine = table.parts.numbers[table.part]

        def parts_of(one: Transfer) -> Iterator[tuple[list[Tensor], int]]:
            grains = np.searchsorted(mine, one.grains)
            for number in np.unique(tensor_of := self.share.layout.tensor_of[grains]).tolist():
                parts = list(self.share.gradients_of(number, grains[tensor_of == number]))
                yield parts, sum(map(len, parts))

        moves = [one for one in table.ties if table.rank in (one.giver, one.taker)]
        sends = [
            (one.taker, torch.cat(parts)) for one in moves if one.giver == table.rank for parts, _ in parts_of(one)
        ]
        added = [(one.giver, *of) for one in moves if one.taker == table.rank for of in parts_of(one)]
        receives = [(giver, parts[0].new_empty(size)) for giver, parts, size in added]
        if sends or receives:
            ranks.exchange(sends, receives)
        for (_, parts, _), (_, received) in zip(added, receives, strict=True):
            for part, other in zip(parts, torch.split(received, [len(part) for part in parts]), strict=True):
                part.add_(other)

    def _close_sums(self) -> None:
        """Close the sum and stop changing the model's parameters."""
        if self._share is not None:
            self._share.close()
        if self._sum is not None:
            self._sum.close()
            self._sum = None

    def tensors(self) -> Iterator[OfPart]:
        """Yield the tensors held besides the model's own weights, each with its category of memory."""
        return iter(()) if self._share is None else self._share.tensors()


def _trees(cut: CutModel, cell: Cell, owners: Group, column: Group, lanes: Assignment) -> list[Summed]:
    """Return the reduction trees: one per chunk of a stage, then one for the experts of each chunk.

    Parameters that all lane owners have are summed over the owners; experts are summed over the column, since all
    lanes of a cell contribute to them.
    """
    leaves = leaves_of(lanes, cell.context)
    if not cut.experts:
        return [Summed(chunk, column, leaves) for chunk in cut.by_chunk()]
    chunks, by_cell = list(cut.by_spread()), lanes_by_cell(lanes, cell.expert)
    trees = [Summed(whole, owners, leaves, repeats=cell.expert) for whole, _ in chunks]
    return trees + [Summed(some, column, by_cell, per_turn=cell.expert, is_beside=False) for _, some in chunks]


@dataclass(slots=True)
class CommitPieces:
    """This rank's pieces of commits, and the writers."""

    shards: StateShards
    _writers: Sequence[int] = ()
    _spans: Sequence[Written] = ()
    """By model part: the spans of each tensor that each rank of the column owns."""
    _written: dict[int, Sequence[Sequence[Span]]] = field(default_factory=dict)
    """By tensor number: the spans that each writer writes."""
    _made: dict[StatePath, tuple[Pieces, Pieces]] = field(default_factory=dict)
    """Cached pieces by path, valid while the held pieces and the writers stay the same."""

    def assign_alone(self) -> bool:
        """Make this rank the only writer if it holds everything; return True if so."""
        table = self.shards.table
        if not table.holds_all:
            return False
        self._assign([table.rank])  # a newer world may have begun, and ended before it gave this rank a seat
        return True

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Choose the ranks that write commits, in rank order; return the actual writers.

        If the given ranks do not hold everything, all ranks write, including those that cannot confirm their store.
        """
        try:
            self._assign(writers)
        except LookupError:
            writers = range(self.shards.table.size)
            self._assign(writers)
        return writers

    def _assign(self, writers: Sequence[int]) -> None:
        table = self.shards.table
        self._spans = [_spans_of(table.seating(part), grains) for part, grains in enumerate(table.owned_by(writers))]
        self._writers, self._written = tuple(writers), {}
        self._made.clear()

    def tree(self) -> State:
        """Return the state to commit, as from `Share.held`, with cut tensors in pieces with their writers."""
        shards, turns = self.shards, count()
        held = shards.share.held()
        if shards.table.is_whole and not shards.cut.cuts:
            return held
        return with_tensors(held, lambda path, leaf: self._to_write(path, leaf, turns))

    def _to_write(self, path: StatePath, leaf: Tensor | Pieces, turns: Iterator[int]) -> Tensor | Pieces:
        shards = self.shards
        if isinstance(leaf, Tensor):
            cut = cut_at(path, leaf, shards.cut.cuts, shards.table.place)
            if cut is None or not cut.shape.numel():
                return leaf
            places = [rank % shards.table.cell.size for rank in self._writers]
            return in_whole(leaf, cut, shards.table.place, written_by_turns(cut, places, next(turns)))
        held, made = self._made.get(path, (None, leaf))
        if held is not leaf:
            name, cuts = weight_of(path) or "", shards.cut.cuts
            cut = cuts.get(name) if leaf.is_whole else cut_at(path, leaf, cuts, shards.table.place)
            written = self._written_of(shards.table.parts.columns[0].layout.numbers[name], cut)
            if leaf.is_whole:
                cut, every = None, (0, leaf.shape.numel())
                written = [[every] if any(lo == 0 < hi for lo, hi in spans) else [] for spans in written]
            made = replace(leaf, written=written) if cut is None else in_whole(leaf, cut, shards.table.place, written)
            self._made[path] = leaf, made
        return made

    def _written_of(self, number: int, cut: Cut | None) -> Sequence[Sequence[Span]]:
        """Return the spans of a whole tensor that each writer writes."""
        if number not in self._written:
            spans, cell = [of_part[number] for of_part in self._spans], self.shards.table.cell
            if cell.holds_parts:
                self._written[number] = written_spans(spans, cut, cell, self._writers)
            else:
                self._written[number] = [spans[0][rank] for rank in self._writers]
        return self._written[number]

    def only_update_changes(self) -> Callable[[StatePath], bool]:
        """Return a predicate: True for paths whose tensors only `apply` changes; forward passes may change others."""
        parameters = {name for name, _ in self.shards.share.model.named_parameters(remove_duplicate=False)}
        return lambda path: path[0] == "optimizer" or (path[0] == "model" and path[1] in parameters)


def _spans_of(seating: Seating, by_rank: Sequence[Int64s]) -> Written:
    held = [Held(grains, seating.sections_of(rank)) for rank, grains in enumerate(by_rank)]
    return written_of(seating.layout, held)


def written_by_turns(cut: Cut, places: Sequence[int], turn: int) -> list[list[Span]]:
    """Return the run of a tensor that each writer writes, if places hold their parts unsharded.

    `places` are the writers' places. Writers with equal parts take turns: `turn` is the tensor's number.
    """
    written: list[list[Span]] = [[] for _ in places]
    for giver in cut.givers:
        able = [number for number, place in enumerate(places) if cut.first_with(place) == giver]
        written[able[turn % len(able)]].append(cut.run(giver))
    return written


def written_spans(
    spans: Sequence[Sequence[Sequence[Span]]], cut: Cut | None, cell: Cell, writers: Sequence[int]
) -> list[list[Span]]:
    """Return the spans of a whole tensor that each writer writes, from the spans that each rank of every column owns.

    `spans` is indexed by model part, then by rank in its column; `writers` are ranks of the world. If several columns
    hold the same part of the tensor, the first column's ranks write it.
    """
    starts = {0: 0} if cut is None else {cell.part_of(place): cut.run(place)[0] for place in cut.givers}

    def of_writer(part: int, number: int) -> Iterator[Span]:
        if part in starts:
            yield from ((lo + starts[part], hi + starts[part]) for lo, hi in spans[part][number])

    return [list(of_writer(*cell.holder_of(rank))) for rank in writers]
