"""The placement table: which rank holds, updates, computes and writes what; the same on every rank.

Ranks with the same part of the model are a column (shard group). Each holds the whole part, or its seat's grains.
Everything follows from the model's layout, the shape of a cell, and the world's seats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Assignment
from elastic_train.core.mesh import ALONE, Cell, ranks_by_part
from elastic_train.errors import WeightsDifferError
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import Column, Run, equal_ones, holders_of, signs_of
from elastic_train.placement.seating import Seating, Transfer, owned_of, plan_recut
from elastic_train.placement.seats import Seat, lanes_by_owner

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Parts:
    """A model, and the parts of it that the places of a cell hold.

    `starts` has, for each cut tensor by name, the first element of each part in memory order. A part consists of whole
    grains of the model. `saved` are the names of the weights and buffers in commits.
    """

    layout: Layout
    columns: Sequence[Column]
    starts: Mapping[str, Sequence[int]]
    saved: Collection[str]

    @cached_property
    def is_saved(self) -> npt.NDArray[np.bool_]:
        """True for each grain of the model that commits have; shape (grains,)."""
        saved = [any(name in self.saved for name in tensor.names) for tensor in self.layout.tensors]
        return np.array(saved, dtype=np.bool_)[self.layout.tensor_of]

    @cached_property
    def numbers(self) -> Sequence[Int64s]:
        """Number in the model of each grain of a part, by part; each of shape (grains of the part,)."""
        return [self._numbers_of(part, column.layout) for part, column in enumerate(self.columns)]

    def _numbers_of(self, part: int, layout: Layout) -> Int64s:
        found = [np.empty(0, dtype=np.int64)]
        for whole, tensor in zip(self.layout.tensors, layout.tensors, strict=True):
            first = whole.first_grain
            if tensor.grains and (starts := self.starts.get(whole.names[0])):
                first += int(np.searchsorted(whole.bounds, starts[part]))
            found.append(np.arange(first, first + len(tensor.grains)))
        return np.concatenate(found)

    def squares_of(self, rows: Float64s, holders: Sequence[Iterable[tuple[int, Int64s]]]) -> Float64s:
        """Return the squares of all trained grains of the model, each once, from the rows of ranks that hold them.

        `holders` has, for each part, pairs of a rank and the grains of the part that its row begins with. Raises
        WeightsDifferError if two ranks have different gradients for a grain.
        """
        squares, ranks = np.full(self.layout.num_grains, -1.0), np.full(self.layout.num_grains, -1)
        for numbers, of_part in zip(self.numbers, holders, strict=True):
            for rank, grains in of_part:
                at, row = numbers[grains], rows[rank, : grains.size]
                known = squares[at]
                differs = (known != row) & (known != -1.0) & ~(np.isnan(known) & np.isnan(row))
                if differs.any():
                    wrong = int(at[differs][0])
                    raise WeightsDifferError(
                        f"ranks {ranks[wrong]} and {rank} have different gradients of '{self.name_of(wrong)}', of "
                        "which they hold the same: memory or a connection is damaged, or a device computes wrongly. "
                        "The step is not applied: all ranks end, and the next start continues from the last commit"
                    )
                squares[at], ranks[at] = row, rank
        trained: Float64s = squares[self.layout.trained]
        assert not (trained == -1.0).any(), "no rank holds the gradients of some grains"
        return trained

    def name_of(self, number: int) -> str:
        """Return the name of a grain's tensor."""
        return self.layout.tensors[int(self.layout.tensor_of[number])].names[0]


