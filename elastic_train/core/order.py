"""The order in which samples are trained on: a pure function of (row groups, seed, epoch), never of the world.

An epoch permutes the row groups (`stratified_order`), treats them as one line, and cuts the line into lanes whose sizes
differ by at most one. A lane is cut into blocks of whole row groups (clipped at the lane's ends), and each block is
shuffled by a keyed permutation. Nothing of a dataset's size is materialised: building touches only row groups, seeking
is a binary search, and a run's whole state is a `Cursor`. An arrangement may reorder the samples
of a stretch of a lane.

Invariant: over all lanes, `ids` yields every sample id of [0, num_samples) exactly once per epoch.

An arrangement has windows, so that the samples of one step are similar.

A window is a number of steps of a lane. Its samples are those of the shuffled order; an arrangement reorders them
within the window, by a rule common to all lanes. So an epoch's order stays a pure function of the cursor, every sample
stays in its window, and the loss of mixing is bounded by the window.

`LengthBuckets` sorts a window by length, cuts it into micro-batches, and shuffles these by a key shared by all lanes:
in one step every lane takes the micro-batch of the same length rank. An arrangement only permutes: packing samples into
sequences of one size changes the number of samples in a micro-batch, and needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.core.keyed_random import derive, mix64_array, permute

VERSION = 2
"""Version of the order's definition; a run continues only with the version it began with."""

_GROUPS, _BLOCK, _WINDOW = 1, 2, 5  # separate the keys of the permutations


WINDOW_STEPS = 64


class Arrangement(Protocol):
    """The rule that turns a window's samples into micro-batches."""

    @property
    def size(self) -> int:
        """Positions of a lane in a window: a multiple of the micro-batch."""

    @property
    def fingerprint(self) -> int:
        """Identifies this arrangement, not 0: a run cannot continue with another."""

    def arrange(self, ids: Int64s, shortest: int, key: int) -> Int64s:
        """Return a window's ids reordered; every lane has its first `shortest` positions, and all share `key`."""


