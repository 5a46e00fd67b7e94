"""What of the applied state a rank holds: its place's part of each tensor, and its share of that part.

Three numbers say all of it: into how many parts a replica's ranks cut the state (`Cell.num_parts`), how many ranks hold
each part (a *column*, all ranks where there are no parts), and how many copies of the part a column keeps. Where every
rank holds the whole state there is one part, and as many copies as ranks.

Ranks give one another what they hold. A commit has whole tensors, of which a rank writes what it speaks for, and what
is read from one are parts and shares again; so commits continue at any degree and in any mode.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.errors import WeightsDifferError
from elastic_train.job.cells.cut_model import Cut, CutModel
from elastic_train.job.cells.state_parts import cut_at, in_whole, with_tensors, written_by_turns, written_spans
from elastic_train.job.majority import name_others
from elastic_train.job.sharded.held_tree import Cuts, Held, HeldRun, Retained, cuts_of
from elastic_train.job.sharded.share import Share, Summed
from elastic_train.job.sharded.shared_weights import checksums, checksums_by_name, digest_of_all
from elastic_train.job.units.blocks import recording_order
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.reductions import Reduction
from elastic_train.placement.holdings import Column
from elastic_train.placement.norm import clip_factor, squares_of_holders, total_norm
from elastic_train.placement.seating import Seating
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
    _writers: Sequence[int] = ()
    _spans: Sequence[Cuts] = ()
    """By part: which spans of each of its tensors each rank of its column speaks for, in commits."""
    _written: dict[int, Sequence[Sequence[Span]]] = field(default_factory=dict)
    """By the number of a tensor: which spans of it each writer writes."""

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
    def has_weights(self) -> bool:
        """Whether the model was built with its weights, so that it can compute before there is a world."""
        return self.cut.has_weights

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

    @property
    def retained(self) -> Retained:
        """What this rank holds beside its seat."""
        return self.share.retained

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

    def meta_state(self) -> Mapping[str, Tensor]:
        """Return all weights and buffers as they are in a whole model, by name; for names, shapes and types alone."""
        return self.cut.outline

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

    def checksums(self) -> list[int]:
        """Return a checksum of each set of weights that this rank shares with others (`Table.weights_in_common`)."""
        return checksums(self.table, self.share.weights_at, self.buffers())

    def checksums_by_name(self, which: int) -> Mapping[str, int]:
        """Return a checksum of each tensor of a set of weights, of what this rank has of it."""
        return checksums_by_name(self.table, which, self.share.weights_at, self.buffers())

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

    @property
    def _knows_norm(self) -> bool:
        """Whether each rank has all of the gradient."""
        return self.share.is_whole and not self.cell.holds_parts

    def measure(self) -> Tensor:
        """Return what this rank knows of the reduced gradient's norm, on the CPU; of equal shape on all ranks."""
        squares = self.share.measure()
        if self._knows_norm:
            return torch.tensor(total_norm(squares.numpy()), dtype=torch.float64)
        measured = torch.zeros(self.most_grains, dtype=torch.float64)
        measured[: squares.numel()] = squares
        return measured

    @property
    def most_grains(self) -> int:
        """How many grains the rank with most of them updates, at least 1."""
        return max(1, *(grains.size for of_part in self.table.updated for _, grains in of_part))

    def norm_of(self, gathered: Tensor) -> Tensor:
        """Return the gradient's norm over the whole model from what all ranks have measured: a float64 on the CPU.

        It is that by grains (`placement.norm`), in which neither a cut nor a number of threads shows. Raises
        WeightsDifferError if ranks have measured the same otherwise.
        """
        if self._knows_norm:
            check_same_norm(gathered)
            return gathered[0]
        return self._norm_of(gathered, self.table.updated)

    def norm_of_rows(self, gathered: Tensor, holders: Sequence[tuple[int, Int64s]]) -> Tensor:
        """Return the norm from rows of some ranks, which hold all of the grains that are trained."""
        by_part: list[list[tuple[int, Int64s]]] = [[] for _ in self.columns]
        for rank, grains in holders:
            by_part[self.column_of(rank)].append((rank, grains))
        return self._norm_of(gathered, by_part)

    def _norm_of(self, gathered: Tensor, by_part: Sequence[Sequence[tuple[int, Int64s]]]) -> Tensor:
        pairs = zip(self.columns, by_part, strict=True)
        squares = [squares_of_holders(column.layout, gathered, some) for column, some in pairs]
        return torch.tensor(total_norm(self.parts.sum_once(squares)), dtype=torch.float64)

    def local_norm(self, measured: Tensor) -> Tensor | None:
        """Return the norm from what this rank alone has measured, None if that does not say."""
        return measured if self._knows_norm else None

    def clip(self, limit: float, norm: Tensor) -> None:
        """Scale the reduced gradients, whose norm is `norm`, down to one of `limit` over the whole model."""
        if (factor := clip_factor(float(norm), limit)) != 1.0:
            self.share.clip(factor)

    # Who holds, and who writes.

    def can_save_alone(self) -> bool:
        """Say whether this rank holds everything; it is then the only one that writes commits."""
        if self._table is None or not self._table.holds_all:
            return False
        self._assign([self._table.rank])  # a newer world may have begun, and ended before it gave this rank a seat
        return True

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Let ranks of the world write commits, in the order of their places; return which ranks do.

        All do where these hold less than everything: then those that cannot say so.
        """
        try:
            self._assign(writers)
        except LookupError:
            writers = range(self.table.size)
            self._assign(writers)
        return writers

    def _assign(self, writers: Sequence[int]) -> None:
        owned = enumerate(self.table.owned_by(writers))
        self._spans = [self._spans_of(self.table.seating(part), grains) for part, grains in owned]
        self._writers, self._written = tuple(writers), {}
        self.share.made.clear()

    def _spans_of(self, seating: Seating, by_rank: Sequence[Int64s]) -> Cuts:
        held = [Held(grains, seating.sections_of(rank)) for rank, grains in enumerate(by_rank)]
        return cuts_of(seating.layout, held)

    def held(self) -> State:
        """Return this rank's pieces as a nested dict, parameters by their full names; its tensors are the live ones."""
        return self.share.held()

    def to_save(self) -> State:
        """Return what a commit is made of, as `held` has it, cut tensors in pieces, and who writes what of them."""
        held, turns = self.share.held(), count()
        if self.share.is_whole and not self.cut.cuts:
            return held
        return with_tensors(held, lambda path, leaf: self._to_write(path, leaf, turns))

    def _to_write(self, path: StatePath, leaf: Tensor | Pieces, turns: Iterator[int]) -> Tensor | Pieces:
        if isinstance(leaf, Tensor):
            cut = cut_at(path, leaf, self.cut.cuts, self.place)
            if cut is None or not cut.shape.numel():
                return leaf
            places = [rank % self.cell.size for rank in self._writers]
            return in_whole(leaf, cut, self.place, written_by_turns(cut, places, next(turns)))
        held, made = self.share.made.get(path, (None, leaf))
        if held is not leaf:
            cut = cut_at(path, leaf, self.cut.cuts, self.place)
            written = self._written_of(self.columns[0].layout.numbers[weight_of(path) or ""], cut)
            made = replace(leaf, written=written) if cut is None else in_whole(leaf, cut, self.place, written)
            self.share.made[path] = leaf, made
        return made

    def _written_of(self, number: int, cut: Cut | None) -> Sequence[Sequence[Span]]:
        """Return which spans of a whole tensor each writer writes."""
        if number not in self._written:
            spans = [of_part[number] for of_part in self._spans]
            if self.cell.holds_parts:
                self._written[number] = written_spans(spans, cut, self.cell, self._writers)
            else:
                self._written[number] = [spans[0][rank] for rank in self._writers]
        return self._written[number]

    def only_update_changes(self) -> Callable[[StatePath], bool]:
        """Return whether `apply` alone changes the tensor at a path of `held`; others a forward pass may change."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return lambda path: path[0] == "optimizer" or (path[0] == "model" and path[1] in parameters)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        """Take over what `held` gave to a commit or a peer, as `fill` reads it back; gradients stay bound.

        With `keeps_rates` learning rate, betas, decay and parameter groups stay those that the state was built with: a
        configuration or a task may have changed since what it takes over was saved.
        """
        self.share.take(fill, self.cut.cuts, self.place, keeps_rates=keeps_rates)

    def tensors(self) -> Iterator[OfPart]:
        """Yield what is held beside the model's own weights, each with the part of memory that it belongs to."""
        return iter(()) if self._share is None else self._share.tensors()


def check_same_norm(gathered: Tensor) -> None:
    """Raise WeightsDifferError unless all ranks have measured one norm; one that is not a number equals any other."""
    norms = gathered.flatten().nan_to_num(nan=-1.0, posinf=math.inf)
    if not bool((norms == norms[0]).all()):
        who, _ = name_others(norms.view(torch.int64).tolist(), "gradients")
        raise WeightsDifferError(
            f"{who}, by the norm of the sum over all ranks: memory or a connection is damaged, or a device computes "
            "wrongly. The step is not applied: all ranks end, and the next start continues from the last commit"
        )
