"""Models of the model, its gradient and the samples' bytes.

The state is a hash into which every step folds the applied samples' ids (in any order, since lanes add up), and the
witness's count of every sample. Equal final hashes mean equal weights; the counts are independent evidence.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, TypeVar

import numpy as np
import torch

from chaos.sim.machine.rank_group import SimGroup
from elastic_train.core.accounting import CoverageSums
from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import derive, mix64
from elastic_train.core.lanes import contiguous
from elastic_train.parallel.gradient_sum import GradientSum, make_sum

T = TypeVar("T")
_MASK = (1 << 64) - 1
CUT_DIMS = {"digest": 0}
"""The tensor that cells split."""
WORDS = 2
"""Words per digest: an int64 cannot hold 64 unsigned bits."""
VECTOR = 7
"""Length of the lanes' vectors: no number of ranks divides it."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A step's contribution: counts of each sample, and the sum of its lanes' hashes."""

    counts: Int64s
    digest: int
    bits: int = 0
    """A checksum of the mean of the lanes' vectors, if the job has them."""


@dataclass
class Weights:
    """The modelled weights, and the next step's gradient.

    They have one shard per place of a cell, each a digest of two words; `parts` are the held ones of `size`. Every rank
    holds the counts.
    """

    counts: Int64s
    words: Int64s = field(default_factory=lambda: np.zeros(WORDS, np.int64))
    gradient: Gradient | None = None
    parts: range = range(1)
    size: int = 1
    dtype: ClassVar = torch.float32
    device: ClassVar = torch.device("cpu")

    def advance(self, step: int) -> None:
        """Add the gradient, which changes each shard differently."""
        gradient = self.gradient
        assert gradient is not None, "a step has a gradient"
        self.counts += gradient.counts
        for at, part in enumerate(self.parts):
            low, high = self.words[WORDS * at : WORDS * (at + 1)].tolist()
            digest = derive(high << 32 | low, gradient.digest, step, gradient.bits + part)
            self.words[WORDS * at : WORDS * (at + 1)] = digest & 0xFFFFFFFF, digest >> 32

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": torch.from_numpy(self.counts), "digest": torch.from_numpy(self.words)}

    def parameters(self) -> Iterator[Weights]:
        yield self

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Weights]]:
        """Only an update changes what there is."""
        for name in self.state_dict():
            yield name, self

    def named_modules(self) -> Iterator[tuple[str, Weights]]:
        """There are no buffers."""
        yield from ()


class SampleCounts:
    """The lanes' samples, and the sum of their hashes; `product` is the product's own sum over the lanes, if any."""

    def __init__(self, num_rows: int, group: SimGroup, product: GradientSum | None = None) -> None:
        self._num_rows, self._group, self._sum = num_rows, group, product
        self._ids: list[Int64s] = []

    def begin(self) -> None:
        self._ids = []
        if self._sum is not None:
            self._sum.begin()

    def turn(self, leaf: int | None, tree: int = 0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._sum is None else self._sum.turn(leaf, tree)

    def finish(self, divisor: float) -> None:
        if self._sum is not None:
            self._sum.finish(divisor)

    def add(self, ids: Int64s) -> None:
        self._ids.append(ids)

    def counted(self) -> Gradient:
        """Return the sum over all ranks' lanes."""
        return self._group.fold(tuple(self._ids), self._add)

    def _add(self, parts: list[object]) -> Gradient:
        ids = [ids for part in parts if isinstance(part, tuple) for ids in part]
        counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *ids]), minlength=self._num_rows)
        return Gradient(counts, sum(hash_of(tuple(some.tolist())) for some in ids) & _MASK)


class ModelledSum(SampleCounts):
    """Stand-in for `GradientSum`, of samples only."""

    def __init__(self, weights: Weights, group: SimGroup, product: GradientSum | None = None) -> None:
        super().__init__(len(weights.counts), group, product)
        self._weights = weights

    def finish(self, divisor: float) -> None:
        self._weights.gradient = self.counted()
        super().finish(divisor)


class VectorSum(ModelledSum):
    """A sum of samples, plus the product's own sum of one short vector per lane, along the tree of lanes.

    Float addition depends on the order, so a wrong tree or cut gives another hash.
    """

    def __init__(self, weights: Weights, group: SimGroup, num_lanes: int) -> None:
        self._flat = torch.zeros(VECTOR)
        leaves = contiguous(group.size, num_lanes)
        super().__init__(weights, group, make_sum("canonical", [self._flat], group, leaves))

    def add(self, ids: Int64s) -> None:
        super().add(ids)
        self._flat += _vector_of(tuple(ids.tolist()))

    def finish(self, divisor: float) -> None:
        super().finish(divisor)
        assert self._weights.gradient is not None, "summed just now"
        bits = zlib.crc32(self._flat.numpy().tobytes())
        self._weights.gradient = replace(self._weights.gradient, bits=bits)


@lru_cache(1 << 12)
def _vector_of(ids: tuple[int, ...]) -> torch.Tensor:
    """Return a lane's vector: floats between 2^-8 and 2^8, derived from its samples."""
    words = [derive(hash_of(ids), place) for place in range(VECTOR)]
    return torch.tensor([2.0 ** (word % 16 - 8) * (1.0 + (word >> 8 & 0xFFFFFF) / (1 << 24)) for word in words])


@lru_cache(1 << 16)
def hash_of(ids: tuple[int, ...]) -> int:
    return sum(mix64(id_ + 1) for id_ in ids) & _MASK


def sums_of(ids: Int64s) -> CoverageSums:
    return _sums_of(tuple(ids.tolist()))


@lru_cache(1 << 19)
def _sums_of(ids: tuple[int, ...]) -> CoverageSums:
    return CoverageSums.of_ids(np.array(ids, np.int64))