@dataclass(frozen=True)
class Table:
    """The role of each of `size` ranks; `seats` are those of a column's ranks, and are the same in each column.

    Without seats, each rank holds all of its part, or nothing yet. A column wants `copies` holders of each grain. With
    `shares_weights`, a rank has only its seat's weights, else all of its part's; with `deals_lanes`, lanes are assigned
    by seat.
    """

    parts: Parts
    seats: Sequence[Seat] = ()
    rank: int = 0
    size: int = 1
    cell: Cell = ALONE
    shares_weights: bool = False
    deals_lanes: bool = False
    copies: int = 1

    @cached_property
    def part(self) -> int:
        """Index of this rank's part of the model."""
        return self.cell.holder_of(self.rank)[0]

    @property
    def place(self) -> int:
        """This rank's place in its replica."""
        return self.rank % self.cell.size

    @property
    def is_whole(self) -> bool:
        """True if every rank holds all of its part."""
        return self.parts.columns[0].is_whole

    @property
    def is_held(self) -> bool:
        """True if the ranks hold the state: their seats are taken, or none are needed."""
        return self.is_whole or bool(self.seats)

    @cached_property
    def _seatings(self) -> dict[int, Seating]:
        return {}

    def seating(self, part: int | None = None) -> Seating:
        """Return the seating of a part's column, by default of this rank's."""
        part = self.part if part is None else part
        if part not in self._seatings:
            self._seatings[part] = Seating(*self.parts.columns[part], self.seats, self.cell.holder_of(self.rank)[1])
        return self._seatings[part]

    @cached_property
    def ranks(self) -> Sequence[Sequence[int]]:
        """Ranks of each column, by part."""
        return ranks_by_part(self.size, self.cell)

    # Who holds.

    @property
    def seat(self) -> Seat | None:
        """This rank's seat; None if it has none."""
        return None if self.is_whole or not self.seats else self.seating().seat

    @property
    def has_all_gradients(self) -> bool:
        """True if every rank has the gradient of the whole model."""
        return self.is_whole and not self.cell.holds_parts

    @property
    def holds_nothing(self) -> bool:
        """True if this rank has a seat without arcs."""
        return self.seat is not None and not self.seat.arcs

    @property
    def holds_all(self) -> bool:
        """True if this rank holds the state of the whole model."""
        if self.cell.holds_parts or not self.is_held:
            return False
        return self.is_whole or self.seating().held.size == self.parts.layout.num_grains

    def runs(self) -> list[Run]:
        """Return the runs that this rank's seat holds: of all its grains if weights are sharded, else of the trained.

        Each is contiguous in the rank's memory.
        """
        if self.is_whole:
            return []
        seating = self.seating()
        return seating.runs_at(seating.rank, seating.held if self.shares_weights else seating.trained[seating.rank])

    @property
    def num_copies(self) -> int:
        """Minimum number of ranks that hold each share of a part."""
        if self.is_whole:
            return min(map(len, self.ranks))
        return min(self.seating(part).num_copies for part in range(len(self.ranks)))

    def would_lose_state(self, leaving: Sequence[bool]) -> bool:
        """Return True if the leaving ranks (flags by rank) hold state that no other rank has."""
        for part, ranks in enumerate(self.ranks):
            left = [leaving[rank] for rank in ranks]
            if all(left) or (not self.is_whole and self.seating(part).are_sole_holders(left)):
                return True
        return False

    # Who computes, updates and writes.

    def assigned(self, num_lanes: int) -> Assignment:
        """Return the lanes of every owner of lanes."""
        if not self.deals_lanes:
            return self.cell.assigned(self.size // self.cell.size, num_lanes)
        return lanes_by_owner(self.seats, num_lanes, self.cell.context, self.cell.expert)

    @cached_property
    def updated(self) -> Sequence[Sequence[tuple[int, Int64s]]]:
        """Grains of its part that each rank updates, by part: pairs of a rank and its grains, ascending."""
        found = []
        for part, ranks in enumerate(self.ranks):
            whole = [self.parts.columns[part].layout.trained] * len(ranks)
            found.append(list(zip(ranks, whole if self.is_whole else self.seating(part).trained, strict=True)))
        return found

    @cached_property
    def ties(self) -> Sequence[Transfer]:
        """Transfers of the model's grains by which the first and the last stage get each other's gradients of what
        both update: tied weights."""
        found, layout, each = list[Transfer](), self.parts.layout, self.cell.num_parts // self.cell.stage
        for part in range(each if self.cell.stage > 1 else 0):
            ends = part, self.cell.num_parts - each + part
            first, last = (self.parts.numbers[end] for end in ends)
            tied = layout.trained_of(np.intersect1d(first, last))
            have = [[tied[:0]] * self.size for _ in ends]
            for of_end, end in zip(have, ends, strict=True):
                for rank, grains in self.updated[end] if tied.size else ():
                    of_end[rank] = np.intersect1d(self.parts.numbers[end][grains], tied)
            for giving, taking in (have, have[::-1]):
                found += plan_recut(giving, taking, layout.span).transfers
        return found

    def owned_by(self, writers: Sequence[int]) -> Sequence[Sequence[Int64s]]:
        """Return the grains of its part that each rank owns, by part and by the ranks of its column.

        Only ranks in `writers` own grains. Raises LookupError if these do not hold all of the model.
        """
        by_part: list[list[int]] = [[] for _ in self.ranks]
        for part, number in map(self.cell.holder_of, writers):
            by_part[part].append(number)
        if self.is_whole:
            if not all(by_part):
                raise LookupError("no writer holds some part")
            return ()
        return [self.seating(part).owned_by(some) for part, some in enumerate(by_part)]

    # Weights that several ranks have.

    def _weights_of(self, part: int) -> Sequence[Int64s]:
        """Return the grains of a part whose weights each rank of its column has."""
        if self.shares_weights:
            return self.seating(part).holdings
        return [np.arange(self.parts.columns[part].layout.num_grains)] * len(self.ranks[part])

    @cached_property
    def weights(self) -> Sequence[Int64s]:
        """Grains of its part whose weights each rank has, by rank."""
        found: dict[int, Int64s] = {}
        for part, ranks in enumerate(self.ranks):
            found |= dict(zip(ranks, self._weights_of(part), strict=True))
        return [found[rank] for rank in range(self.size)]

    def sections(self) -> Int64s:
        """Return the sections of this rank's grains, at whose ends its memory is cut (`Seating.sections_of`)."""
        if not self.shares_weights:
            return np.zeros(self.parts.columns[self.part].layout.num_grains, dtype=np.int64)
        seating = self.seating()
        return seating.sections_of(seating.rank)

    @property
    def has_all_weights(self) -> bool:
        """True if every rank has all of the model's weights."""
        return not self.shares_weights and not self.cell.holds_parts

    @property
    def gathers_by_unit(self) -> bool:
        """True if sharded weights are gathered unit by unit for each pass.

        They are gathered for a step if several lanes are in flight, or if peers need this rank's experts.
        """
        return self.shares_weights and self.cell.stage * self.cell.expert == 1

    def weights_owned(self) -> Sequence[Int64s]:
        """Return the model's grains that each rank owns among all ranks with their weights."""
        return owned_of(self.numbers, self.parts.layout.span)

    @property
    def numbers(self) -> Sequence[Int64s]:
        """Model's grains whose weights each rank has, by rank; ranks with a whole part share one array."""
        known: dict[tuple[int, int], Int64s] = {}
        found = []
        for rank, grains in enumerate(self.weights):
            part = self.cell.holder_of(rank)[0]
            if (key := (part, id(grains))) not in known:
                known[key] = self.parts.numbers[part][grains]
            found.append(known[key])
        return found

    @cached_property
    def weights_in_common(self) -> InCommon:
        """Weights that several ranks share."""
        return in_common(self)


@dataclass(frozen=True)
class InCommon:
    """The saved grains of a model in sets with the same holders; the buffers count as one more grain.

    `set_of` is by grain number, of shape (grains + 1,); grains that are not saved, or have one holder, are in set -1.
    `ranks` are by set, and `of_rank` has the sets by rank, both ascending.
    """

    set_of: Int64s
    ranks: Sequence[Sequence[int]]
    of_rank: Sequence[Int64s]


def in_common(table: Table) -> InCommon:
    """Return the sets of weights that the same ranks have; all ranks have the buffers."""
    last, by_rank = table.parts.layout.num_grains, table.numbers
    saved = {id(grains): np.append(grains[table.parts.is_saved[grains]], last) for grains in by_rank}
    holdings = [saved[id(grains)] for grains in by_rank]
    signs = signs_of(holdings, last + 1)
    held = np.flatnonzero(signs)
    groups = equal_ones(held, signs[held])
    holders = holders_of([int(grains[0]) for grains in groups], holdings, last + 1)
    shared = [(grains, ranks) for grains, ranks in zip(groups, holders, strict=True) if len(ranks) > 1]
    set_of, of_rank = np.full(last + 1, -1), [list[int]() for _ in by_rank]
    for number, (grains, ranks) in enumerate(shared):
        set_of[grains] = number
        for rank in ranks:
            of_rank[rank].append(number)
    return InCommon(set_of, [ranks for _, ranks in shared], [np.array(sets, dtype=np.int64) for sets in of_rank])
