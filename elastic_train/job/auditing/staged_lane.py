"""Run one lane through the pipeline stages and record its gradients without accumulating them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.job.cells.stage import Stage
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.cells.expert_links import Leaf
from elastic_train.parallel.cells.pipeline import Passes, run_program
from elastic_train.program.schedules import Pass
from elastic_train.tasks.task import Batch


def look_at(leaf: Leaf, parameters: Sequence[nn.Parameter], sums: list[int]) -> None:
    """Record the checksums of a lane's expert gradients, by parameter."""
    for number, one in enumerate(parameters):
        if (gradient := leaf.get(id(one))) is not None:
            sums[number] = checksum(gradient)


@dataclass(slots=True)
class StagedLane(Passes):
    """The passes of one lane in a stage; all stages of the replica run theirs.

    `lane` is the shape key of the micro-batch. Without a batch, run only this rank's experts, for the lane of compute
    group `crew`.
    """

    stage: Stage
    plan: Plan
    state: AppliedState
    lane: Hashable | None
    batch: Batch | None
    parameters: Sequence[nn.Parameter]
    crew: int = 0
    sums: list[int] = field(init=False)
    """Checksum of each parameter's gradient; 0 for parameters of other stages."""
    _given: dict[int, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = [0] * len(self.parameters)

    def run(self) -> list[int]:
        """Run all passes and return the checksums."""
        run_program(self.stage.actions(1), self.stage.links, self)
        return self.sums

    def key(self, number: int) -> Hashable | None:
        return self.lane

    def forward(self, one: Pass, given: Tensor | None) -> Tensor | None:
        if given is not None:
            self._given[one.chunk] = given
        with self.stage.passing(one, trains=True):
            if self.batch is None:
                return None
            with self.plan.autocast():
                made = self.stage.run(one.chunk, self.batch, given)
        return made if isinstance(made, Tensor) else self.state.scaler.scale(made.total)

    def backward(self, one: Pass, made: Tensor | None, gradient: Tensor | None) -> None:
        with self._seeing_experts(one):
            if made is not None:
                self._backward(one, made, gradient)

    def _backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        given = self._given.pop(one.chunk, None)
        if not made.requires_grad:  # the first stage has no trained parameters
            return
        anchors = [self.stage.experts[one.chunk].anchor] if self.stage.experts else []
        inputs = [*self.parameters, *anchors, *([] if given is None else [given])]
        found = torch.autograd.grad(made, inputs, gradient, allow_unused=True)
        for number in range(len(self.parameters)):
            if (own := found[number]) is not None:
                self.sums[number] = checksum(own)
        if given is not None:
            given.grad = found[-1]

    @contextlib.contextmanager
    def _seeing_experts(self, one: Pass) -> Iterator[None]:
        """Record the gradients that the backward pass inside, or another compute group's, gives this rank's experts."""
        with self.stage.passing(one, trains=True):
            yield
        if self.stage.experts:
            look_at(self.stage.experts[one.chunk].take_leaves()[self.crew], self.parameters, self.sums)
