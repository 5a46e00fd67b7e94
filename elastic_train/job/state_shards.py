"""What of the applied state a rank holds: its place's part of each tensor, and its share of that part.

Three numbers say all of it: into how many parts a replica's ranks cut the state (`Cell.num_parts`), how many ranks hold
each part (a *column*, all ranks where there are no parts), and how many copies of the part a column keeps. Where every
rank holds the whole state there is one part, and as many copies as ranks.

Ranks give one another what they hold. A commit has whole tensors, of which a rank writes what it speaks for, and what
is read from one are parts and shares again; so commits continue at any degree and in any mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from elastic_train.checkpoint.format.layout import State
from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job import gradient_norm
from elastic_train.job.cells.cut_model import CutModel
from elastic_train.job.sharded.held_tree import HeldRun, Retained
from elastic_train.job.sharded.share import Share, Summed
from elastic_train.job.sharded.shared_weights import digest_of_all
from elastic_train.job.units.blocks import recording_order
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.placement.holdings import Column
from elastic_train.placement.norm import clip_factor
from elastic_train.placement.seats import Seat
from elastic_train.placement.table import Parts, Table

T = TypeVar("T")


class Place(NamedTuple):
    """How far a state has come, and the term that applied its last step; 0 and 0 for one that has just been built."""

    step: int
    term: int


@dataclass(slots=True, kw_only=True)
class StateShards:
    """The pieces of weights, optimizer, scheduler and scaler that a rank holds.

    `cut` is the model, which has no part until a world gives this rank a place; `hold` makes the share of a column,
    once the model has the part that is laid out. `table` says what each rank of the world has, this one among them.
    """

    model: nn.Module
    cell: Cell
    cut: CutModel
    parts: Parts
    hold: Callable[[Column], Share]
    gathers: bool = False
    """Whether weights are in shares, which are gathered for a pass."""
    mesh: Mesh | None = None
    """Where this rank is in the present world."""
    trained_in: int = 0
    """The last world in which this rank trained, by its term."""
    _share: Share | None = None
    _ranks: Group | None = None
    """The ranks of the present world that hold the same part."""
    _order: Sequence[str] | None = None
    """In which order blocks run, once a pass has shown it."""
    _sum: GradientSum | None = None
    _table: Table | None = None

    def __post_init__(self) -> None:
        if not self.cell.holds_parts:
            self.cut.place = 0
            self._share = self.hold(self.columns[0])
            if self._share.is_whole:
                self._table = self.seated_at((), 0, self.cell.size)

    # Where it is in a world.

    @property
    def share(self) -> Share:
        """What this rank holds of its place's part."""
        assert self._share is not None, "no world has given this rank a place"
        return self._share

    @property
    def place(self) -> int:
        """Where this rank is in its replica."""
        return self.cut.place or 0

    @property
    def part(self) -> int:
        """Which part of the state this rank holds."""
        return self.cell.part_of(self.place)

    def column_of(self, rank: int) -> int:
        """Return the column that a rank of the present world is in: which part it holds."""
        return self.cell.holder_of(rank)[0]

    @property
    def columns(self) -> Sequence[Column]:
        """What the ranks of each part hold together, by part."""
        return self.parts.columns

    @property
    def table(self) -> Table:
        """What each rank has of the world in which this one took its seat."""
        assert self._table is not None, "no seat has been taken"
        return self._table

    @property
    def is_seated(self) -> bool:
        """Whether this rank has a place in the table of a world, as it has always where it holds the whole state."""
        return self._table is not None

    @property
    def seat(self) -> Seat | None:
        """This rank's seat in its column; None before its first world, and where every rank holds all."""
        return None if self._table is None else self._table.seat

    def seated_at(self, seats: Sequence[Seat], rank: int, size: int) -> Table:
        """Return the table of a world in which the ranks of a column have some seats."""
        share = self.share
        return Table(self.parts, seats, rank, size, self.cell, share.is_shared_out, share.deals_lanes)

    def sit(
        self,
        table: Table,
        runs: Sequence[HeldRun],
        num_updates: Sequence[float] | None = None,
        retained: Retained | None = None,
    ) -> None:
        """Take the seat of a table; see `Share.sit`."""
        self._table = table
        self.share.sit(table.seating(), runs, num_updates, retained)

    def holds_part_of(self, mesh: Mesh) -> bool:
        """Say whether this rank holds the part already that it is to hold in a world."""
        return self.cut.place is not None and self.part == self.cell.part_of(mesh.place)

    def enter(
        self, mesh: Mesh, cell: Group | None, column: Group, weights: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """Take the place that a world gives this rank, of `weights` to begin with where it does not have them.

        `column` are the ranks that hold the same part, by replica; `cell` those of this rank's, None if it is alone.
        """
        is_new = not self.holds_part_of(mesh)
        if is_new:
            self._close_sums()  # the old share's, before the model has another part
            self._table = None  # what was held of the old part is no seat in the new one's column
        self.mesh, self._ranks = mesh, column
        self.cut.become_part()  # at the end of a world that broke it may have become whole
        if cell is not None:
            self.cut.bind(mesh, cell)
        if is_new:
            self.cut.take_place(mesh.place, weights)
            self._share = self.hold(self.columns[self.part])
            if self._order is not None and not self.keeps_whole:
                self._share.take_order(self._order)
        self.cut.place = mesh.place
        if self.share.is_whole:
            self._table = self.seated_at((), mesh.rank, mesh.size)

    def _column(self, group: Group) -> Group:
        """Return the ranks of this rank's column, all of a group if there are no cells."""
        if self.cell.size == 1:
            return group
        assert self._ranks is not None, "no world has given this rank a place"
        return self._ranks

    # Weights.

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights and buffers that every rank has as a whole, by name; all must have the same bits."""
        known = self.model.state_dict() if self._share is None else self._share.weights()
        return {name: tensor for name, tensor in known.items() if name not in self.cut.cuts}

    def cut_weights(self) -> Mapping[str, Tensor]:
        """Return the parts that ranks of other columns do not have, by name."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in self.cut.cuts}

    def buffers(self) -> Mapping[str, Tensor]:
        """Return the saved tensors that are no parameters, which every rank has, by name."""
        known = self.parts.layout.numbers
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in known}

    def digest(self, group: Group | None = None) -> str:
        """Return the digest of all weights and buffers (`weights_digest`); all ranks of the world call it.

        Without a group there is this rank alone: "" if it has no seat yet, or but a part or a share of the weights.
        """
        if self._table is None:
            return ""
        return digest_of_all(group, self._table, self.share.weights_at, self.buffers())

    def make_whole(self, group: Group) -> None:
        """Make the model's weights whole on rank 0, for whoever reads them at the end; all ranks call it."""
        column = self._column(group)
        self.share.make_whole(column, self.cell.context)
        if self.cut.cuts and (not self.share.is_shared_out or column.rank < self.cell.context):
            self.cut.become_whole()

    # Computing.

    def sum_of(self, owners: Group, num_lanes: int, kind: Reduction = "canonical") -> GradientSum:
        """Bind the gradients, and return the sum over all lanes that leaves a mean where it is held.

        `owners` has one rank of every owner of lanes. The sum of the world before is closed.
        """
        self._close_sums()
        share, column = self.share, self._column(owners)
        lanes = self.table.assigned(num_lanes)
        by_turn = not (share.is_shared_out and self.keeps_whole)
        self._sum = share.sum_over(self._trees(owners, column, lanes), column, kind, by_turn=by_turn)
        return self._sum

    def _trees(self, owners: Group, column: Group, lanes: Assignment) -> list[Summed]:
        """Return what is added along a tree each: by chunk of a stage, and, after these, the experts of each chunk.

        What all owners of lanes have is added over these, and experts over the column, since all of a cell's lanes give
        to them.
        """
        degree, leaves = self.cell.expert, leaves_of(lanes, self.cell.context)
        if not self.cut.experts:
            return [Summed(chunk, column, leaves) for chunk in self.cut.by_chunk()]
        chunks, by_cell = list(self.cut.by_spread()), lanes_by_cell(lanes, degree)
        trees = [Summed(whole, owners, leaves, repeats=degree) for whole, _ in chunks]
        return trees + [Summed(some, column, by_cell, per_turn=degree, is_beside=False) for _, some in chunks]

    @property
    def keeps_whole(self) -> bool:
        """Whether weights that are gathered stay for a step: several lanes are under way, or others need experts."""
        return self.cell.stage * self.cell.expert > 1

    def _close_sums(self) -> None:
        """Leave the model's parameters alone from now on."""
        if self._share is not None:
            self._share.close()
        if self._sum is not None:
            self._sum.close()
            self._sum = None

    def refresh(self, group: Group) -> None:
        """Get what peers alone have updated."""
        self.share.refresh(self._column(group))

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a pass before the first world, from which the order of the model's parts is learnt."""
        return recording_order(self.model, self._take_order) if self.gathers else contextlib.nullcontext()

    def _take_order(self, names: list[str]) -> None:
        self._order = names
        if self._share is not None:
            self._share.take_order(names)

    def turns(self, group: Group, items: Iterator[T]) -> Iterator[T]:
        """Yield what this rank runs forward passes with outside of a step; peers may take part in it."""
        if self.cell.stage == 1 and self.cut.experts:  # stages agree on turns as they go
            items = self.cut.experts[0].turns(items)
        return self.share.turns(self._column(group), items)

    def computing(self, replicas: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which some replicas compute a lane, forward and backward, outside of a step's sum.

        All ranks of a world enter it, as what these need may be with others.
        """
        context = self.cell.context
        return self.share.computing([replica * context + at for replica in replicas for at in range(context)])

    def averaged(self, group: Group) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model has the averages of its weights; all ranks enter and leave it.

        There must be averages, and nothing may change the state in it. What is saved stays as it is.
        """
        return self.share.averaged(self._column(group))

    # The gradient's norm.

    def measure(self) -> Tensor:
        """Return what this rank knows of the reduced gradient's norm (`gradient_norm.measured`), on the CPU."""
        return gradient_norm.measured(self.table, self.share.measure())

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the reduced gradients, whose norm is `norm`, down to one of `limit` over the whole model."""
        if (factor := clip_factor(float(norm), limit)) != 1.0:
            self.share.clip(factor)

    # What is saved.

    def held(self) -> State:
        """Return this rank's pieces as a nested dict, parameters by their full names; its tensors are the live ones."""
        return self.share.held()

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        """Take over what `held` gave to a commit or a peer, as `fill` reads it back; gradients stay bound.

        With `keeps_rates` learning rate, betas, decay and parameter groups stay those that the state was built with: a
        configuration or a task may have changed since what it takes over was saved.
        """
        self.share.take(fill, self.cut.cuts, self.place, keeps_rates=keeps_rates)

    def tensors(self) -> Iterator[OfPart]:
        """Yield what is held beside the model's own weights, each with the part of memory that it belongs to."""
        return iter(()) if self._share is None else self._share.tensors()
