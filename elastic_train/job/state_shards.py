"""The part of the applied state that a rank holds: its place's part of each tensor, and its share of that part.

Three numbers determine it: the number of parts that a replica's ranks cut the state into (`Cell.num_parts`), the number
of ranks that hold each part (a *column*; all ranks without parts), and the number of copies that a column keeps. If
every rank holds the whole state, there is one part and as many copies as ranks.

Commits have whole tensors: each rank writes the spans that it owns, and reads back its part and share. So a commit can
be continued at any degree and in any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.sharded.share import Share, Summed
from elastic_train.parallel.exchange import Reduction
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.parallel.group import Group
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
