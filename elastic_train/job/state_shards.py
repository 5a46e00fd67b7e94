"""The part of the applied state that a rank holds: its place's part of each tensor, and its share of that part.

Three numbers determine it: the number of parts that a replica's ranks cut the state into (`Cell.num_parts`), the number
of ranks that hold each part (a *column*; all ranks without parts), and the number of copies that a column keeps. If
every rank holds the whole state, there is one part and as many copies as ranks.

Commits have whole tensors: each rank writes the spans that it owns, and reads back its part and share. So a commit can
be continued at any degree and in any mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.sharded.share import Share, Summed
from elastic_train.job.sharded.shared_weights import digest_of_all
from elastic_train.job.units.blocks import recording_order
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.placement.holdings import Column
from elastic_train.placement.seats import Seat
from elastic_train.placement.table import Parts, Table

T = TypeVar("T")


class Place(NamedTuple):
    """Progress of a state: its step and the term that applied it; (0, 0) for a new state."""

    step: int
    term: int


@dataclass(slots=True, kw_only=True)
class StateShards:
    """The shards of weights, optimizer, scheduler and scaler that a rank holds.

    `cut` is the model, whole until a world assigns this rank a place; `hold` makes a column's share once the model is
    cut for it. `table` has the holdings of every rank of the world.
    """

    model: nn.Module
    cell: Cell
    cut: CutModel
    parts: Parts
    hold: Callable[[Column], Share]
    gathers: bool = False
    """True if weights are sharded and gathered for each pass."""
    order: list[str] = field(default_factory=list)
    """Execution order of the blocks, once a pass has recorded it."""
    trained_in: int = 0
    """Term of the last world in which this rank trained."""
    _share: Share | None = None
    _sum: GradientSum | None = None

    def __post_init__(self) -> None:
        if not self.cell.holds_parts:
            self.cut.place = 0
            self._share = self.hold(self.parts.columns[0])
            if self._share.is_whole:
                self._share.sit(self.seated_at((), 0, self.cell.size))

    # Where it is in a world.

    @property
    def share(self) -> Share:
        """This rank's share of its place's part."""
        assert self._share is not None, "no world has given this rank a place"
        return self._share

    @property
    def place(self) -> int:
        """This rank's index in its replica."""
        return self.cut.place or 0

    @property
    def part(self) -> int:
        """Index of the part of the state that this rank holds."""
        return self.cell.part_of(self.place)

    @property
    def seated(self) -> Table | None:
        """Holdings of every rank in the world in which this one took its seat; None before its first seat."""
        return None if self._share is None else self._share.table

    @property
    def table(self) -> Table:
        """The same, once a seat is taken."""
        assert self.seated is not None, "no seat has been taken"
        return self.seated

    def seated_at(self, seats: Sequence[Seat], rank: int, size: int) -> Table:
        """Return the table of a world in which the ranks of a column have the given seats."""
        share = self.share
        return Table(self.parts, seats, rank, size, self.cell, share.is_shared_out, share.deals_lanes)

    def holds_part_of(self, mesh: Mesh) -> bool:
        """Return True if this rank already holds the part that a world assigns to it."""
        return self.cut.place is not None and self.part == self.cell.part_of(mesh.place)

    def enter(self, mesh: Mesh, cell: Group | None, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Take the place that a world assigns to this rank; `weights` are the initial ones, if it lacks them.

        `cell` has the ranks of this rank's cell, None if it is alone.
        """
        is_new = not self.holds_part_of(mesh)
        if is_new:
            self._close_sums()  # the old share's, before the model is cut differently
            self._share = None  # a seat of the old part means nothing in the new column
        self.cut.become_part()  # it may have become whole when the last world broke
        if cell is not None:
            self.cut.bind(mesh, cell)
        if is_new:
            self.cut.take_place(mesh.place, weights)
            self._share = self.hold(self.parts.columns[self.part])
        self.cut.place = mesh.place
        if self.share.is_whole:
            self.share.sit(self.seated_at((), mesh.rank, mesh.size))

    # Weights.

    def digest(self, group: Group | None = None) -> str:
        """Return the digest of all weights and buffers (`weights_digest`); collective over the world.

        Without a group, return this rank's own digest, or "" if it has no seat yet or not all of the weights.
        """
        return "" if self.seated is None else digest_of_all(group, self.share)

    def make_whole(self, column: Group) -> None:
        """Gather the model's whole weights on rank 0, for use after training; collective over the world."""
        self.share.make_whole(column, self.cell.context)
        if self.cut.cuts and (not self.share.is_shared_out or column.rank < self.cell.context):
            self.cut.become_whole()

    # Computing.

    def sum_of(
        self, owners: Group, num_lanes: int, kind: Reduction = "canonical", column: Group | None = None
    ) -> GradientSum:
        """Bind the gradients and return the sum over all lanes, which leaves each mean on the ranks that hold it.

        `owners` has one rank of every owner of lanes, and `column` the ranks that hold this rank's part, by default the
        same. Closes the previous world's sum.
        """
        self._close_sums()
        share, column = self.share, column or owners
        trees = self._trees(owners, column, self.table.assigned(num_lanes))
        self._sum = share.sum_over(trees, column, kind, by_turn=not (share.is_shared_out and self.keeps_whole))
        return self._sum

    def _trees(self, owners: Group, column: Group, lanes: Assignment) -> list[Summed]:
        """Return the reduction trees: one per chunk of a stage, then one for the experts of each chunk.

        Parameters that all lane owners have are summed over the owners; experts are summed over the column, since all
        lanes of a cell contribute to them.
        """
        degree, leaves = self.cell.expert, leaves_of(lanes, self.cell.context)
        if not self.cut.experts:
            return [Summed(chunk, column, leaves) for chunk in self.cut.by_chunk()]
        chunks, by_cell = list(self.cut.by_spread()), lanes_by_cell(lanes, degree)
        trees = [Summed(whole, owners, leaves, repeats=degree) for whole, _ in chunks]
        return trees + [Summed(some, column, by_cell, per_turn=degree, is_beside=False) for _, some in chunks]

    @property
    def keeps_whole(self) -> bool:
        """True if gathered weights stay for a step: several lanes are in flight, or peers need this rank's experts."""
        return self.cell.stage * self.cell.expert > 1

    def _close_sums(self) -> None:
        """Close the sum and stop changing the model's parameters."""
        if self._share is not None:
            self._share.close()
        if self._sum is not None:
            self._sum.close()
            self._sum = None

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a pass before the first world, which records the execution order of the blocks."""
        self.order.clear()
        return recording_order(self.model, self.order.extend) if self.gathers else contextlib.nullcontext()

    def agree_on_order(self, group: Group) -> None:
        """Make all ranks gather the blocks in the order of the first rank that has recorded one."""
        self.share.agree_on_order(group, [] if self.keeps_whole else self.order)

    def turns(self, column: Group, items: Iterator[T]) -> Iterator[T]:
        """Yield the items for forward passes outside a step; peers may have to take part."""
        if self.cell.stage == 1 and self.cut.experts:  # pipeline stages agree as they go
            items = self.cut.experts[0].turns(items)
        return self.share.turns(column, items)

    def tensors(self) -> Iterator[OfPart]:
        """Yield the tensors held besides the model's own weights, each with its category of memory."""
        return iter(()) if self._share is None else self._share.tensors()
