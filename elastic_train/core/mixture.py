"""Deal samples of several sources in shares: the source of each position of a lane, and the sample.

Shares are integers; a turn has as many positions as they add up to, and each source has its share of every turn, spread
as evenly as possible: the k-th position of a source with share a is at (k + 1/2) / a of the turn (the order of
Webster's apportionment; Balinski and Young: Fair representation, 1982). Lanes start at different points of their turns,
so that every step also approximates the shares. Each source keeps its own order and epochs, independent of the others
(see `Passes`).

A mixture has no epoch: it is one sequence of positions, and the number applied in every lane is the whole state. Counts
before a position are computed, never stored. Nothing depends on the world or grows with a dataset: a turn's table has
as many entries as the shares add up to. Samples are numbered through all sources.

Invariant: over all lanes, every epoch of every source has each of its samples exactly once.

A source's sums are over its own ids, so that one pass adds what its manifest says; they are never reset. A source's
epoch ends at slightly different positions in each lane. So its sums are compared with the closed form of all whole
passes, plus the samples that some lanes have applied beyond those, which follow from the order, minus what holes have
skipped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elastic_train.core.accounting import CoverageSums, Hole
from elastic_train.core.arrays import Int64s, group_of
from elastic_train.core.order import Block, Cursor, NeededBlock, Order, Samples, first_ids
from elastic_train.errors import CoverageError

LONGEST_TURN = 1 << 16
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Run:
    """A lane's samples from one source: `ids` of the source, in its epochs `epochs`, at `places`.

    All three have shape (n,), in lane order; `places` count from the first requested position.
    """

    places: Int64s
    epochs: Int64s
    ids: Int64s


class Mixture:
    """Deals each lane's positions to sources; `shares[s]` of sum(shares) positions are from `orders[s]`.

    It has the methods of an `Order` that training needs. All orders have the run's lanes. Raise ValueError if there are
    no orders, they differ in lanes, a source has fewer samples than lanes, a share is below 1, or the shares add up to
    more than LONGEST_TURN.
    """

    arrangement = None
    is_shuffled = True

    def __init__(self, orders: Sequence[Order], shares: Sequence[int]) -> None:
        _check(orders, shares)
        self.orders, self.shares = tuple(orders), tuple(shares)
        self.num_lanes, self.seed = orders[0].num_lanes, orders[0].seed
        self.block_row_groups = max(order.block_row_groups for order in orders)
        self.group_rows = np.concatenate([order.group_rows for order in orders])
        self.group_first_id = first_ids(self.group_rows)
        self.num_samples = int(self.group_rows.sum())
        self.first_id = first_ids(np.array([order.num_samples for order in orders], dtype=np.int64))
        self.first_group = first_ids(np.array([order.group_rows.size for order in orders], dtype=np.int64))
        self.passes = [Passes(order) for order in orders]
        self._turn, self._sources = sum(shares), _turn_of(shares)
        is_of = self._sources[:, None] == np.arange(len(shares))
        self._before = np.concatenate([np.zeros((1, len(shares)), dtype=np.int64), np.cumsum(is_of, axis=0)])
        self._stands = [np.flatnonzero(self._sources == number) for number in range(len(shares))]
        self._begins = np.arange(self.num_lanes, dtype=np.int64) * self._turn // self.num_lanes

    def counts(self, lane: int, place: int) -> Int64s:
        """Return how many of a lane's positions [0, place) are from each source; shape (sources,)."""
        assert 0 <= lane < self.num_lanes, f"no lane {lane} of {self.num_lanes}"
        begin = int(self._begins[lane])
        turns, rest = divmod(begin + place, self._turn)
        counts: Int64s = turns * self._before[-1] + self._before[rest] - self._before[begin]
        return counts

    def sources(self, lane: int, lo: int, hi: int) -> Int64s:
        """Return the source of each of a lane's positions [lo, hi); shape (hi - lo,)."""
        places = self._begins[lane] + np.arange(lo, hi, dtype=np.int64)
        found: Int64s = self._sources[places % self._turn]
        return found

    def runs(self, lane: int, lo: int, hi: int) -> list[Run]:
        """Return each source's samples at a lane's positions [lo, hi), in the source's own order."""
        assert 0 <= lo <= hi, f"[{lo}, {hi}) is not an interval"
        sources, firsts, ends = self.sources(lane, lo, hi), self.counts(lane, lo), self.counts(lane, hi)
        return [
            Run(np.flatnonzero(sources == number), *passes.samples(lane, int(first), int(end)))
            for number, (passes, first, end) in enumerate(zip(self.passes, firsts, ends, strict=True))
        ]

    def samples(self, cursor: Cursor, lane: int, num: int) -> Samples:
        """Return the next `num` samples of a lane, numbered through all sources, with their sources' epochs."""
        ids, epochs = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.int64)
        for run, first_id in zip(self.runs(lane, cursor.offset, cursor.offset + num), self.first_id, strict=True):
            ids[run.places], epochs[run.places] = run.ids + first_id, run.epochs
        return Samples(ids, epochs)

    def blocks(self, lane: int, steps: range, micro_batch: int) -> Iterator[NeededBlock]:
        """Yield the blocks of all sources that a lane needs for some steps, in order of need."""
        lines = [self._blocks_of(number, lane, steps, micro_batch) for number in range(len(self.orders))]
        return heapq.merge(*lines, key=lambda block: block.first)

    def _blocks_of(self, number: int, lane: int, steps: range, micro_batch: int) -> Iterator[NeededBlock]:
        at = int(self.counts(lane, steps.start * micro_batch)[number])
        while self._place_of(number, lane, at) // micro_batch < steps.stop:
            begin, block = self.passes[number].block_at(lane, at)
            first = self._place_of(number, lane, begin + block.lo) // micro_batch
            end = self._place_of(number, lane, begin + block.hi - 1) // micro_batch + 1
            num_rows = int(self.orders[number].group_rows[block.groups].sum())
            yield NeededBlock(first, end, block.groups + self.first_group[number], num_rows)
            at = begin + block.hi

    def _place_of(self, number: int, lane: int, count: int) -> int:
        """Return the position of a lane that takes the source's sample after `count` others."""
        begin, stands = int(self._begins[lane]), self._stands[number]
        turns, rest = divmod(int(self._before[begin, number]) + count, len(stands))
        return turns * self._turn + int(stands[rest]) - begin

    def source_of_group(self, group: int) -> int:
        return group_of(self.first_group, group)

    def applied_of_group(self, group: int, cursor: Cursor) -> tuple[int, Int64s]:
        """Return a row group's source's number of passes at a cursor, and the group's samples applied since.

        Some lanes may be in the next epoch already, so an id may occur repeatedly.
        """
        number = self.source_of_group(group)
        num_passes = int(self.num_passes(cursor.offset)[number])
        counts = [int(self.counts(lane, cursor.offset)[number]) for lane in range(self.num_lanes)]
        ids = self.passes[number].ids_of_group(group - int(self.first_group[number]), num_passes, counts)
        return num_passes, ids + self.first_id[number]

    def num_passes(self, place: int) -> Int64s:
        """Return how often each source has been passed in the lanes' positions [0, place); shape (sources,)."""
        turns, rests = np.divmod(self._begins + place, self._turn)
        counts = turns[:, None] * self._before[-1] + self._before[rests] - self._before[self._begins]
        return np.array([passes.whole(counts[:, at]) for at, passes in enumerate(self.passes)], dtype=np.int64)

    def num_epochs(self, cursor: Cursor) -> int:
        """Return how many epochs of every source are finished at a cursor, i.e. the slowest source's."""
        return int(self.num_passes(cursor.offset).min())

    def ahead(self, number: int, num_passes: int, place: int) -> Iterator[Int64s]:
        """Yield a source's samples in the lanes' positions [0, place) beyond whole passes, by its own ids."""
        for lane in range(self.num_lanes):
            done = self.passes[number].count_after(lane, num_passes)
            yield from self.passes[number].ids(lane, done, int(self.counts(lane, place)[number]))

    def num_steps(self, micro_batch: int) -> int:
        """Return the steps of an epoch: more than any run has, since a mixture has none."""
        return ENDLESS // micro_batch

    def steps_for(self, num_passes: int, micro_batch: int) -> int:
        """Count the steps after which every source has been passed this often, i.e. the slowest."""
        last = max(
            self._place_of(number, lane, passes.count_after(lane, num_passes) - 1)
            for number, passes in enumerate(self.passes)
            for lane in range(self.num_lanes)
        )
        return last // micro_batch + 1

    def advance(self, cursor: Cursor, micro_batch: int) -> Cursor:
        return Cursor(0, cursor.offset + micro_batch)

    def step_of(self, cursor: Cursor, micro_batch: int) -> int:
        return cursor.offset // micro_batch

    def cursor_at(self, step: int, micro_batch: int) -> Cursor:
        return Cursor(0, step * micro_batch)


