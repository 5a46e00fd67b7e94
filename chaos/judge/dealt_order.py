"""Compute the samples that all lanes have applied by a step of an epoch, from docs/arithmetic.md alone.

Valid for one dataset without length bucketing. Commits in the middle of an epoch must have matching coverage sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint64]
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8


def mix(x: Ids) -> Ids:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class DealtOrder:
    """The sample order of a job: rows per row group, lanes, row groups per block, seed."""

    rows: tuple[int, ...]
    num_lanes: int
    block: int
    seed: int

    def ids_before(self, epoch: int, offset: int) -> Ids:
        """Return the ids at the first `offset` positions of every lane in an epoch."""
        return np.concatenate([self._of_lane(epoch, lane, offset) for lane in range(self.num_lanes)])

    def _of_lane(self, epoch: int, lane: int, most: int) -> Ids:
        line, starts = _line_of(self, epoch)
        begin, end = lane * len(line) // self.num_lanes, (lane + 1) * len(line) // self.num_lanes
        last, found, num_found = bisect_right(starts, end - 1), [np.empty(0, np.uint64)], 0
        for number, place in enumerate(range(bisect_right(starts, begin) - 1, last, self.block)):
            if num_found >= most or begin == end:
                break
            lo, hi = max(begin, starts[place]), min([end, *starts[place + self.block : place + self.block + 1]])
            key = _derive(self.seed, epoch, 2, lane, number)
            found.append(line[lo:hi][_permute(np.arange(hi - lo, dtype=np.uint64), hi - lo, key)])
            num_found += hi - lo
        return np.concatenate(found)[:most]


@lru_cache(8)
def _line_of(order: DealtOrder, epoch: int) -> tuple[Ids, list[int]]:
    """Return all ids in the order of an epoch's row groups, and the start of each group."""
    groups = _groups_in_line(len(order.rows), order.num_lanes, order.block, _derive(order.seed, epoch, 1))
    first = [0, *accumulate(order.rows)]
    line = np.concatenate([np.arange(first[group], first[group + 1], dtype=np.uint64) for group in groups])
    return line, [0, *accumulate(order.rows[group] for group in groups)]


def _groups_in_line(num: int, lanes: int, block: int, key: int) -> list[int]:
    turns = [(place - -(-(place * lanes // num) * num // lanes)) // block for place in range(num)]
    counts = Counter(turns)
    sizes = [counts[turn] for turn in range(max(turns) + 1)]
    drawn = _permute(np.arange(sizes[0], dtype=np.uint64), sizes[0], _derive(key, 1)).tolist()
    lengths = [sum(size > each for size in sizes) for each in drawn]
    dealt = _sorted([row for row, length in enumerate(lengths) for _ in range(length)], _derive(key, 2))
    turn_of = dict(zip(dealt, (turn for length in lengths for turn in range(length)), strict=True))
    groups = _sorted([turn_of[group] for group in range(num)], _derive(key, 3))
    places = sorted(range(num), key=lambda place: (turns[place], place))
    return [group for _, group in sorted(zip(places, groups, strict=True))]


def _sorted(classes: Sequence[int], key: int) -> list[int]:
    """Return the indices sorted by class; within a class in an order drawn from the key."""
    shift = 2 * len(classes).bit_length()
    drawn = [mixed >> shift for mixed in mix(np.arange(len(classes), dtype=np.uint64) ^ np.uint64(key)).tolist()]
    return sorted(range(len(classes)), key=lambda index: (classes[index], drawn[index], index))


def _derive(*words: int) -> int:
    key = 0
    for word in words:
        key = _mix_one((key + _GOLDEN & _WORD) ^ _mix_one(word + _GOLDEN & _WORD))
    return key


def _mix_one(word: int) -> int:
    return int(mix(np.array([word], np.uint64))[0])


def _permute(x: Ids, num: int, key: int) -> Ids:
    """Return the Feistel permutation of [0, num), by cycle walking."""
    if num <= 1:
        return np.zeros_like(x)
    bits = max(2, (num - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    keys = [np.uint64(_derive(key, each)) for each in range(_ROUNDS)]
    found, left = x.copy(), np.arange(len(x))
    while left.size:
        low, high = found[left] & low_mask, found[left] >> low_bits
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            high = high ^ (mix(low + even) & high_mask)
            low = low ^ (mix(high + odd) & low_mask)
        found[left] = (high << low_bits) + low
        left = left[found[left] >= num]
    return found
