"""One lane through the stages of a cell, whose gradients are looked at and added to nothing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.core.schedules import Pass
from elastic_train.job.cells.stage import Stage
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.cells.pipeline import run_schedule
from elastic_train.tasks.task import Batch


def sums_of_stage(
    stage: Stage, plan: Plan, state: AppliedState, key: Hashable, batch: Batch, parameters: Sequence[nn.Parameter]
) -> list[int]:
    """Return the checksum of each parameter's gradient, 0 for what other stages have; all stages of the cell call it.

    `key` is that of lanes with micro-batches of such shapes.
    """
    passes = _Passes(stage, plan, state, key, batch, parameters)
    run_schedule(stage.actions(1), stage.links, passes)
    stage.links.finish()
    return passes.sums


class _Passes:
    """The passes of the lane."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        state: AppliedState,
        key: Hashable,
        batch: Batch,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._stage, self._plan, self._scaler = stage, plan, state.scaler
        self._key, self._batch, self._parameters = key, batch, parameters
        self._given: dict[int, Tensor] = {}
        self.sums = [0] * len(parameters)

    def key(self, number: int) -> Hashable | None:
        return self._key

    def forward(self, one: Pass, given: Tensor | None) -> Tensor:
        if given is not None:
            self._given[one.chunk] = given
        with self._plan.autocast():
            made = self._stage.run(one.chunk, self._batch, given)
        return made if isinstance(made, Tensor) else self._scaler.scale(made.total)

    def backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        given = self._given.pop(one.chunk, None)
        if not made.requires_grad:  # a first stage of which nothing is trained
            return
        inputs = [*self._parameters, *([] if given is None else [given])]
        found = torch.autograd.grad(made, inputs, gradient, allow_unused=True)
        for number in range(len(self._parameters)):
            if (own := found[number]) is not None:
                self.sums[number] = checksum(own)
        if given is not None:
            given.grad = found[-1]

    def left_out(self, one: Pass) -> None:
        """The lane has samples."""

    def waited(self) -> None: ...
