"""The gradient sum where gradients are sharded, too: a leaf is cut as soon as a unit's part of it is there (ZeRO-2).

Lanes are dealt (`shards.deal`): in a turn a group's ranks run neighbouring lanes, and each sends the others what they
hold of its leaf, unit by unit during the backward pass, and forgets the rest. A holder adds what comes along the lanes'
tree, in at most 1 + log2 L sums of its share. When all lanes are in, holders in different groups exchange their sums,
and each finishes the same tree.

Units are exchanged in one fixed order on all ranks, the last of the model first, whatever the order in which a backward
pass comes to them: a unit that is ready waits for those before it. A unit's exchange is under way while the backward
pass computes the next one's gradients. A rank without a lane in a turn only receives.

Where weights are shared out, too, they are gathered in between (`unit_weights`, ZeRO-3).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from elastic_train.core.lanes import Part, merge_plan
from elastic_train.parallel.buckets import check_once
from elastic_train.parallel.gradient_sum import OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import FlatGradient, Leaf, Leaves, Spare, Units, Wire, forget_gradients
from elastic_train.parallel.point_to_point import Work
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.shards.deal import Counter, deal_lanes, group_sums, sum_chunks
from elastic_train.shards.holdings import Run, by_flat, runs_of
from elastic_train.shards.seating import Seating
from elastic_train.system.huge_pages import on_huge_pages


@dataclass(frozen=True, slots=True)
class _Flight:
    """An exchange under way: what it awaits, the leaves that it sends of, and by lane what it adds, by flat vector."""

    arriving: list[Work]
    leaving: list[Work]
    leaves: list[tuple[FlatGradient, Leaf]]
    chunks: Mapping[int, Mapping[int, Tensor]]
    begun_s: float


class DealtSum:
    """The sum along the tree, on its holders alone; `homes` have the means that this rank holds, by flat vector.

    A step adds up in them, so that they cost no memory beside the sums.
    """

    def __init__(
        self,
        units: Units,
        homes: Mapping[int, Tensor],
        replicas: Group,
        num_lanes: int,
        seating: Seating,
        weights: UnitWeights | None = None,
        wire: Wire = "exact",
    ) -> None:
        """With `weights`, whose blocks are the units but the last in the opposite order, units are gathered."""
        self._units, self._homes, self._replicas, self._num_lanes = units, homes, replicas, num_lanes
        self._seating, self._weights = seating, weights
        self._turns = deal_lanes(seating.seat, len(seating.seats), num_lanes)
        self._neighbours = seating.neighbours()
        self._mine = self._runs_of(replicas.rank)
        theirs = [(other, self._runs_of(other)) for other in self._neighbours]
        # By unit: what each neighbour holds of it, and the flat vectors of which this rank holds something. Most ranks
        # of a large world hold nothing of most units.
        self._given = [
            [(other, flat.number, run) for other, runs in theirs for flat in unit for run in runs.get(flat.number, ())]
            for unit in units
        ]
        self._held = [[flat for flat in unit if homes[flat.number].numel()] for unit in units]
        self._shared = sum_chunks(seating.rank, seating.seats, seating.trained)
        self._counters: dict[int, Counter[Tensor]] = {}
        self._turn, self._next = 0, 0
        self._in_flight: _Flight | None = None
        self.is_dirty = False
        """Whether something is on its way that may reach the homes however late."""
        self._spare = Spare(2 * len(seating.seats))
        self._seen: set[int] = set()
        self._leaves = Leaves(wire)
        self._missing: list[int] | None = (
            None  # of the running lane: parameters of each unit whose gradient has not come
        )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))  # type: ignore[no-untyped-call]
            for number, unit in enumerate(units)
            for flat in unit
            for parameter, _ in flat.parameters
        ]
        if weights is not None:
            weights.before_backward = self._send_later_than

    def close(self) -> None:
        """Leave the model's parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def tensors(self) -> Iterator[OfPart]:
        yield from (("gradients", home) for home in self._homes.values())
        yield from (("gradients", leaf) for leaf in self._leaves.tensors())
        yield from (("sums", total) for counter in self._counters.values() for total in counter.parts.values())
        yield from (("exchange", spare) for spare in self._spare.tensors())

    def begin(self, lanes: range) -> None:
        seat = self._seating.seat
        assert list(lanes) == [turn[seat.slot] for turn in self._turns if seat.slot < len(turn)], (
            f"{lanes} are not ours"
        )
        numbers = [flat.number for unit in self._units for flat in unit]
        self._counters = {number: Counter(self._num_lanes, self._add) for number in numbers}
        self._turn, self._in_flight = 0, None
        forget_gradients(self._units)
        if self._weights is not None:
            self._weights.end_pass()  # of a step that was not finished

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        assert self._turns[self._turn][self._seating.seat.slot] == lane, f"lane {lane} is not this turn's"
        self._missing, self._next = [sum(len(flat.parameters) for flat in unit) for unit in self._units], 0
        self._seen.clear()
        try:
            with self._taking_turn():
                yield
                while self._next < len(self._units):
                    self._send_next()
                self._land_last()
        finally:
            self._missing, self._in_flight = None, None

    def serve(self) -> None:
        while self._turn < len(self._turns):  # others of the group have a lane in it
            with self._taking_turn():
                for number in range(len(self._units)):
                    self._gather_before(number)
                    self._exchange(number, None)
                self._land_last()

    @contextlib.contextmanager
    def _taking_turn(self) -> Iterator[None]:
        if self._weights is None:
            yield
        else:
            seats, num_lanes = self._seating.seats, len(self._turns[self._turn])
            ranks = (*self._neighbours, self._replicas.rank)
            with self._weights.turn([rank for rank in ranks if seats[rank].slot < num_lanes], has_backward=True):
                yield
        self._turn += 1

    def _gather_before(self, number: int) -> None:
        """Post the weights that are exchanged before a unit's gradients: those of the block before it."""
        if self._weights is not None:
            self._weights.back_to(len(self._units) - 3 - number)

    def _send_later_than(self, block: int) -> None:
        """Send the gradients of all blocks after one, whose backward passes have been."""
        while self._missing is not None and self._next < len(self._units) - 2 - block:
            self._send_next()

    def finish(self, divisor: float) -> None:
        assert self._turn == len(self._turns), "not all turns were taken"
        if self._weights is not None:
            self._weights.end_pass()
        sums = {number: dict(counter.parts) for number, counter in self._counters.items()}
        self._counters = {}
        self._spare.clear()
        self._leaves.clear()
        self._exchange_sums(sums)
        for number in list(sums):
            parts = sums.pop(number)
            if self._homes[number].numel():
                whole = next(iter(parts.values()))
                for left, right, parent in merge_plan(list(parts), self._num_lanes):
                    whole = parts[parent] = parts.pop(left).add_(parts.pop(right))
                torch.div(whole, divisor, out=self._homes[number])

    def _arrived(self, unit: int, parameter: Tensor) -> None:
        """A backward pass has come to the end of a parameter's gradient."""
        if self._missing is None:
            return  # a pass outside of any step, such as warming up
        check_once(parameter, self._seen)
        self._missing[unit] -= 1
        while self._next < len(self._units) and self._missing[self._next] == 0:
            if self._weights is not None and not self._units[self._next]:
                return  # weights of blocks that are frozen are gathered when their turn comes, not all at once
            self._send_next()

    def _send_next(self) -> None:
        """Cut the next unit's leaf, and forget it; what no lane uses is zero."""
        unit = self._units[self._next]
        self._gather_before(self._next)
        self._exchange(self._next, {flat.number: self._leaves.take(flat) for flat in unit})
        self._next += 1

    def _exchange(self, number: int, leaf: Mapping[int, Leaf] | None) -> None:
        """Begin to give the others of the group what they hold of a unit's leaf, and to take what they give."""
        turn, seats, rank = self._turns[self._turn], self._seating.seats, self._replicas.rank
        unit, held = self._units[number], self._held[number]
        sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        chunks: dict[int, dict[int, Tensor]] = {}
        if leaf is not None:
            sends = [(other, leaf[flat].memory[run.lo : run.hi]) for other, flat, run in self._given[number]]
        for other in self._neighbours[::-1] if held else ():
            if seats[other].slot < len(turn):
                lane = turn[seats[other].slot]
                chunks[lane] = {flat.number: self._landing(flat.number, lane) for flat in held}
                receives += [(other, part) for flat, chunk in chunks[lane].items() for part in self._cut(flat, chunk)]
        if leaf is not None:
            lane = turn[seats[rank].slot]
            chunks[lane] = {flat.number: self._room(flat.number, lane) for flat in held}
            for flat, chunk in chunks[lane].items():
                for part, run in zip(self._cut(flat, chunk), self._mine[flat], strict=True):
                    part.copy_(leaf[flat].memory[run.lo : run.hi])
        self.is_dirty = True
        begun = self._replicas.begin_exchange(sends, receives)
        begun_s = time.perf_counter()
        self._land()  # what was begun before this has had a block's time
        leaves = [] if leaf is None else [(flat, leaf[flat.number]) for flat in unit]
        self._in_flight = _Flight(*begun, leaves, chunks, begun_s)

    def _land(self) -> None:
        """Wait for the exchange that is under way, if any, and add what has come, in the lanes' order."""
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            self._replicas.beside_s += time.perf_counter() - flight.begun_s
            self._replicas.wait(flight.arriving + flight.leaving)
            for flat, leaf in flight.leaves:
                self._leaves.give_back(flat, leaf)
            for lane, chunks in sorted(flight.chunks.items()):
                for number, chunk in chunks.items():
                    self._counters[number].push(Part(0, lane), self._widened(number, lane, chunk))

    def _land_last(self) -> None:
        self._land()
        self.is_dirty = False

    def _room(self, number: int, lane: int) -> Tensor:
        """Return memory for what this rank holds of a lane's leaf: the home for the group's first lane."""
        if lane == self._turns[0].start:
            return self._homes[number]
        return self._spare.take(self._homes[number], self._homes[number].dtype)

    def _landing(self, number: int, lane: int) -> Tensor:
        """Return memory to receive a part of a lane's leaf: where it is kept, unless it is sent as another type."""
        home = self._homes[number]
        dtype = self._leaves.dtype_of(home.dtype)
        return self._room(number, lane) if dtype == home.dtype else self._spare.take(home, dtype)

    def _widened(self, number: int, lane: int, chunk: Tensor) -> Tensor:
        """Return what has come as it is added."""
        if chunk.dtype == self._homes[number].dtype:
            return chunk
        room = self._room(number, lane).copy_(chunk)
        self._spare.give_back(chunk)
        return room

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._spare.give_back(right)
        return left

    def _cut(self, number: int, chunk: Tensor) -> Sequence[Tensor]:
        """Return the parts of a chunk that are this rank's runs of the flat vector."""
        runs = self._mine[number]
        return (chunk,) if len(runs) == 1 else chunk.split_with_sizes([run.hi - run.lo for run in runs])

    def _runs_of(self, rank: int) -> dict[int, list[Run]]:
        """Return what a rank holds and the optimizer updates, by flat vector."""
        return by_flat(runs_of(self._seating.layout, self._seating.trained[rank]))

    def _exchange_sums(self, sums: Mapping[int, dict[Part, Tensor]]) -> None:
        """Add to this rank's sums those of the other groups, from the ranks that hold the same."""
        layout = self._seating.layout
        sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        for chunk in self._shared:
            runs = runs_of(layout, chunk.grains)
            for part in self._parts_of(self._replicas.rank):
                sends += [(chunk.to, self._within(run, sums[run.flat][part])) for run in runs]
        for chunk in self._shared[::-1]:
            runs = runs_of(layout, chunk.grains)
            for part in self._parts_of(chunk.to):
                for run in runs:
                    theirs = sums[run.flat].setdefault(part, on_huge_pages(torch.empty_like(self._homes[run.flat])))
                    receives.append((chunk.to, self._within(run, theirs)))
        if sends or receives:
            self._replicas.exchange(sends, receives)

    def _parts_of(self, rank: int) -> tuple[Part, ...]:
        return group_sums(self._seating.seats[rank], len(self._seating.seats), self._num_lanes)

    def _within(self, run: Run, held: Tensor) -> Tensor:
        """Return a run's part of what this rank holds of its flat vector."""
        start = 0
        for one in self._mine[run.flat]:
            if one.lo <= run.lo and run.hi <= one.hi:
                return held[start + run.lo - one.lo : start + run.hi - one.lo]
            start += one.hi - one.lo
        raise AssertionError(f"{run} is not held")
