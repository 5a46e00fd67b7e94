"""The gradient sum where gradients are sharded, too: a leaf is cut as soon as a unit's part of it is there (ZeRO-2).

Lanes are dealt (`shards.deal`): in a turn a group's ranks run neighbouring lanes, and each sends the others what they
sum up of its leaf, unit by unit during the backward pass, and forgets the rest. They add what comes along the tree, in
at most 1 + log2 L sums of a share for each run of leaves. When all leaves are in, ranks of different groups that sum up
the same exchange their sums, and each finishes the same tree. Where several ranks of a group hold the same, one of them
sums it up, and gives the others the mean.

The ranks of a group compute leaves of a turn, and hold shares: which rank does what are two tables. A leaf is what one
rank computes of one lane, and a rank may compute several in a turn; all but the last are kept whole until that one.

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

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Lanes, Part, merge_plan
from elastic_train.parallel.buckets import check_once
from elastic_train.parallel.gradient_sum import OfPart
from elastic_train.parallel.group import Group
from elastic_train.parallel.leaves import FlatGradient, Leaf, Leaves, Spare, Units, Wire, forget_gradients
from elastic_train.parallel.point_to_point import Work
from elastic_train.parallel.unit_weights import UnitWeights
from elastic_train.shards.deal import Counter, subtrees_of, sum_chunks
from elastic_train.shards.holdings import Run, by_flat, runs_of
from elastic_train.shards.seating import Seating
from elastic_train.system.huge_pages import on_huge_pages


@dataclass(frozen=True, slots=True)
class _Flight:
    """An exchange under way: what it awaits, the leaves that it sends of, and by leaf what it adds, by flat vector."""

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
        assigned: Sequence[Lanes],
        seating: Seating,
        weights: UnitWeights | None = None,
        wire: Wire = "exact",
        *,
        per_turn: int = 1,
        is_beside: bool = True,
    ) -> None:
        """With `weights`, whose blocks are the units but the last in the opposite order, units are gathered.

        `assigned` are the leaves of each rank of the group, of which it computes `per_turn` in a turn as long as it has
        any. Unless `is_beside` nothing is exchanged before a turn's leaves have been computed.
        """
        self._units, self._homes, self._replicas = units, homes, replicas
        self._seating, self._weights, self._neighbours = seating, weights, seating.neighbours()
        self._numbers = {flat.number for unit in units for flat in unit}
        self._lanes, self._num_leaves = assigned, sum(map(len, assigned))
        in_group = {rank: assigned[rank] for rank in (*self._neighbours, replicas.rank)}
        self._first = min(lanes[0] for lanes in in_group.values() if lanes)
        num_turns = max(-(-len(lanes) // per_turn) for lanes in in_group.values())
        self._turns = [
            {rank: lanes[turn * per_turn : (turn + 1) * per_turn] for rank, lanes in in_group.items()}
            for turn in range(num_turns)
        ]
        """By turn the leaves of each rank of this one's group; a rank without any serves."""
        self._mine = self._runs_of(seating.summed[replicas.rank])
        theirs = [(other, self._runs_of(seating.summed[other])) for other in self._neighbours]
        # By unit: what each neighbour sums up of it, and the flat vectors of which this rank does something. Most ranks
        # of a large world have nothing of most units.
        self._given = [
            [(other, flat.number, run) for other, runs in theirs for flat in unit for run in runs.get(flat.number, ())]
            for unit in units
        ]
        self._held = [[flat for flat in unit if flat.number in self._mine] for unit in units]
        self._totals = self._make_totals()
        self._shared = sum_chunks(replicas.rank, seating.seats, seating.summed)
        self._subtrees: dict[int, tuple[Part, ...]] = {}
        self._counters: dict[int, Counter[Tensor]] = {}
        self._turn, self._next = 0, 0
        self._earlier: dict[int, Mapping[int, Leaf]] = {}
        """Leaves of this turn but the last one."""
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
            for number, unit in enumerate(units if is_beside else ())
            for flat in unit
            for parameter, _ in flat.parameters
        ]
        if weights is not None:
            weights.before_backward = self._send_later_than

    def _make_totals(self) -> Mapping[int, Tensor]:
        """Return memory for the mean of what this rank sums up: the homes, unless others give it some of that."""
        if self._seating.summed[self._replicas.rank] is self._seating.trained[self._replicas.rank]:
            return self._homes
        sizes = {number: sum(run.hi - run.lo for run in self._mine.get(number, ())) for number in self._numbers}
        return {number: self._homes[number].new_empty(size) for number, size in sizes.items()}

    def close(self) -> None:
        """Leave the model's parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def tensors(self) -> Iterator[OfPart]:
        yield from (("gradients", home) for number, home in self._homes.items() if number in self._numbers)
        if self._totals is not self._homes:
            yield from (("sums", total) for total in self._totals.values())
        yield from (("gradients", leaf) for leaf in self._leaves.tensors())
        yield from (("sums", total) for counter in self._counters.values() for total in counter.parts.values())
        yield from (("exchange", spare) for spare in self._spare.tensors())

    def begin(self, lanes: Lanes) -> None:
        assert lanes == self._lanes[self._replicas.rank], f"{lanes} are not ours"
        self._counters = {number: Counter(self._num_leaves, self._add) for number in self._numbers}
        self._turn, self._in_flight, self._earlier = 0, None, {}
        forget_gradients(self._units)
        if self._weights is not None:
            self._weights.end_pass()  # of a step that was not finished

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        leaves = self._turns[self._turn][self._replicas.rank]
        assert lane == leaves[len(self._earlier)], f"leaf {lane} is not the next of this turn's"
        if lane != leaves[-1]:
            yield
            self._earlier[lane] = {flat.number: self._leaves.take(flat) for unit in self._units for flat in unit}
            return
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
                    self._exchange(number, {})
                self._land_last()

    @contextlib.contextmanager
    def _taking_turn(self) -> Iterator[None]:
        if self._weights is None:
            yield
        else:
            computing = [rank for rank, leaves in self._turns[self._turn].items() if leaves]
            with self._weights.turn(computing, has_backward=True):
                yield
        self._turn, self._earlier = self._turn + 1, {}

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
            if self._totals[number].numel():
                whole = next(iter(parts.values()))
                for left, right, parent in merge_plan(list(parts), self._num_leaves):
                    whole = parts[parent] = parts.pop(left).add_(parts.pop(right))
                torch.div(whole, divisor, out=self._totals[number])
        if self._totals is not self._homes:
            self._give()

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
        last = self._turns[self._turn][self._replicas.rank][-1]
        taken = {**self._earlier, last: {flat.number: self._leaves.take(flat) for flat in unit}}
        self._exchange(self._next, taken)
        self._next += 1

    def _exchange(self, number: int, leaves: Mapping[int, Mapping[int, Leaf]]) -> None:
        """Begin to give the others of the group what they sum up of a unit's leaves, and to take what they give."""
        unit, held, given = self._units[number], self._held[number], self._given[number]
        sends = [(other, leaf[flat].memory[run.lo : run.hi]) for leaf in leaves.values() for other, flat, run in given]
        receives = list[tuple[int, Tensor]]()
        chunks: dict[int, dict[int, Tensor]] = {}
        for other in self._neighbours[::-1] if held else ():
            for lane in self._turns[self._turn][other]:
                chunks[lane] = {flat.number: self._landing(flat.number, lane) for flat in held}
                receives += [(other, part) for flat, chunk in chunks[lane].items() for part in self._cut(flat, chunk)]
        for lane, leaf in leaves.items():
            chunks[lane] = {flat.number: self._room(flat.number, lane) for flat in held}
            for flat, chunk in chunks[lane].items():
                for part, run in zip(self._cut(flat, chunk), self._mine[flat], strict=True):
                    part.copy_(leaf[flat].memory[run.lo : run.hi])
        self.is_dirty = True
        begun = self._replicas.begin_exchange(sends, receives)
        begun_s = time.perf_counter()
        self._land()  # what was begun before this has had a block's time
        sent = [(flat, leaf[flat.number]) for leaf in leaves.values() for flat in unit]
        self._in_flight = _Flight(*begun, sent, chunks, begun_s)

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
        """Return memory for what this rank sums up of a leaf: that of the mean for the group's first one."""
        total = self._totals[number]
        return total if lane == self._first else self._spare.take(total, total.dtype)

    def _landing(self, number: int, lane: int) -> Tensor:
        """Return memory to receive a part of a leaf: where it is kept, unless it is sent as another type."""
        total = self._totals[number]
        dtype = self._leaves.dtype_of(total.dtype)
        return self._room(number, lane) if dtype == total.dtype else self._spare.take(total, dtype)

    def _widened(self, number: int, lane: int, chunk: Tensor) -> Tensor:
        """Return what has come as it is added."""
        if chunk.dtype == self._totals[number].dtype:
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

    def _runs_of(self, grains: Int64s) -> dict[int, list[Run]]:
        """Return where grains are, by flat vector, in those that are summed up here."""
        runs = by_flat(runs_of(self._seating.layout, grains))
        return {number: found for number, found in runs.items() if number in self._numbers}

    def _exchange_sums(self, sums: Mapping[int, dict[Part, Tensor]]) -> None:
        """Add to this rank's sums those of the other groups, from the ranks that sum up the same."""
        layout = self._seating.layout
        sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
        own = self._subtrees_at(self._replicas.rank) if self._shared else ()
        for chunk in self._shared:
            runs = [run for run in runs_of(layout, chunk.grains) if run.flat in self._numbers]
            for part in own:
                sends += [(chunk.to, within(run, sums[run.flat][part], self._mine[run.flat])) for run in runs]
        for chunk in self._shared[::-1]:
            runs = [run for run in runs_of(layout, chunk.grains) if run.flat in self._numbers]
            for part in self._subtrees_at(chunk.to):
                for run in runs:
                    theirs = sums[run.flat].setdefault(part, on_huge_pages(torch.empty_like(self._totals[run.flat])))
                    receives.append((chunk.to, within(run, theirs, self._mine[run.flat])))
        if sends or receives:
            self._replicas.exchange(sends, receives)

    def _subtrees_at(self, rank: int) -> tuple[Part, ...]:
        """Return what the group of a rank has sums of once all of its leaves are in."""
        group = self._seating.seats[rank].group
        if group not in self._subtrees:
            pairs = zip(self._seating.seats, self._lanes, strict=True)
            leaves = sorted(leaf for seat, lanes in pairs if seat.group == group for leaf in lanes)
            self._subtrees[group] = subtrees_of(leaves, self._num_leaves)
        return self._subtrees[group]

    def _give(self) -> None:
        """Put the means where they are held: here, and on the ranks of this group that hold some of them, too."""
        seating, rank = self._seating, self._replicas.rank
        held = self._runs_of(seating.trained[rank])
        for number, runs in self._mine.items():
            for run in runs:
                within(run, self._homes[number], held[number]).copy_(within(run, self._totals[number], runs))
        given = [(other, self._common(rank, other)) for other in self._neighbours]
        taken = [(other, self._common(other, rank)) for other in self._neighbours[::-1]]
        self.is_dirty = True
        self._replicas.exchange(
            [
                (other, within(run, self._totals[run.flat], self._mine[run.flat]))
                for other, runs in given
                for run in runs
            ],
            [(other, within(run, self._homes[run.flat], held[run.flat])) for other, runs in taken for run in runs],
        )
        self.is_dirty = False

    def _common(self, summing: int, holding: int) -> list[Run]:
        """Return the runs that one rank sums up and another one holds."""
        summed, held = self._seating.summed[summing], self._seating.trained[holding]
        runs = self._runs_of(np.intersect1d(summed, held, assume_unique=True))
        return [run for of_flat in runs.values() for run in of_flat]


def within(run: Run, memory: Tensor, runs: Sequence[Run]) -> Tensor:
    """Return a run's part of memory that has some runs of its flat vector, one after the other."""
    start = 0
    for one in runs:
        if one.lo <= run.lo and run.hi <= one.hi:
            return memory[start + run.lo - one.lo : start + run.hi - one.lo]
        start += one.hi - one.lo
    raise AssertionError(f"{run} is not held")
