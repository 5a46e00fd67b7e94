"""The spans of each state tensor that each writer writes into a commit.

A commit has whole tensors. Each rank writes the spans that it owns, which follow from its seat in its column (shard
group) and the column's part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from torch import Tensor

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.job.cells.cut_model import Cut
from elastic_train.job.cells.state_parts import cut_at, in_whole, with_tensors, written_by_turns, written_spans
from elastic_train.job.sharded.held_tree import Cuts, Held, cuts_of
from elastic_train.job.state_shards import StateShards
from elastic_train.placement.seating import Seating


@dataclass(slots=True)
class CommitPieces:
    """This rank's pieces of commits, and the writers."""

    shards: StateShards
    _writers: Sequence[int] = ()
    _spans: Sequence[Cuts] = ()
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
            cut = cut_at(path, leaf, shards.cut.cuts, shards.table.place)
            written = self._written_of(shards.table.parts.columns[0].layout.numbers[weight_of(path) or ""], cut)
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


def _spans_of(seating: Seating, by_rank: Sequence[Int64s]) -> Cuts:
    held = [Held(grains, seating.sections_of(rank)) for rank, grains in enumerate(by_rank)]
    return cuts_of(seating.layout, held)
