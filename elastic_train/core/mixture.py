"""Samples of more than one source in shares: which source a place of a lane takes from, and which sample of it.

Shares are whole numbers; a turn is as many places of a lane as they add up to, and each source has its share of every
turn, spread as evenly as whole places allow: the k-th place of a source with share a stands at (k + 1/2) / a of the
turn (the order of Webster's apportionment; Balinski and Young: Fair representation, 1982). Lanes begin at different
points of their turns, so that every step, too, has about the shares. Each source keeps its own order and its own
epochs, which the others do not touch.

A lane's places [lo, hi) take from each source a run of places of the source's lane, so every source is read in its own
order, and the cursor stays the whole state: what comes before a place is counted, never stored. Nothing depends on the
world, and nothing is as large as a dataset: the table of a turn has as many entries as the shares add up to.

Invariant: over all lanes, every epoch of every source has each of its samples exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.order import Order

LONGEST_TURN = 1 << 16


@dataclass(frozen=True, slots=True)
class Run:
    """What places of a lane take from one source: `ids` of the source, of its epochs `epochs`, at `places`.

    All three have shape (n,), in the order of the lane; `places` count from the first of those that were asked for.
    """

    places: Int64s
    epochs: Int64s
    ids: Int64s


class Mixture:
    """Deals the places of each lane out to sources; `shares[s]` of sum(shares) places are of `orders[s]`.

    All orders have the run's lanes. Raises ValueError if there are none, if they differ in their lanes, if a source has
    fewer samples than lanes, or if a share is below 1 or the shares add up to more than LONGEST_TURN.
    """

    def __init__(self, orders: Sequence[Order], shares: Sequence[int]) -> None:
        if not orders or len(orders) != len(shares):
            raise ValueError(f"{len(orders)} sources have {len(shares)} shares; give one for each")
        if len({order.num_lanes for order in orders}) > 1:
            raise ValueError(
                f"the sources have {sorted({order.num_lanes for order in orders})} lanes; give all as many"
            )
        if min(shares) < 1 or sum(shares) > LONGEST_TURN:
            raise ValueError(f"shares must be at least 1 and add up to at most {LONGEST_TURN}: {list(shares)}")
        self.num_lanes = orders[0].num_lanes
        for number, order in enumerate(orders):
            if order.num_samples < self.num_lanes:
                raise ValueError(f"source {number} has {order.num_samples} samples for {self.num_lanes} lanes")
        self._orders, self._turn = orders, sum(shares)
        self._sources = _turn_of(shares)
        is_of = self._sources[:, None] == np.arange(len(shares))
        self._before = np.concatenate([np.zeros((1, len(shares)), dtype=np.int64), np.cumsum(is_of, axis=0)])

    def counts(self, lane: int, place: int) -> Int64s:
        """Return how many of a lane's places [0, place) are of each source; shape (sources,)."""
        begin = self._begin_of(lane)
        counts: Int64s = self._count_to(begin + place) - self._before[begin]
        return counts

    def sources(self, lane: int, lo: int, hi: int) -> Int64s:
        """Return the source of each of a lane's places [lo, hi); shape (hi - lo,)."""
        places = self._begin_of(lane) + np.arange(lo, hi, dtype=np.int64)
        return self._sources.take(places % self._turn)

    def runs(self, lane: int, lo: int, hi: int) -> list[Run]:
        """Return what a lane's places [lo, hi) take from each source, in the source's own order."""
        assert 0 <= lo <= hi, f"[{lo}, {hi}) is not an interval"
        sources, firsts, ends = self.sources(lane, lo, hi), self.counts(lane, lo), self.counts(lane, hi)
        return [
            Run(np.flatnonzero(sources == number), *_samples(order, lane, int(first), int(end)))
            for number, (order, first, end) in enumerate(zip(self._orders, firsts, ends, strict=True))
        ]

    def _begin_of(self, lane: int) -> int:
        """Return the place of its turn at which a lane begins."""
        assert 0 <= lane < self.num_lanes, f"no lane {lane} of {self.num_lanes}"
        return lane * self._turn // self.num_lanes

    def _count_to(self, place: int) -> Int64s:
        turns, rest = divmod(place, self._turn)
        counts: Int64s = turns * self._before[-1] + self._before[rest]
        return counts


def shares_of(weights: Sequence[float], turn: int = 1000) -> tuple[int, ...]:
    """Return whole shares that add up to `turn`, each as near to its weight as that allows; none is 0.

    Raises ValueError if a weight is not a positive number, or if there are more weights than places.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"weights must be positive numbers: {list(weights)}")
    if len(weights) > turn:
        raise ValueError(f"{len(weights)} sources do not fit into a turn of {turn} places")
    total = sum(weights)
    exact = [weight / total * turn for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) != turn:
        step = 1 if sum(shares) < turn else -1
        changeable = [number for number, share in enumerate(shares) if share + step >= 1]
        missing = [step * (exact[number] - shares[number]) for number in changeable]
        shares[changeable[missing.index(max(missing))]] += step
    return tuple(shares)


def _turn_of(shares: Sequence[int]) -> Int64s:
    """Return the source of each place of a turn."""
    sources: Int64s = np.repeat(np.arange(len(shares), dtype=np.int64), shares)
    each = np.concatenate([np.arange(share, dtype=np.int64) for share in shares])
    # Fractions, so that no rounding decides; of equal ones the source with the smaller number comes first.
    stands = [Fraction(2 * int(k) + 1, 2 * shares[source]) for k, source in zip(each, sources, strict=True)]
    return sources.take(sorted(range(len(sources)), key=lambda at: (stands[at], at)))


def _samples(order: Order, lane: int, lo: int, hi: int) -> tuple[Int64s, Int64s]:
    """Return epochs and ids of the samples that a source's lane has at [lo, hi), counted through all its epochs."""
    first, end = order.lane_bounds(lane)
    size = end - first
    epochs, ids = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    while lo < hi:
        epoch, offset = divmod(lo, size)
        until = min(size, offset + hi - lo)
        ids.append(order.epoch(epoch).ids(lane, offset, until))
        epochs.append(np.full(until - offset, epoch, dtype=np.int64))
        lo += until - offset
    return np.concatenate(epochs), np.concatenate(ids)
