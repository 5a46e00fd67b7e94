"""One lane through the stages of a cell, whose gradients are looked at and added to nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.core.schedules import Pass
from elastic_train.job.cells.stage import Stage
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.cells.expert_links import Leaf
from elastic_train.parallel.cells.pipeline import run_schedule
from elastic_train.tasks.task import Batch, ContextPart


def sums_of_stage(
    stage: Stage,
    plan: Plan,
    state: AppliedState,
    key: Hashable | None,
    batch: Batch | None,
    parameters: Sequence[nn.Parameter],
    part: ContextPart | None = None,
    crew: int = 0,
) -> list[int]:
    """Return the checksum of each parameter's gradient, 0 for what other stages have; all stages of the cell call it.

    `key` is that of lanes with micro-batches of such shapes, `part` the rank's part of its rows. Without a batch, what
    the lane of another `crew` gives to this rank's experts.
    """
    passes = _Passes(stage, plan, state, key, batch, parameters, part, crew)
    run_schedule(stage.actions(1), stage.links, passes)
    stage.links.finish()
    return passes.sums


def look_at(leaf: Leaf, parameters: Sequence[nn.Parameter], sums: list[int]) -> None:
    """Note the checksums of a lane's gradients of experts, by parameter."""
    for number, one in enumerate(parameters):
        if (gradient := leaf.get(id(one))) is not None:
            sums[number] = checksum(gradient)


class _Passes:
    """The passes of the lane."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        state: AppliedState,
        key: Hashable | None,
        batch: Batch | None,
        parameters: Sequence[nn.Parameter],
        part: ContextPart | None = None,
        crew: int = 0,
    ) -> None:
        self._stage, self._plan, self._scaler = stage, plan, state.scaler
        self._key, self._batch, self._parameters = key, batch, parameters
        self._part, self._crew = part, crew
        self._given: dict[int, Tensor] = {}
        self.sums = [0] * len(parameters)

    def key(self, number: int) -> Hashable | None:
        return self._key

    def forward(self, one: Pass, given: Tensor | None) -> Tensor:
        if given is not None:
            self._given[one.chunk] = given
        assert self._batch is not None, "it has samples"
        with self._plan.autocast(), self._stage.passing(one, trains=True):
            made = self._stage.run(one.chunk, self._batch, given, self._part)
        return made if isinstance(made, Tensor) else self._scaler.scale(made.total)

    def backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        with self._seeing_experts(one):
            self._backward(one, made, gradient)

    def _backward(self, one: Pass, made: Tensor, gradient: Tensor | None) -> None:
        given = self._given.pop(one.chunk, None)
        if not made.requires_grad:  # a first stage of which nothing is trained
            return
        anchors = [self._stage.experts[one.chunk].anchor] if self._stage.experts else []
        inputs = [*self._parameters, *anchors, *([] if given is None else [given])]
        found = torch.autograd.grad(made, inputs, gradient, allow_unused=True)
        for number in range(len(self._parameters)):
            if (own := found[number]) is not None:
                self.sums[number] = checksum(own)
        if given is not None:
            given.grad = found[-1]

    def left_out(self, one: Pass) -> None:
        """Take part in what another crew does with its lane."""
        with self._stage.passing(one, trains=True) if one.direction == "forward" else self._seeing_experts(one):
            pass

    @contextlib.contextmanager
    def _seeing_experts(self, one: Pass) -> Iterator[None]:
        """Look at what the backward pass inside, or another crew's beside it, gives to this rank's experts."""
        if not self._stage.experts:
            yield
            return
        links = self._stage.experts[one.chunk]
        with links.backward_pass(one.number):
            yield
        look_at(links.take_leaves()[self._crew], self._parameters, self.sums)

    def waited(self) -> None: ...
