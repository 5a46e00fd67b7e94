"""A step's sums where a real model is trained: gradients by the product's own sum, counts by the simulator's.

Nothing is differentiated: a lane leaves its gradients as a backward pass would. What the product exchanges during that
pass, it exchanges at the lane's end then.
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


class RealSum(SampleCounts):
    """What `GradientSum` is: that of the state's shards, and beside it the samples of the lanes."""

    def __init__(self, state: AppliedState, group: SimGroup, num_lanes: int) -> None:
        model = state.model
        assert isinstance(model, TinyModel), "the one real model that is simulated"
        super().__init__(len(model.counts), group)
        self._model, self._sum = model, state.shards.sum_of(group, num_lanes)

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
    """What `BufferMean` is to its users: buffers that a step changes by what was counted of it."""

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
