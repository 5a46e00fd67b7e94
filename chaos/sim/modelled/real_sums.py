"""Sums of a step with a real model: gradients by the product's own sum, counts by the simulator's.

There is no backward pass: a lane sets its gradients directly, and exchanges that would overlap with the pass happen at
the lane's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled.tiny_model import TinyModel
from chaos.sim.modelled.training import SampleCounts
from elastic_train.core.arrays import Int64s
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group


class RealSum(SampleCounts):
    """Stand-in for `GradientSum`: the sum of the state's shards, plus the lanes' samples."""

    def __init__(self, state: AppliedState, owners: SimGroup, column: Group, num_lanes: int) -> None:
        model = state.model
        assert isinstance(model, TinyModel), "the one real model that is simulated"
        super().__init__(len(model.counts), owners)
        self._model, self._sum = model, state.shards.sum_of(owners, num_lanes, column=column)

    def begin(self) -> None:
        super().begin()
        self._sum.begin()

    def turn(self, leaf: int | None, tree: int = 0) -> contextlib.AbstractContextManager[None]:
        return self._sum.turn(leaf, tree)

    def add(self, ids: Int64s) -> None:
        super().add(ids)
        self._model.add_gradient(tuple(ids.tolist()))

    def finish(self, divisor: float) -> None:
        self._model.gradient = self.counted()
        self._sum.finish(divisor)


class CountedBuffers:
    """Stand-in for `BufferMean`: buffers derived from a step's counts."""

    has_changed = False
    is_tracking = True

    def __init__(self, state: AppliedState) -> None:
        self._state = state

    def begin(self) -> None: ...
    def restore(self) -> None: ...

    def lane(self, lane: int, *, is_empty: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def untouched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, digests: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        model = self._state.model
        assert isinstance(model, TinyModel), "the one real model that is simulated"
        return model.counted(self._state.step)