class LengthBuckets:
    """Puts samples of similar length into a micro-batch; `lengths` returns those of ids, and has a fingerprint."""

    def __init__(
        self,
        lengths: Callable[[Int64s], Int64s],
        micro_batch: int,
        *,
        fingerprint: int = 1,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        self._lengths, self._micro_batch = lengths, micro_batch
        self._size, self._fingerprint = micro_batch * window_steps, fingerprint

    @property
    def size(self) -> int:
        return self._size

    @property
    def fingerprint(self) -> int:
        return self._fingerprint

    def arrange(self, ids: Int64s, shortest: int, key: int) -> Int64s:
        by_length = ids[np.argsort(self._lengths(ids), kind="stable")]
        # Micro-batches that some lane has incomplete stay at the end of the epoch, where they are short anyway.
        num_shared = shortest // self._micro_batch
        if num_shared < 2:
            return by_length
        until = num_shared * self._micro_batch
        order = permute(np.arange(num_shared, dtype=np.int64), num_shared, key)
        shared = by_length[:until].reshape(num_shared, self._micro_batch)[order]
        return np.concatenate([shared.reshape(-1), by_length[until:]])


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Number of samples of the epoch that every lane has applied; the whole data state of a run.

    `epoch` counts from 0. `offset` counts samples of one lane, in steps of the micro-batch; it is the same in all
    lanes, at any world size.
    """

    epoch: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        assert self.epoch >= 0, "epoch counts from 0"
        assert self.offset >= 0, "offset counts from 0"


@dataclass(frozen=True, slots=True)
class Block:
    """Offsets [lo, hi) of a lane that are shuffled together, and the row groups of their samples."""

    lo: int
    hi: int
    groups: Int64s


@dataclass(frozen=True, slots=True)
class NeededBlock:
    """Row groups that a lane's steps [first, end) may take samples from, and their number of rows."""

    first: int
    end: int
    groups: Int64s
    num_rows: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples at consecutive positions of a lane: ids, shape (n,), and epochs, a single number if equal."""

    ids: Int64s
    epochs: Int64s | int


class Order:
    """The order of every epoch of a run: a pure function of (row groups, seed, epoch), whatever the world.

    `group_rows` are the rows of each row group in manifest order, shape (row groups,); sample ids number those rows
    from 0. `num_lanes` is fixed for a run's life. `block_row_groups` is the number of row groups shuffled together:
    more mixes better but keeps more open. `is_shuffled=False` cuts the file order into lanes (for validation). Raise
    ValueError for no row group, an empty one, or a count below 1.
    """

    def __init__(
        self,
        group_rows: Sequence[int] | Int64s,
        *,
        num_lanes: int,
        seed: int,
        block_row_groups: int = 8,
        is_shuffled: bool = True,
        arrangement: Arrangement | None = None,
    ) -> None:
        rows = np.asarray(group_rows, dtype=np.int64)
        if rows.ndim != 1 or rows.size == 0 or rows.min() < 1:
            raise ValueError("group_rows must name at least one row group, each of at least one row")
        if num_lanes < 1 or block_row_groups < 1:
            raise ValueError(f"num_lanes and block_row_groups must be at least 1: {num_lanes}, {block_row_groups}")
        self.group_rows = rows
        self.group_first_id = first_ids(rows)
        self.num_samples = int(rows.sum())
        self.num_lanes = num_lanes
        self.seed = seed
        self.block_row_groups = block_row_groups
        self.is_shuffled = is_shuffled
        self.arrangement = arrangement
        self._kept: tuple[EpochOrder, ...] = ()

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of one epoch; two are cached, as some lanes start the next before others finish."""
        kept = self._kept
        found = next((each for each in kept if each.number == epoch), None)
        if found is None:
            found = EpochOrder(self, epoch)
            self._kept = (found, *kept[:1])
        return found

    def lane_bounds(self, lane: int) -> tuple[int, int]:
        """Return the half-open slice of the line that a lane owns."""
        assert 0 <= lane < self.num_lanes, f"no lane {lane} of {self.num_lanes}"
        return lane * self.num_samples // self.num_lanes, (lane + 1) * self.num_samples // self.num_lanes

    def window_around(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the offsets of a lane that hold the samples of the shuffled [lo, hi) after arrangement."""
        if self.arrangement is None:
            return lo, hi
        size = self.arrangement.size
        return lo // size * size, -(-hi // size) * size

    def steps_of(self, lane: int, lo: int, hi: int, micro_batch: int) -> tuple[int, int]:
        """Return the steps [first, end) of an epoch that may take samples of a lane's shuffled [lo, hi)."""
        first, end = self.lane_bounds(lane)
        lo, hi = self.window_around(lo, hi)
        return lo // micro_batch, -(-min(hi, end - first) // micro_batch)

    def samples(self, cursor: Cursor, lane: int, num: int) -> Samples:
        """Return the next `num` samples of a lane, fewer at the epoch's end."""
        return Samples(self.epoch(cursor.epoch).ids(lane, cursor.offset, cursor.offset + num), cursor.epoch)

    def blocks(self, lane: int, steps: range, micro_batch: int) -> Iterator[NeededBlock]:
        """Yield the blocks that a lane needs for some steps, in order of need."""
        lo, hi = self.lane_bounds(lane)
        cursor = self.cursor_at(steps.start, micro_batch)
        cursor = Cursor(cursor.epoch, self.window_around(cursor.offset, cursor.offset)[0])
        while lo < hi:
            if cursor.offset >= hi - lo:
                cursor = Cursor(cursor.epoch + 1, 0)
            before = self.step_of(Cursor(cursor.epoch, 0), micro_batch)
            if before + self.steps_of(lane, cursor.offset, hi - lo, micro_batch)[0] >= steps.stop:
                return
            block = self.epoch(cursor.epoch).block_at(lane, cursor.offset)
            first, end = (before + step for step in self.steps_of(lane, block.lo, block.hi, micro_batch))
            yield NeededBlock(first, end, block.groups, int(self.group_rows[block.groups].sum()))
            cursor = Cursor(cursor.epoch, block.hi)

    def num_epochs(self, cursor: Cursor) -> int:
        """Return how many epochs are over at a cursor."""
        return cursor.epoch

    def applied_of_group(self, group: int, cursor: Cursor) -> tuple[int, Int64s]:
        """Return the epoch at a cursor, and the samples of a row group that it has applied before."""
        return cursor.epoch, self.epoch(cursor.epoch).ids_of_group(group, cursor.offset)

    def num_steps(self, micro_batch: int) -> int:
        """Count the steps of an epoch; the last one may be short, or empty in some lanes."""
        longest = -(-self.num_samples // self.num_lanes)
        return -(-longest // micro_batch)

    def advance(self, cursor: Cursor, micro_batch: int) -> Cursor:
        """Return the cursor after one more step."""
        offset = cursor.offset + micro_batch
        if offset >= self.num_steps(micro_batch) * micro_batch:
            return Cursor(cursor.epoch + 1, 0)
        return Cursor(cursor.epoch, offset)

    def step_of(self, cursor: Cursor, micro_batch: int) -> int:
        """Return how many steps are before the cursor."""
        return cursor.epoch * self.num_steps(micro_batch) + cursor.offset // micro_batch

    def cursor_at(self, step: int, micro_batch: int) -> Cursor:
        """Return the cursor after `step` steps; the inverse of `step_of`."""
        epoch, steps = divmod(step, self.num_steps(micro_batch))
        return Cursor(epoch, steps * micro_batch)


def first_ids(group_rows: Int64s) -> Int64s:
    """Return the id of each row group's first sample: ids number the rows of all row groups, in file order."""
    return np.concatenate(([0], np.cumsum(group_rows)[:-1])).astype(np.int64)


class EpochOrder:
    """One epoch's order: the permuted row groups as one line, with their starts."""

    def __init__(self, order: Order, epoch: int) -> None:
        num_groups = order.group_rows.size
        self._order = order
        self.number = epoch
        self._groups = np.arange(num_groups, dtype=np.int64)
        if order.is_shuffled:
            key = derive(order.seed, epoch, _GROUPS)
            self._groups = stratified_order(num_groups, order.num_lanes, order.block_row_groups, key)
        self._starts = np.concatenate(([0], np.cumsum(order.group_rows[self._groups])))

    def ids(self, lane: int, lo: int, hi: int) -> Int64s:
        """Return the sample ids at offsets [lo, hi) of a lane, clipped to the lane's end; shape (n,), int64."""
        assert 0 <= lo <= hi, f"[{lo}, {hi}) is not an interval"
        arrangement = self._order.arrangement
        if arrangement is None:
            return self._shuffled_ids(lane, lo, hi)
        size, (first, end) = arrangement.size, self._order.window_around(lo, hi)
        ids = self._shuffled_ids(lane, first, end)
        for at in range(0, len(ids), size):
            ids[at : at + size] = self._arranged(arrangement, ids[at : at + size], (first + at) // size)
        return ids[lo - first : hi - first]

    def _arranged(self, arrangement: Arrangement, ids: Int64s, number: int) -> Int64s:
        """Arrange the ids of one of a lane's windows."""
        left = self._order.num_samples // self._order.num_lanes - number * arrangement.size
        shortest = max(0, min(arrangement.size, left))
        return arrangement.arrange(ids, shortest, derive(self._order.seed, self.number, _WINDOW, number))

    def _shuffled_ids(self, lane: int, lo: int, hi: int) -> Int64s:
        """Return the ids at offsets [lo, hi) of a lane in the shuffled order."""
        first, end = self._order.lane_bounds(lane)
        line = np.arange(first + lo, min(first + hi, end), dtype=np.int64)
        if self._order.is_shuffled and line.size:
            line = self._shuffle(lane, line)
        places = group_of(self._starts, line)
        return self._order.group_first_id[self._groups[places]] + (line - self._starts[places])

    def block_at(self, lane: int, offset: int) -> Block:
        """Return the block that holds an offset of a lane, in the shuffled order (see `Order.window_around`)."""
        first, end = self._order.lane_bounds(lane)
        assert 0 <= offset < end - first, f"lane {lane} has no offset {offset}"
        _, lo, hi = self._block_at(lane, first + offset)
        lo_place, hi_place = group_of(self._starts, lo), group_of(self._starts, hi - 1)
        return Block(lo - first, hi - first, self._groups[lo_place : hi_place + 1])

    def ids_of_group(self, group: int, until: int | Int64s) -> Int64s:
        """Return the samples of a row group below an offset of their lanes, given for all or for each lane."""
        place = int(np.flatnonzero(self._groups == group)[0])
        lo, hi = int(self._starts[place]), int(self._starts[place + 1])
        order, found = self._order, [np.zeros(0, dtype=np.int64)]
        for lane, limit in enumerate(np.broadcast_to(until, order.num_lanes).tolist()):
            first, end = order.lane_bounds(lane)
            if max(lo, first) < min(hi, end):
                block = self.block_at(lane, max(lo, first) - first)
                first_offset, end_offset = order.window_around(block.lo, block.hi)
                found.append(self.ids(lane, first_offset, max(first_offset, min(end_offset, limit))))
        ids = np.concatenate(found)
        first_id = order.group_first_id[group]
        is_of_group = (ids >= first_id) & (ids < first_id + order.group_rows[group])
        return np.compress(is_of_group, ids)

    def _shuffle(self, lane: int, line: Int64s) -> Int64s:
        """Permute line positions inside their blocks; positions come in ascending order."""
        shuffled = np.empty_like(line)
        done = 0
        while done < line.size:
            block, lo, hi = self._block_at(lane, int(line[done]))
            until = int(np.searchsorted(line, hi))
            key = derive(self._order.seed, self.number, _BLOCK, lane, block)
            shuffled[done:until] = lo + permute(line[done:until] - lo, hi - lo, key)
            done = until
        return shuffled

    def _block_at(self, lane: int, position: int) -> tuple[int, int, int]:
        """Return (number, lo, hi) of the lane's block that holds a line position."""
        first, end = self._order.lane_bounds(lane)
        first_place = group_of(self._starts, first)
        place = group_of(self._starts, position)
        block = (place - first_place) // self._order.block_row_groups
        lo_place = first_place + block * self._order.block_row_groups
        hi_place = min(lo_place + self._order.block_row_groups, self._starts.size - 1)
        return block, max(first, int(self._starts[lo_place])), min(end, int(self._starts[hi_place]))


_SHORT, _DEAL, _PLACE = 1, 2, 3  # separate the keys


def stratified_order(num_groups: int, num_lanes: int, block_row_groups: int, key: int) -> Int64s:
    """Return the permuted row groups, shape (num_groups,), which consecutive lanes divide about evenly.

    All lanes read their first blocks at about the same time, then their second ones: a *turn*. The row groups of a
    turn are a stratified sample of the dataset (Cochran: Sampling Techniques, 1977, chapter 5): the row groups in
    file order are cut into as many consecutive runs as a turn has positions, and every turn gets one of each run.
    The key decides which, and at which position. So files sorted by something the loss depends on, such as a label
    or source, give every turn their overall mix.
    """
    turns = _turns(num_groups, num_lanes, block_row_groups)
    sizes = np.bincount(turns)  # none is larger than the one before
    # The last turns have fewer positions, so only as many runs have a row group for them.
    num_runs = int(sizes[0])
    ranks = permute(np.arange(num_runs, dtype=np.int64), num_runs, derive(key, _SHORT))
    lengths = np.searchsorted(-sizes, -ranks, side="left")
    runs = np.repeat(np.arange(num_runs), lengths)
    dealt = _sorted_by(runs, derive(key, _DEAL))
    turn_of_group = np.empty(num_groups, dtype=np.int64)
    turn_of_group[dealt] = np.arange(num_groups) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    groups = np.empty(num_groups, dtype=np.int64)
    groups[np.argsort(turns, kind="stable")] = _sorted_by(turn_of_group, derive(key, _PLACE))
    return groups


def _turns(num_groups: int, num_lanes: int, block_row_groups: int) -> Int64s:
    """Return the turn in which each position of the line is read, as if all row groups had equal size."""
    places = np.arange(num_groups, dtype=np.int64)
    lanes = places * num_lanes // num_groups
    firsts = -(-lanes * num_groups // num_lanes)
    turns: Int64s = (places - firsts) // block_row_groups
    return turns


def _sorted_by(classes: Int64s, key: int) -> Int64s:
    """Return [0, n) sorted by class, within a class as drawn by the key.

    The sorted words consist of class, draw and a unique number, so every sort algorithm gives the same result.
    """
    count = classes.size
    num_bits = np.uint64(count.bit_length())
    numbers = np.arange(count, dtype=np.uint64)
    draws = mix64_array(numbers ^ np.uint64(key)) >> (num_bits + num_bits) << num_bits
    words = np.sort((classes.astype(np.uint64) << (np.uint64(64) - num_bits)) | draws | numbers)
    return (words & ((np.uint64(1) << num_bits) - np.uint64(1))).astype(np.int64)
