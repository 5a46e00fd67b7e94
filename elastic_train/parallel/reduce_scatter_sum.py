"""The gradient sum with sharded gradients (ZeRO-2): each unit of a leaf is reduce-scattered as soon as it is computed.

In a turn, a group's ranks run neighbouring lanes (`placement.seats`). During the backward pass each rank sends, unit by
unit, the others the shards of its leaf that they sum, and drops the rest. They add what they receive along the tree,
with at most 1 + log2 L partial sums of a shard per run of leaves. After all leaves, ranks of different groups with the
same shard exchange their sums, and each finishes the same tree. If several ranks of a group hold the same shard, one
sums it and sends the others the mean.

Two tables assign ranks their leaves per turn and their shards. A leaf is one rank's computation of one lane; a rank may
compute several per turn, and keeps all but the last whole until that one.

Units are exchanged in a fixed order on all ranks (`program.schedules`), the model's last one first, whatever the order
of the backward pass: a finished unit waits for those before it. The last unit of a turn arrives during the next turn. A
rank without a lane in a turn only receives. Sharded weights are gathered in between (`unit_weights`, ZeRO-3).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Counter, Lanes, Part, parts_of
from elastic_train.parallel.buckets import (
    BufferPool,
    Filling,
    FlatGradient,
    Leaf,
    Leaves,
    Units,
    Wire,
    forget_gradients,
)
from elastic_train.parallel.exchange import add_up, messages_of, messages_of_sums, move
from elastic_train.parallel.gradient_sum import OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import Work
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.placement.holdings import Run, by_flat
from elastic_train.placement.seating import Move, Seating, by_flats
from elastic_train.program.schedules import Begin, End, UnitAction, Walk, place_of, reducing_turn
from elastic_train.system.huge_pages import on_huge_pages


@dataclass(frozen=True, slots=True)
class _Flight:
    """An exchange in flight: its works, the leaves it sends from, and the received chunks by leaf and flat vector."""

    arriving: list[Work]
    leaving: list[Work]
    leaves: list[tuple[FlatGradient, Leaf]]
    chunks: Mapping[int, Mapping[int, Tensor]]
    begun_s: float


class ReduceScatterTree(NamedTuple):
    """Units whose gradients are added along one tree; `leaves` has the leaves of each of the `ranks`.

    Each computes `per_turn` of them in a turn, while any are left. Unless `is_beside`, the exchange starts only after a
    turn's leaves have been computed.
    """

    units: Units
    ranks: Group
    leaves: Sequence[Lanes]
    seating: Seating
    per_turn: int = 1
    is_beside: bool = True


class _Course:
    """A tree during a step: the leaves that each rank computes in each turn, and the shards that it sums."""

    def __init__(self, tree: ReduceScatterTree) -> None:
        self.tree, self.ranks, self.units = tree, tree.ranks, tree.units
        seating, rank = tree.seating, tree.ranks.rank
        self.numbers = {flat.number for unit in tree.units for flat in unit}
        self.num_leaves = sum(map(len, tree.leaves))
        in_group = {one: tree.leaves[one] for one in (*seating.neighbours(), rank)}
        self.first = min(leaves[0] for leaves in in_group.values() if leaves)
        num_turns = max(-(-len(leaves) // tree.per_turn) for leaves in in_group.values())
        self.turns = [
            {one: leaves[turn * tree.per_turn : (turn + 1) * tree.per_turn] for one, leaves in in_group.items()}
            for turn in range(num_turns)
        ]
        """By turn: leaves of each rank of this group; a rank without any only receives."""
        self.mine = self.runs_of(seating.summed[rank])
        self.leaf_moves = by_flats(seating.leaves(), [{flat.number for flat in unit} for unit in tree.units])
        [self.subtree_moves] = by_flats(seating.subtrees(), [self.numbers])
        [self.mean_moves] = by_flats(() if self.sums_what_it_holds else seating.means(), [self.numbers])
        self._subtrees: dict[int, tuple[Part, ...]] = {}
        self.turn = 0
        self.earlier: dict[int, Mapping[int, Leaf]] = {}
        """Leaves of this turn except the last one."""
        self.in_flight = deque[_Flight]()
        units = tree.units if tree.is_beside else ()
        self.filling = Filling([[parameter for flat in unit for parameter, _ in flat.parameters] for unit in units])

    @property
    def sums_what_it_holds(self) -> bool:
        """True if this rank sums exactly the shard that it holds."""
        seating, rank = self.tree.seating, self.ranks.rank
        return seating.summed[rank] is seating.trained[rank]

    @property
    def of_turn(self) -> Mapping[int, Lanes]:
        """Leaves of each rank of the group in the current turn; empty once all are done."""
        return self.turns[self.turn] if self.turn < len(self.turns) else {}

    def runs_of(self, grains: Int64s) -> dict[int, list[Run]]:
        """Return the runs of grains, by flat vector, in the vectors of this tree."""
        runs = by_flat(self.tree.seating.runs_of([grains])[0])
        return {number: found for number, found in runs.items() if number in self.numbers}

    def subtrees_at(self, rank: int) -> tuple[Part, ...]:
        """Return the subtrees whose sums the group of a rank has after all of its leaves."""
        seats = self.tree.seating.seats
        group = seats[rank].group
        if group not in self._subtrees:
            pairs = zip(seats, self.tree.leaves, strict=True)
            leaves = sorted(leaf for seat, of_rank in pairs if seat.group == group for leaf in of_rank)
            self._subtrees[group] = parts_of(tuple(leaves), self.num_leaves)
        return self._subtrees[group]


class ReduceScatterSum:
    """The sum along trees on the ranks that hold it; `homes` has this rank's means, by flat vector.

    A step accumulates in them, so they need no memory besides the sums.
    """

    def __init__(
        self,
        trees: Sequence[ReduceScatterTree],
        homes: Mapping[int, Tensor],
        weights: UnitWeights | None = None,
        wire: Wire = "exact",
        *,
        by_turn: bool = True,
    ) -> None:
        """`weights` gathers units for each turn of the only tree; unless `by_turn`, all units for a step.

        The tree's units are then the blocks in reverse order, and the rest of the model.
        """
        self._courses, self._homes, self._weights, self._by_turn = [*map(_Course, trees)], homes, weights, by_turn
        self._totals: dict[int, Tensor] = {}
        for course in self._courses:
            self._totals |= self._totals_of(course)
        self._counters: dict[int, Counter[Tensor]] = {}
        self.is_dirty = False
        """True if pending receives may still write to the homes."""
        self._spare = BufferPool(2 * sum(len(one.tree.seating.seats) for one in self._courses))
        self._leaves = Leaves(wire)

    def _totals_of(self, course: _Course) -> Mapping[int, Tensor]:
        """Return memory for the means that this rank sums: the homes, unless other ranks sum part of its shard."""
        if course.sums_what_it_holds:
            return {number: self._homes[number] for number in course.numbers}
        sizes = {number: sum(run.hi - run.lo for run in course.mine.get(number, ())) for number in course.numbers}
        return {number: self._homes[number].new_empty(size) for number, size in sizes.items()}

    def close(self) -> None:
        for course in self._courses:
            course.filling.close()
            forget_gradients(course.units)
        self._courses, self._homes, self._totals, self._weights = [], {}, {}, None
        self._counters, self._leaves, self._spare = {}, Leaves("exact"), BufferPool(0)

    def tensors(self) -> Iterator[OfPart]:
        for number, total in self._totals.items():
            yield "gradients", self._homes[number]
            if total is not self._homes[number]:
                yield "sums", total
        yield from (("gradients", leaf) for leaf in self._leaves.tensors())
        yield from (("sums", total) for counter in self._counters.values() for total in counter.parts.values())
        yield from (("exchange", spare) for spare in self._spare.tensors())

    def begin(self) -> None:
        if self._weights is not None:
            self._weights.end_pass()  # of a step that was not finished
            if not self._by_turn:
                self._weights.gather()
        self._land_all()  # of a step that was not applied
        for course in self._courses:
            self._counters |= {number: Counter(course.num_leaves, self._add) for number in course.numbers}
            course.turn, course.earlier = 0, {}
            forget_gradients(course.units)

    @contextlib.contextmanager
    def turn(self, leaf: int | None, tree: int = 0) -> Iterator[None]:
        course = self._courses[tree]
        leaves = course.of_turn.get(course.ranks.rank, ())
        assert leaf == (leaves[len(course.earlier)] if leaves else None), f"leaf {leaf} is not the next of this turn's"
        if leaf is not None and leaf != leaves[-1]:
            yield
            course.earlier[leaf] = {flat.number: self._leaves.take(flat) for unit in course.units for flat in unit}
        elif course.of_turn:
            try:
                with self._walking(course) as walk, course.filling.filling(walk):
                    yield
            except BaseException:
                course.in_flight.clear()
                raise
            course.turn, course.earlier = course.turn + 1, {}
        else:
            yield

    @contextlib.contextmanager
    def _walking(self, course: _Course) -> Iterator[Walk]:
        """Return the context of a turn; it gathers sharded weights."""
        if self._weights is not None and self._by_turn:
            computing = [rank for rank, leaves in course.of_turn.items() if leaves]
            with self._weights.turn(computing, trains=True, reduce=partial(self._reduce, course)) as walk:
                yield walk
            return
        yield Walk(reducing_turn(len(course.units), is_first=course.turn == 0), partial(self._reduce, course))

    def _reduce(self, course: _Course, action: UnitAction) -> None:
        """Begin to exchange a unit's gradients, or wait for an earlier exchange."""
        match action:
            case Begin(unit=unit):
                self._send(course, place_of(unit, len(course.units)))
            case End():
                self._land(course)

    def finish(self, divisor: float) -> None:
        assert all(course.turn == len(course.turns) for course in self._courses), "not all turns were taken"
        self._land_all()
        if self._weights is not None:
            self._weights.end_pass()
        self._spare.clear()
        self._leaves.clear()
        for course in reversed(self._courses):
            self._finish(course, divisor)

    def _finish(self, course: _Course, divisor: float) -> None:
        sums = {number: dict(self._counters.pop(number).parts) for number in course.numbers}
        self._exchange_sums(course, sums)
        for number in list(sums):
            parts = sums.pop(number)
            if self._totals[number].numel():
                torch.div(add_up(parts, course.num_leaves), divisor, out=self._totals[number])
        if not course.sums_what_it_holds:
            self._give(course)

    def _send(self, course: _Course, number: int) -> None:
        """Send a unit's leaves and drop them; unused parameters are zero."""
        unit, leaves = course.units[number], course.of_turn[course.ranks.rank]
        taken = dict(course.earlier)
        if leaves:
            taken[leaves[-1]] = {flat.number: self._leaves.take(flat) for flat in unit}
        self._exchange(course, number, taken)

    def _exchange(self, course: _Course, number: int, leaves: Mapping[int, Mapping[int, Leaf]]) -> None:
        """Begin to send the others of the group their shards of a unit's leaves, and to receive this rank's."""
        moves, rank, of_turn = course.leaf_moves[number], course.ranks.rank, course.of_turn
        chunks: dict[int, dict[int, Tensor]] = {}

        def given(one: Move) -> list[Tensor]:
            lanes, runs = of_turn[one.giver], one.runs
            return [leaves[lane][run.flat].memory[run.lo : run.hi] for lane in lanes for run in runs]

        def taken(one: Move) -> list[Tensor]:
            lanes, runs, mine = of_turn[one.giver], one.runs, course.mine
            return [within(run, chunks[lane][run.flat], mine[run.flat]) for lane in lanes for run in runs]

        for one in (one for one in moves if one.taker == rank):
            room = self._room if one.giver == rank else self._landing
            for lane in of_turn[one.giver]:
                chunks[lane] = {flat: room(course, flat, lane) for flat in dict.fromkeys(run.flat for run in one.runs)}
            if one.giver == rank:
                for part, own in zip(taken(one), given(one), strict=True):
                    part.copy_(own)

        self.is_dirty = True
        messages = messages_of(moves, rank, lambda one: (given if one.giver == rank else taken)(one))
        begun = course.ranks.begin_exchange(*messages)
        sent = [(flat, leaf[flat.number]) for leaf in leaves.values() for flat in course.units[number]]
        course.in_flight.append(_Flight(*begun, sent, chunks, time.perf_counter()))

    def _land_all(self) -> None:
        """Wait for the last exchanges of all turns."""
        for course in self._courses:
            while course.in_flight:
                self._land(course)
        self.is_dirty = False

    def _land(self, course: _Course) -> None:
        """Wait for the oldest exchange in flight, and add what was received, in lane order."""
        flight = course.in_flight.popleft()
        course.ranks.beside_s += time.perf_counter() - flight.begun_s
        course.ranks.wait(flight.arriving + flight.leaving)
        for flat, leaf in flight.leaves:
            self._leaves.give_back(flat, leaf)
        for lane, chunks in sorted(flight.chunks.items()):
            for number, chunk in chunks.items():
                self._counters[number].push(Part(0, lane), self._widened(course, number, lane, chunk))

    def _room(self, course: _Course, number: int, lane: int) -> Tensor:
        """Return memory for this rank's shard of a leaf; for the group's first leaf, that of the mean."""
        total = self._totals[number]
        return total if lane == course.first else self._spare.take(total, total.dtype)

    def _landing(self, course: _Course, number: int, lane: int) -> Tensor:
        """Return memory to receive a shard of a leaf: its final memory, unless the wire format has another dtype."""
        total = self._totals[number]
        dtype = self._leaves.dtype_of(total.dtype)
        return self._room(course, number, lane) if dtype == total.dtype else self._spare.take(total, dtype)

    def _widened(self, course: _Course, number: int, lane: int, chunk: Tensor) -> Tensor:
        """Return a received chunk in the dtype of the sum."""
        if chunk.dtype == self._totals[number].dtype:
            return chunk
        room = self._room(course, number, lane).copy_(chunk)
        self._spare.give_back(chunk)
        return room

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._spare.give_back(right)
        return left

    def _exchange_sums(self, course: _Course, sums: Mapping[int, dict[Part, Tensor]]) -> None:
        """Add the sums of the other groups' ranks that sum the same shard."""

        def at(part: Part, run: Run) -> Tensor:
            if part not in (found := sums[run.flat]):
                found[part] = on_huge_pages(torch.empty_like(self._totals[run.flat]))
            return within(run, found[part], course.mine[run.flat])

        sends, receives = messages_of_sums(course.subtree_moves, course.ranks.rank, course.subtrees_at, at)
        if sends or receives:
            course.ranks.exchange(sends, receives)

    def _give(self, course: _Course) -> None:
        """Copy the means to the ranks of this group that hold them, this one included."""
        held = course.runs_of(course.tree.seating.trained[course.ranks.rank])
        self.is_dirty = True
        move(
            course.ranks,
            course.mean_moves,
            lambda run: within(run, self._totals[run.flat], course.mine[run.flat]),
            lambda run: within(run, self._homes[run.flat], held[run.flat]),
        )
        self.is_dirty = False


def within(run: Run, memory: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return the part for `run` of memory that holds `runs` of its flat vector consecutively."""
    start = 0
    for one in runs:
        if one.lo <= run.lo and run.hi <= one.hi:
            return memory[start + run.lo - one.lo : start + run.hi - one.lo]
        start += one.hi - one.lo
    raise AssertionError(f"{run} is not held")
