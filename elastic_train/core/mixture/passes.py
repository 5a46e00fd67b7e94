"""One source as the lanes read it, pass after pass: a lane's epoch and lane in the source, by sample count.

Lane l of a run reads lane l of the source's first epoch, l + 1 of the second, and so on, cyclically. An epoch's lanes
differ by at most one sample, and a lane that always read a short one would be a whole epoch ahead after as many epochs
as that has samples. With consecutive lanes in turn, each lane has read (l + e) * N // L - l * N // L of N samples after
e epochs with L lanes: no two lanes ever differ by more than one, and a lane's position after any count is one division.

Invariant: over all lanes, every epoch has each of its samples exactly once, in the epoch's own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.order import Block, Order

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
    """Reads an order's epochs in sequence, with at least one sample per lane in each."""

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
