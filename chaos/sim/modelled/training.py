"""What is modelled because it would be tensors: the model, its gradient, and the samples' bytes.

The state is a hash that every step folds the applied samples' ids into (in any order, since lanes add up), and the
witness's counts, one for every sample. Equal hashes at the end are equal weights; the counts need no trust in anything.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import ClassVar, TypeVar

import numpy as np
import torch

from chaos.sim.machine.rank_group import SimGroup
from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.core.arrays import Int64s
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.keyed_random import derive, mix64
from elastic_train.core.lanes import Assignment, contiguous
from elastic_train.core.order import Cursor
from elastic_train.job.state import Reached, StepFacts
from elastic_train.job.state_shards import Place
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
    held, and everybody holds the counts.
    """

    counts: Int64s
    words: Int64s = field(default_factory=lambda: np.zeros(WORDS, np.int64))
    gradient: Gradient | None = None
    parts: range = range(1)
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

    def named_modules(self) -> Iterator[tuple[str, Weights]]:
        """There are no buffers."""
        yield from ()


class Rate:
    """What stands for a learning rate's schedule."""

    def get_last_lr(self) -> list[float]:
        return [1.0]


@dataclass
class ModelledState:
    """What `elastic_train.job.state.AppliedState` is to its users."""

    model: Weights
    reached: Reached = field(default_factory=Reached)
    scheduler: Rate = field(default_factory=Rate)
    outline: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recipe: None = None
    changes: None = None
    compiled: None = None
    layout: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(dims=CUT_DIMS))

    @property
    def step(self) -> int:
        return self.reached.step

    @property
    def place(self) -> Place:
        return Place(self.reached.step, self.reached.term)

    @property
    def cursor(self) -> Cursor:
        return self.reached.cursor

    @property
    def coverage(self) -> CoverageSums:
        return self.reached.coverage

    def measure(self) -> torch.Tensor:
        return _NO_NORM

    def apply(self, facts: StepFacts, norm: torch.Tensor) -> None:
        is_finite = math.isfinite(facts.loss)
        if is_finite:
            self.model.advance(self.step)
        self.model.gradient = None
        self.reached = self.reached.advance(facts, float(norm), is_finite=is_finite, is_skipped=not is_finite)

    @property
    def shards(self) -> ModelledState:
        return self

    def assigned(self, num_replicas: int, num_lanes: int) -> Assignment:
        return contiguous(num_replicas, num_lanes)

    def refresh(self, group: SimGroup) -> None:
        """Every rank has updated everything."""

    def norm_of(self, gathered: torch.Tensor) -> torch.Tensor:
        return _NO_NORM

    def norm_alone(self, measured: torch.Tensor) -> torch.Tensor:
        return _NO_NORM

    def assign(self, writers: Sequence[int]) -> Sequence[int]:
        """Any rank can write anything."""
        return writers

    def stand_alone(self) -> bool:
        return True

    def is_taken_along(self, leaving: Sequence[bool]) -> bool:
        return all(leaving)

    def weights(self) -> Mapping[str, object]:
        return self.model.state_dict()

    def outlined(self) -> Mapping[str, object]:
        return self.model.state_dict()

    def turns(self, group: SimGroup, items: Iterator[T]) -> Iterator[T]:
        return items

    def digest(self, group: SimGroup) -> str:
        return self.digest_alone()

    def digest_alone(self) -> str:
        return weights_digest(self.model, CUT_DIMS)  # type: ignore[arg-type]  # it has the one method that counts

    def check_copies(self, group: SimGroup, step: int) -> None:
        """All weights are whole on every rank."""

    def make_whole(self, group: SimGroup) -> None:
        """They are."""

    def held(self) -> State:
        """Return the saved part; its tensors are the live ones."""
        return {"model": self.model.state_dict()}

    def to_save(self) -> State:
        return self.held()

    def stillness(self) -> Callable[[StatePath], bool]:
        """Only `apply` changes anything."""
        return lambda path: True

    def restore(self, fill: Callable[[State], None], reached: Reached, *, keeps_rates: bool = False) -> None:
        tree = self.held()
        fill(tree)
        model = tree["model"]
        assert isinstance(model, dict), "as it was saved"
        self.model.words, self.model.counts = model["digest"].numpy().copy(), model["counts"].numpy().copy()
        self.reached = reached


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
