"""Coverage sums: three integers that prove which samples were applied, whatever the order and the world.

Every applied sample adds 1 to a count and its id, mixed in two independent ways, to two sums modulo 2^64. Addition
commutes, so ranks and lanes may add in any order. At an epoch's end the sums must equal the closed form over
[0, num_samples); a repeat and a skip can cancel only if both mixed sums collide at once (about 2^-128).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import mix64_array

_MASK = (1 << 64) - 1
_SALT_A, _SALT_B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class CoverageSums:
    """Number of applied samples, and the two sums of their mixed ids, modulo 2^64.

    Sums add and subtract, so those of ranks, lanes and steps combine in any order. After a whole epoch they equal
    `CoverageSums.of_all(num_samples)`, or a sample was repeated or skipped.
    """

    count: int = 0
    sum_a: int = 0
    sum_b: int = 0

    def __str__(self) -> str:
        return f"{self.count:,} (sums {self.sum_a:016x} {self.sum_b:016x})"

    def __add__(self, other: CoverageSums) -> CoverageSums:
        return CoverageSums(
            self.count + other.count, (self.sum_a + other.sum_a) & _MASK, (self.sum_b + other.sum_b) & _MASK
        )

    def __sub__(self, other: CoverageSums) -> CoverageSums:
        return CoverageSums(
            self.count - other.count, (self.sum_a - other.sum_a) & _MASK, (self.sum_b - other.sum_b) & _MASK
        )

    def __mul__(self, times: int) -> CoverageSums:
        return CoverageSums(self.count * times, (self.sum_a * times) & _MASK, (self.sum_b * times) & _MASK)

    @classmethod
    def of_ids(cls, ids: Int64s) -> CoverageSums:
        """Sum over the given sample ids, repeats included."""
        words = ids.astype(np.uint64)
        sum_a = int(mix64_array(words + _SALT_A).sum(dtype=np.uint64))
        sum_b = int(mix64_array(mix64_array(words ^ _SALT_B) + _SALT_B).sum(dtype=np.uint64))
        return cls(int(words.size), sum_a, sum_b)

    @classmethod
    def of_all(cls, num_samples: int) -> CoverageSums:
        """Return what one whole epoch must add: the sum over [0, num_samples)."""
        return cls.of_range(0, num_samples)

    @classmethod
    def of_range(cls, lo: int, hi: int) -> CoverageSums:
        """Return the sum over the ids [lo, hi), in constant memory."""
        total = cls()
        for first in range(lo, hi, _CHUNK):
            total += cls.of_ids(np.arange(first, min(first + _CHUNK, hi), dtype=np.int64))
        return total
