"""The applied state: all that an optimizer step changes, one unit that moves from step s to s+1, never between.

Weights, optimizer, scheduler, scaler, cursor, coverage sums and step are saved, restored and handed over together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from elastic_train.checkpoint.format.layout import State
from elastic_train.config.schema import OptimizerConfig
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.lineage import Interval, extend
from elastic_train.core.order import Cursor
from elastic_train.job.parameter_groups import build_groups, describe_groups
from elastic_train.job.state_shards import ReplicatedState, StateShards
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
    shards: StateShards
    reached: Reached = field(default_factory=Reached)

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
        norm = self.shards.clip(limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        for buffer, value in buffers:
            buffer.copy_(value)
        self.reached = self.reached.advance(cursor, coverage, term, account)
        return float(norm)

    def restore(self, fill: Callable[[State], None], reached: Reached, *, keeps_rates: bool = False) -> None:
        """Take over what was saved at a place, as `fill` reads it back into what is held; see `StateShards.take`."""
        self.shards.take(fill, keeps_rates=keeps_rates)
        self.reached = reached


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
    shards = ReplicatedState(model, optimizer, scheduler, scaler)
    return AppliedState(model, optimizer, scheduler, scaler, config.clip_norm, shards)


def rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return what the learning rate is multiplied by in a step counted from 0: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