RunOrder = Order | Mixture
"""The order of a run's samples: one source's, epoch after epoch, or a mixture's."""


def _check(orders: Sequence[Order], shares: Sequence[int]) -> None:
    """Raise ValueError if the shares do not fit these sources, or cannot be dealt to their lanes."""
    if not orders or len(orders) != len(shares):
        raise ValueError(f"{len(orders)} sources have {len(shares)} shares; give one for each")
    if len({order.num_lanes for order in orders}) > 1:
        raise ValueError(f"the sources have {sorted({order.num_lanes for order in orders})} lanes; give all as many")
    if min(shares) < 1 or sum(shares) > LONGEST_TURN:
        raise ValueError(f"shares must be at least 1 and add up to at most {LONGEST_TURN}: {list(shares)}")
    for number, order in enumerate(orders):
        if order.num_samples < order.num_lanes:
            raise ValueError(f"source {number} has {order.num_samples} samples for {order.num_lanes} lanes")


def _turn_of(shares: Sequence[int]) -> Int64s:
    """Return the source of each position of a turn; ties go to the source with the smaller number."""
    common = math.lcm(*shares)  # integers, so that no rounding decides
    stands = [((2 * k + 1) * (common // share), number) for number, share in enumerate(shares) for k in range(share)]
    return np.array([number for _, number in sorted(stands)], dtype=np.int64)


_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Offsets [lo, hi) of an epoch's lane, read after `begin` samples of earlier epochs."""

    epoch: int
    lane: int
    lo: int
    hi: int
    begin: int


class Passes:
    """Reads an order's epochs in sequence, with at least one sample per lane in each.

    Lane l of a run reads lane l of the source's first epoch, l + 1 of the second, and so on, cyclically. An epoch's
    lanes differ by at most one sample, and a lane that always read a short one would be a whole epoch ahead after
    as many epochs as that has samples. With consecutive lanes in turn, each lane has read (l + e) * N // L - l * N
    // L of N samples after e epochs with L lanes: no two lanes ever differ by more than one, and a lane's position
    after any count is one division.

    Invariant: over all lanes, every epoch has each of its samples exactly once, in the epoch's own order.
    """

    def __init__(self, order: Order) -> None:
        self._order = order

    def count_after(self, lane: int, epochs: int) -> int:
        """Return how many samples a lane has read after this many epochs."""
        num_samples, num_lanes = self._order.num_samples, self._order.num_lanes
        return (lane + epochs) * num_samples // num_lanes - lane * num_samples // num_lanes

    def whole(self, counts: Int64s) -> int:
        """Return how many epochs all lanes have finished, given the samples that each has read; shape (lanes,)."""
        lanes, num_samples = np.arange(self._order.num_lanes, dtype=np.int64), self._order.num_samples
        reached = counts + lanes * num_samples // self._order.num_lanes
        return int((((reached + 1) * self._order.num_lanes - 1) // num_samples - lanes).min())

    def samples(self, lane: int, lo: int, hi: int) -> tuple[Int64s, Int64s]:
        """Return epochs and ids of a lane's samples [lo, hi), counted through all epochs."""
        epochs, ids = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for each in self._stretches(lane, lo, hi):
            ids.append(self._order.epoch(each.epoch).ids(each.lane, each.lo, each.hi))
            epochs.append(np.full(each.hi - each.lo, each.epoch, dtype=np.int64))
        return np.concatenate(epochs), np.concatenate(ids)

    def ids(self, lane: int, lo: int, hi: int) -> Iterator[Int64s]:
        """Yield the ids of a lane's samples [lo, hi), in bounded batches."""
        for first in range(lo, hi, _AT_ONCE):
            yield self.samples(lane, first, min(hi, first + _AT_ONCE))[1]

    def block_at(self, lane: int, count: int) -> tuple[int, Block]:
        """Return the block of a lane's next sample, and how many samples the lane had read before that epoch."""
        (at,) = self._stretches(lane, count, count + 1)
        return at.begin, self._order.epoch(at.epoch).block_at(at.lane, at.lo)

    def ids_of_group(self, group: int, epochs: int, counts: Sequence[int]) -> Int64s:
        """Return the samples of a row group that lanes have read beyond whole epochs; `counts` are all that they read.

        Samples of several epochs occur repeatedly.
        """
        limits: dict[int, Int64s] = {}
        for lane, count in enumerate(counts):
            for each in self._stretches(lane, self.count_after(lane, epochs), count):
                limit = limits.setdefault(each.epoch, np.zeros(self._order.num_lanes, dtype=np.int64))
                limit[each.lane] = each.hi
        found = [self._order.epoch(epoch).ids_of_group(group, limit) for epoch, limit in sorted(limits.items())]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    def _stretches(self, lane: int, lo: int, hi: int) -> Iterator[_Stretch]:
        """Split a lane's samples [lo, hi), counted through all epochs, at epoch ends."""
        num_samples, num_lanes = self._order.num_samples, self._order.num_lanes
        start = lane * num_samples // num_lanes
        while lo < hi:
            slot = ((start + lo + 1) * num_lanes - 1) // num_samples  # lanes of all epochs, one after another
            begin, end = (at * num_samples // num_lanes - start for at in (slot, slot + 1))
            until = min(hi, end)
            yield _Stretch(slot - lane, slot % num_lanes, lo - begin, until - begin, begin)
            lo = until


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A commit's record of a source: its samples, their share of positions, and the sums of those applied."""

    name: str
    share: int
    num_samples: int
    manifest_digest: str
    coverage: CoverageSums


def sums_of_sources(ids: Int64s, first_id: Int64s) -> tuple[CoverageSums, ...]:
    """Return each source's sums over its samples among `ids`, which are numbered through all sources."""
    numbers = group_of(first_id, ids)
    own = ids - first_id.take(numbers)
    return tuple(CoverageSums.of_ids(np.compress(numbers == number, own)) for number in range(len(first_id)))


def expected_sums_of(
    order: Mixture, number: int, whole: CoverageSums, place: int, holes: Sequence[Hole]
) -> CoverageSums:
    """Return a source's expected sums when every lane has applied its positions [0, place).

    `whole` is the closed form of one pass of the source, `holes` are those in effect, of all sources.
    """
    num_passes, first_id = int(order.num_passes(place)[number]), int(order.first_id[number])
    own = [hole for hole in holes if order.source_of_group(hole.group) == number]
    total = whole * num_passes
    for hole in own:
        total -= CoverageSums.of_range(hole.lo - first_id, hole.hi - first_id) * (num_passes - hole.epoch)
        for lo, hi in hole.applied_before:
            total += CoverageSums.of_range(lo - first_id, hi - first_id)
    for ids in order.ahead(number, num_passes, place):
        is_left_out = np.zeros(len(ids), dtype=bool)
        for hole in own:
            is_left_out |= (ids >= hole.lo - first_id) & (ids < hole.hi - first_id)
        total += CoverageSums.of_ids(ids[~is_left_out])
    return total


def check_passes(
    order: Mixture,
    sources: Sequence[tuple[str, CoverageSums]],
    before: Cursor,
    after: Cursor,
    holes: Sequence[Hole],
    found: Sequence[CoverageSums],
) -> None:
    """Raise CoverageError if a source whose pass ended with a step did not apply each sample once per pass.

    `sources` are their names and closed forms of one pass. The step is the one between the two cursors, `holes` are
    those in effect after it, `found` each source's sums then.
    """
    num_passes = order.num_passes(after.offset)
    for number in np.flatnonzero(num_passes > order.num_passes(before.offset)).tolist():
        name, whole = sources[number]
        expected = expected_sums_of(order, number, whole, after.offset, holes)
        if found[number] != expected:
            raise CoverageError(
                f"the samples of source '{name}' were not applied once in each of its {num_passes[number]} epochs: "
                f"{found[number]} were counted, {expected} are expected, so some were repeated or left out. The step "
                "that ended the last epoch was not applied, and no commit has it. This is a defect of the program or "
                "of a machine's memory, not of the data: `elastic-train audit --forensic` names the samples if "
                "run.forensic was set; to train on, remove this epoch's commits and start again from the one before"
            )


def epochs_at(order: RunOrder, cursor: Cursor, micro_batch: int) -> float:
    """Return the epochs before a cursor; of a mixture, the whole ones of its slowest source."""
    if isinstance(order, Mixture):
        return order.num_epochs(cursor)
    return order.step_of(cursor, micro_batch) / order.num_steps(micro_batch)
