"""The applied state: all that an optimizer step changes, one unit that moves from step s to s+1, never between.

Weights, optimizer, scheduler, scaler, cursor, coverage sums and step are saved, restored and handed over together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.state_tree import StatePath
from elastic_train.config.schema import OptimizerConfig
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lineage import Interval, extend
from elastic_train.core.order import Cursor
from elastic_train.job.parameter_groups import build_groups, describe_groups, regroup
from elastic_train.tasks.task import ParameterGroup


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a state has come: its place in the data, the terms that applied its steps, what it was last worth."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    coverage: CoverageSums = field(default_factory=CoverageSums)
    intervals: tuple[Interval, ...] = ()
    validation: Mapping[str, float | None] = field(default_factory=dict)
    account: SampleAccount = field(default_factory=SampleAccount)

    @property
    def term(self) -> int:
        """The term that applied the last step; 0 before the first."""
        return self.intervals[-1].term if self.intervals else 0

    def advance(self, cursor: Cursor, coverage: CoverageSums, term: int, account: SampleAccount) -> Reached:
        """Return the place one step further."""
        intervals, total = extend(self.intervals, term, self.step, self.step + 1), self.coverage + coverage
        if cursor.epoch > self.cursor.epoch:
            account = account.end_epoch(total)
        return Reached(self.step + 1, cursor, total, intervals, self.validation, account)


@dataclass(slots=True)
class AppliedState:
    """Everything that `apply` changes."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler
    clip_norm: float | None
    reached: Reached = field(default_factory=Reached)
    _named: tuple[tuple[object, ...], Mapping[str, object], dict[str, Any]] | None = None

    @property
    def step(self) -> int:
        return self.reached.step

    @property
    def cursor(self) -> Cursor:
        return self.reached.cursor

    @property
    def coverage(self) -> CoverageSums:
        return self.reached.coverage

    @property
    def grouping(self) -> Sequence[str]:
        """What tells the optimizer's parameter groups from another rank's, one line each."""
        return describe_groups(self.model, self.optimizer)

    def apply(
        self,
        cursor: Cursor,
        coverage: CoverageSums,
        term: int,
        account: SampleAccount,
        buffers: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> float:
        """Take one optimizer step of a term with the reduced gradients in place; return their norm.

        `coverage` are the step's own sums, `account` is what is known of all samples once it is applied, `buffers` are
        pairs of a buffer and what the step's forward passes have made of it.

        Clipping and the scaler's decision read reduced values only, so every rank decides alike. A step whose fp16
        gradients overflowed leaves the weights alone and still counts as applied: its samples are spent.
        """
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.clip_norm is None else self.clip_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        for buffer, value in buffers:
            buffer.copy_(value)
        self.reached = self.reached.advance(cursor, coverage, term, account)
        return float(norm)

    def tensors(self) -> State:
        """Return the saved part as a nested dict, parameters by their full names; its tensors are the live ones."""
        held = tuple(self._held())
        if self._named is None or held != self._named[0]:
            # Naming takes longer than all else that a save does at a step boundary, and holds while the tensors do.
            moments = dict(get_optimizer_state_dict(self.model, self.optimizer))
            self._named = (held, get_model_state_dict(self.model), moments)
        _, model, optimizer = self._named
        groups = zip(optimizer["param_groups"], self.optimizer.param_groups, strict=True)
        current = [{**named, **{key: live[key] for key in named if key != "params"}} for named, live in groups]
        return {
            "model": dict(model),
            "optimizer": {**optimizer, "param_groups": current},
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def _held(self) -> Iterator[object]:
        """Yield where the memory of every saved tensor is, and the other values of the optimizer's state."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            yield tensor.data_ptr()
        for values in self.optimizer.state.values():
            for value in values.values():
                yield value.data_ptr() if isinstance(value, Tensor) else value

    def stillness(self) -> Callable[[StatePath], bool]:
        """Return whether `apply` alone changes the tensor at a path of `tensors`; others a forward pass may change."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return lambda path: path[0] == "optimizer" or (path[0] == "model" and path[1] in parameters)

    def restore(self, fill: Callable[[State], None], reached: Reached, *, keeps_rates: bool = False) -> None:
        """Take over what `tensors` saved and `fill` reads back; gradients must be bound to buffers anew afterwards.

        With `keeps_rates` learning rate, betas, decay and parameter groups stay those that the state was built with: a
        configuration or a task may have changed since what it takes over was saved.
        """
        own = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        bases = [float(base) for base in self.scheduler.base_lrs]
        for parameter in self.model.parameters():
            parameter.grad = None  # torch does not prepare an optimizer's state while there are gradients
        tensors: State = {"model": get_model_state_dict(self.model), "optimizer": {}, "scheduler": {}, "scaler": {}}
        fill(tensors)
        set_model_state_dict(self.model, tensors["model"])  # type: ignore[arg-type]
        optimizer = regroup(tensors["optimizer"], self.model, self.optimizer) if keeps_rates else tensors["optimizer"]  # type: ignore[arg-type]
        set_optimizer_state_dict(self.model, self.optimizer, optimizer)  # type: ignore[arg-type]
        self.scheduler.load_state_dict(tensors["scheduler"])  # type: ignore[arg-type]
        if tensors["scaler"]:
            self.scaler.load_state_dict(tensors["scaler"])  # type: ignore[arg-type]
        if keeps_rates:
            self._set_rates(own, bases)
        self.reached, self._named = reached, None

    def _set_rates(self, settings: Sequence[Mapping[str, Any]], bases: Sequence[float]) -> None:
        """Give the parameter groups their settings, and the rates that follow from `bases` at the scheduler's step."""
        step, factors = self.scheduler.last_epoch, self.scheduler.lr_lambdas
        rates = [base * factor(step) for base, factor in zip(bases, factors, strict=True)]
        for group, own, rate in zip(self.optimizer.param_groups, settings, rates, strict=True):
            group.update({**own, "lr": rate})
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), "base_lrs": list(bases), "_last_lr": rates})


def build_state(
    model: nn.Module,
    config: OptimizerConfig,
    total_steps: int,
    device: str,
    is_fp16: bool,
    groups: Sequence[ParameterGroup] = (),
) -> AppliedState:
    """Build optimizer, schedule and scaler around a model that is on its device; freezes what `groups` say.

    Raises ConfigError if the groups do not fit the model.
    """
    built = build_groups(model, groups, config)
    if config.name == "sgd":
        optimizer: Optimizer = torch.optim.SGD(built, lr=config.lr, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.AdamW(built, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    scheduler = LambdaLR(optimizer, lambda step: rate_factor(step, config, total_steps))
    scaler = torch.amp.GradScaler(device, enabled=is_fp16)
    return AppliedState(model, optimizer, scheduler, scaler, config.clip_norm)


def rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return what the learning rate is multiplied by in a step counted from 0: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
