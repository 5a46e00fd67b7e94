"""The applied state of a rank in a cell that holds moments by its seat: a share of its place's part of the state.

Ranks that hold the same part of the weights, those of equal place in all cells, are a column; so are, with them, places
that differ in their tokens alone. What an optimizer keeps of that part, and its gradient (`DealtState`), are spread
over them as over all ranks of a job without cells (`HeldState`): grains and copies are those of the part's own layout,
and the gradient's sum, the update and the exchange of weights are within the column. Seats are the cells', so that all
ranks of one compute the lanes that are dealt to it, or those of its ranks with the same tokens. The norm needs all
columns; of what several places hold alike, it counts the first one's, as where every cell has all of it.

A commit has whole tensors and moments, of which a rank writes what it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import State, weight_of
from elastic_train.checkpoint.format.pieces import Pieces, Span
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment, lanes_by_cell, leaves_of
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.cells.cell_state import CellState
from elastic_train.job.cells.cut_model import Cut, CutModel
from elastic_train.job.cells.state_parts import filled_parts, in_whole, written_spans
from elastic_train.job.model_layout import Laid, layout_of
from elastic_train.job.sharded.elementwise import Slots
from elastic_train.job.sharded.held_state import HeldState, OfFlats
from elastic_train.job.sharded.held_tree import Cuts, Held, Spare, cuts_of
from elastic_train.job.sharded.shared_scaler import SharedScaler
from elastic_train.job.sharded.streamed_update import Offload
from elastic_train.job.units.blocks import unit_names, unit_of
from elastic_train.parallel.gradient_sum import GradientSum, OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import Wire
from elastic_train.parallel.reductions import Reduction
from elastic_train.shards.holdings import Column, column_of
from elastic_train.shards.norm import squares_of_holders
from elastic_train.shards.owners import owned_of
from elastic_train.shards.seating import Seating
from elastic_train.shards.seats import Seat


@dataclass(slots=True, kw_only=True)
class SeatedCellState(CellState):
    """A place's part of a replica, of whose moments this rank holds a share.

    `hold` makes what holds the share of a layout, once the model has the part that is laid out.
    """

    columns: Sequence[Column]
    hold: Callable[[Column], HeldState]
    _share: HeldState | None = None
    _seatings: Sequence[Seating] = ()
    """The seats of every column, by part."""
    _cuts: Sequence[Cuts] = ()
    """By part: which spans of each of its tensors each rank of its column speaks for, in commits."""
    _numbers: Mapping[str, int] = field(default_factory=dict)
    """The number of each tensor in the layouts, by all of its names."""
    _spans: dict[int, Sequence[Sequence[Span]]] = field(default_factory=dict)
    """By number: which spans of a whole tensor each writer writes."""

    @property
    def share(self) -> HeldState:
        """What this rank holds of its place's part."""
        assert self._share is not None, "no world has given this rank a place"
        return self._share

    @property
    def column(self) -> Group:
        """The ranks that hold this rank's part, of all cells."""
        assert self._holders is not None, "no world has given this rank a place"
        return self._holders

    @property
    def part(self) -> int:
        """Which part of the state this rank holds."""
        return self.column_of(self._mesh.rank)

    def column_of(self, rank: int) -> int:
        """Return the column that a rank of the present world is in: which part it holds."""
        return self.cell.holder_of(rank)[0]

    @property
    def seat(self) -> Seat | None:
        return self.share.seat

    @property
    def spare(self) -> Spare:
        return self.share.spare

    @property
    def holds_nothing(self) -> bool:
        return self.share.holds_nothing

    @property
    def num_copies(self) -> int:
        """How many ranks hold each share of any place's part, at least."""
        return min(seating.num_copies for seating in self._seatings)

    def enter(self, mesh: Mesh, cell: Group, holders: Group, weights: Iterable[tuple[str, Tensor]] | None) -> None:
        is_new = not self.holds_part_of(mesh)
        if is_new:
            self._close_sums()  # the old share's, before the model has another part
        CellState.enter(self, mesh, cell, holders, weights)
        if is_new:
            self._share = self.hold(self.columns[self.part])

    def know(self, seats: Sequence[Seat]) -> None:
        """Know the seats of all columns, by their ranks, once this rank has taken its own."""
        self._seatings = [Seating(*column, seats, 0) for column in self.columns]

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        return self.share.assigned(num_replicas, num_lanes, self.cell)

    def sum_of(self, replicas: Group, num_lanes: int, kind: Reduction = "canonical") -> GradientSum:
        self._close_sums()
        degree, kept = self.cell.context, self.keeps_whole and self.share.is_shared_out
        if self.cut.plan.num_chunks == degree == 1 and not self.cut.experts and not kept:
            return self.share.sum_of(replicas, num_lanes, kind)
        assert kind == "canonical", "copies have to have the same bits"
        self.share.begin_sums()
        weights = self.share.gathering(self.column, by_unit=not kept)
        trees = self._trees_of_experts(replicas, num_lanes) if self.cut.experts else self._trees_of_chunks(num_lanes)
        self._sum = self.share.sum_over(trees, weights, by_turn=not kept)
        return self._sum

    def _trees_of_chunks(self, num_lanes: int) -> list[OfFlats]:
        leaves = leaves_of(self.assigned(self._mesh.num_replicas, num_lanes), self.cell.context)
        return [OfFlats(self._flats_of(chunk), self.column, leaves) for chunk in self.cut.by_chunk()]

    def _flats_of(self, parameters: Sequence[nn.Parameter]) -> set[int]:
        some = {id(one) for one in parameters}
        return {one.flat for one in self.share.flat.placed() if id(one.parameter) in some}

    @property
    def keeps_whole(self) -> bool:
        """Whether weights that are gathered stay for a step: several lanes are under way, or others' need experts."""
        return self.cell.stage * self.cell.expert > 1

    def _trees_of_experts(self, replicas: Group, num_lanes: int) -> list[OfFlats]:
        """Return those of what all owners of lanes have over these, and then those of experts over the column."""
        lanes, degree = self.assigned(self._mesh.num_replicas, num_lanes), self.cell.expert
        by_cell, chunks = lanes_by_cell(lanes, degree), list(self.cut.by_spread())
        seats = [seat for seat in self.share.seated.seats for _ in range(degree)]
        everybody = Seating(*self.columns[self.part], seats, replicas.rank)
        trees = [OfFlats(self._flats_of(whole), replicas, lanes, everybody) for whole, _ in chunks]
        return trees + [
            OfFlats(self._flats_of(experts), self.column, by_cell, per_turn=degree, is_beside=False)
            for _, experts in chunks
        ]

    def _close_sums(self) -> None:
        """Leave the model's parameters alone from now on."""
        if self._share is not None:
            self._share.close()
        if self._sum is not None:
            self._sum.close()
            self._sum = None

    def refresh(self, group: Group) -> None:
        self.share.refresh(self.column)

    @contextlib.contextmanager
    def averaged(self, group: Group) -> Iterator[None]:
        with self.share.averaged(self.column):
            yield

    def measure(self) -> Tensor:
        """Return the sums of the squares of this rank's grains, and zeros up to the most that any rank has."""
        mine = self.share.measure()
        most = max(1, *(grains.size for _, grains in self._updaters()))
        measured = torch.zeros(most, dtype=torch.float64)
        measured[: mine.numel()] = mine
        return measured

    def norm_of(self, gathered: Tensor) -> Tensor:
        return self.norm_of_rows(gathered, self._updaters())

    def norm_of_rows(self, gathered: Tensor, holders: Sequence[tuple[int, Int64s]]) -> Tensor:
        """Return the norm from rows of some ranks, which hold all of the grains that are trained."""
        by_part: list[list[tuple[int, Int64s]]] = [[] for _ in self.columns]
        for rank, grains in holders:
            by_part[self.column_of(rank)].append((rank, grains))
        rows = np.zeros((len(self.columns), self.num_grains))
        for row, column, of_part in zip(rows, self.columns, by_part, strict=True):
            squares = squares_of_holders(column.layout, gathered, of_part)
            row[: squares.size] = squares
        return self.norm_of_places(rows.repeat(self.cell.context, axis=0))

    def _updaters(self) -> list[tuple[int, Int64s]]:
        """Return all ranks of the world, and the grains that each updates."""
        pairs = zip(self._mesh.by_part, self._seatings, strict=True)
        return [pair for ranks, seating in pairs for pair in zip(ranks, seating.trained, strict=True)]

    def clip(self, limit: float, norm: Tensor) -> None:
        self.share.clip(limit, norm)

    def tensors(self) -> Iterator[OfPart]:
        return iter(()) if self._share is None else self._share.tensors()

    def is_taken_along(self, leaving: Sequence[bool]) -> bool:
        """Whether some share's holders all leave, or all ranks of one and the same part."""
        by_part = [[leaving[rank] for rank in ranks] for ranks in self._mesh.by_part]
        pairs = zip(self._seatings, by_part, strict=True)
        return any(all(ranks) or seating.are_sole_holders(ranks) for seating, ranks in pairs)

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Let ranks write commits; all do where these hold less than everything: then those that cannot say so."""
        by_part: list[list[int]] = [[] for _ in self.columns]
        for part, number in map(self.cell.holder_of, writers):
            by_part[part].append(number)
        try:
            owned = [
                owned_of(seating.holdings, seating.layout.span, numbers)
                for seating, numbers in zip(self._seatings, by_part, strict=True)
            ]
        except LookupError:
            writers = range(self._mesh.size)
            owned = [seating.all_owned() for seating in self._seatings]
        self._writers, self._spans = tuple(writers), {}
        self._cuts = [
            cuts_of(seating.layout, [Held(grains, seating.sections_of(rank)) for rank, grains in enumerate(by_rank)])
            for seating, by_rank in zip(self._seatings, owned, strict=True)
        ]
        tensors = self.columns[0].layout.tensors
        self._numbers = {name: number for number, one in enumerate(tensors) for name in one.names}
        return writers

    def held(self) -> State:
        """Return this rank's part of the weights, and its share of that part's moments, in pieces of the part."""
        return self.share.held()

    def _to_write(
        self, path: StatePath, leaf: Tensor | Pieces, cut: Cut | None, turns: Iterator[int]
    ) -> Tensor | Pieces:
        if isinstance(leaf, Tensor):
            return CellState._to_write(self, path, leaf, cut, turns)
        number = self._numbers[weight_of(path) or ""]
        if number not in self._spans:
            spans = [cuts[number] for cuts in self._cuts]
            self._spans[number] = written_spans(spans, cut, self.cell, self._writers)
        written = self._spans[number]
        return replace(leaf, written=written) if cut is None else in_whole(leaf, cut, self._mesh.place, written)

    def take(self, fill: Callable[[State], None], *, keeps_rates: bool = False) -> None:
        place, cuts = self._mesh.place, self.cut.cuts
        self.share.take(lambda tree: tree.update(filled_parts(tree, fill, cuts, place)), keeps_rates=keeps_rates)


def holding(
    kind: type[HeldState],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LambdaLR,
    scaler: SharedScaler,
    slots: Sequence[Slots],
    copies: int,
    bucket_bytes: float | None,
    wire: Wire,
    offload: Offload | None = None,
) -> Callable[[Column], HeldState]:
    """Return what makes a column's share of a kind, of an optimizer's state, which has the model's parameters as yet.

    A share takes them away, so they are given back for the next one: a rank may come to another place.
    """
    parameters = [list(group["params"]) for group in optimizer.param_groups]

    def hold(column: Column) -> HeldState:
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = list(own)
        return kind(model, optimizer, scheduler, scaler, column.layout, slots, copies, bucket_bytes, wire, offload)

    return hold


def columns_of(
    model: nn.Module, optimizer: Optimizer, cut: CutModel, cell: Cell, atomic: Container[int] = ()
) -> list[Column]:
    """Return what the ranks of each part hold together of a model that is whole, or without memory.

    What is exchanged together is a block's, in one chunk of a stage: each chunk is summed by itself. Experts that are
    dealt to ranks are summed by others than all else.
    """
    units, chunks = unit_names(model), cut.by_chunk() if cut.plan.num_chunks > 1 else []
    ids = {id(one): str(number) for number, chunk in enumerate(chunks) for one in chunk}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    spread = cut.spread_weights() if cut.experts else set()

    def unit(name: str) -> str:
        found = unit_of(name, units)
        found = f"{ids[id(parameters[name])]} {found}" if chunks else found
        return f"{found} experts" if id(parameters[name]) in spread else found

    def part_at(place: int) -> Callable[[str, Laid], Laid]:
        return lambda name, whole: cut.cuts[name].part(place) if name in cut.cuts else whole

    return [
        column_of(layout_of(model, optimizer, cut.plan.dims, unit, part_at(place), atomic))
        for place in range(0, cell.size, cell.context)
    ]
