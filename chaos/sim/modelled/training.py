"""What is modelled because it would be tensors: the model, its gradient, and the samples' bytes.

The state is a hash that every step folds the applied samples' ids into (in any order, since lanes add up), and the
witness's counts, one for every sample. Equal hashes at the end are equal weights; the counts need no trust in anything.
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
from elastic_train.core.arrays import Int64s
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.keyed_random import derive, mix64
from elastic_train.core.lanes import contiguous
from elastic_train.parallel.gradient_sum import make_sum

T = TypeVar("T")
_MASK = (1 << 64) - 1
CUT_DIMS = {"digest": 0}
"""The tensor that is cut in cells."""
_NO_NORM = torch.tensor(0.0)
WORDS = 2
"""How many words a digest has: an int64 holds no 64 bits without a sign."""
VECTOR = 7
"""How long the lanes' vectors are: no number of ranks cuts them evenly."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a step adds: how often each sample is in it, and the sum of its lanes' hashes."""

    counts: Int64s
    digest: int
    bits: int = 0
    """A checksum of the mean of the lanes' vectors, where the job has them."""


@dataclass
class Weights:
    """The modelled weights, and the gradient that the next step adds.

    They have as many parts as a cell has places, each a digest of its own, of two words; `parts` are those that are
    held of `size`, and everybody holds the counts.
    """

    counts: Int64s
    words: Int64s = field(default_factory=lambda: np.zeros(WORDS, np.int64))
    gradient: Gradient | None = None
    parts: range = range(1)
    size: int = 1
    dtype: ClassVar = torch.float32
    device: ClassVar = torch.device("cpu")

    def advance(self, step: int) -> None:
        """Add the gradient, which no part has as another."""
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
    """The lanes' samples, and the commutative sum of their hashes."""

    def __init__(self, num_rows: int, group: SimGroup) -> None:
        self._num_rows, self._group = num_rows, group
        self._ids: list[Int64s] = []

    def begin(self) -> None:
        self._ids = []

    def add(self, ids: Int64s) -> None:
        self._ids.append(ids)

    def counted(self) -> Gradient:
        """Return what all ranks' lanes add up to."""
        return self._group.fold(tuple(self._ids), self._add)

    def _add(self, parts: list[object]) -> Gradient:
        ids = [ids for part in parts if isinstance(part, tuple) for ids in part]
        counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *ids]), minlength=self._num_rows)
        return Gradient(counts, sum(hash_of(tuple(some.tolist())) for some in ids) & _MASK)


class ModelledSum(SampleCounts):
    """What `GradientSum` is, of samples alone."""

    def __init__(self, weights: Weights, group: SimGroup) -> None:
        super().__init__(len(weights.counts), group)
        self._weights = weights

    def turn(self, leaf: int | None, tree: int = 0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, divisor: float) -> None:
        self._weights.gradient = self.counted()


class VectorSum(ModelledSum):
    """The same, and beside it the product's own sum of short vectors, one of each lane, along the tree of lanes.

    Their floats do not add up to the same bits in another order, so a wrong tree, or a wrong cut, is another hash.
    """

    def __init__(self, weights: Weights, group: SimGroup, num_lanes: int) -> None:
        super().__init__(weights, group)
        self._flat = torch.zeros(VECTOR)
        self._sum = make_sum("canonical", [self._flat], group, contiguous(group.size, num_lanes))

    def begin(self) -> None:
        super().begin()
        self._sum.begin()

    def turn(self, leaf: int | None, tree: int = 0) -> contextlib.AbstractContextManager[None]:
        return self._sum.turn(leaf, tree)

    def add(self, ids: Int64s) -> None:
        super().add(ids)
        self._flat += _vector_of(tuple(ids.tolist()))

    def finish(self, divisor: float) -> None:
        super().finish(divisor)
        self._sum.finish(divisor)
        assert self._weights.gradient is not None, "summed just now"
        bits = zlib.crc32(self._flat.numpy().tobytes())
        self._weights.gradient = replace(self._weights.gradient, bits=bits)


@lru_cache(1 << 12)
def _vector_of(ids: tuple[int, ...]) -> torch.Tensor:
    """Return a lane's vector: floats between 2^-8 and 2^8 that follow from its samples."""
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
