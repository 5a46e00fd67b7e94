"""The keys of a training recipe: optimizer, schedule, average of the weights, validation, early stopping."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from elastic_train.config.section import Section, Value
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest

OPTIMIZERS, SCHEDULES = ("adamw", "sgd", "adafactor", "muon"), ("constant", "linear", "cosine", "wsd")


def _named(value: str, known: Sequence[str], what: str) -> str:
    """Refuse what is neither a known name nor a dotted path."""
    if value not in known and not re.fullmatch(r"[\w.]+:\w+", value):
        meant = did_you_mean(nearest(value, known), "")
        raise ValueError(f"must be {', '.join(known)}, or {what} of your own, as module:name{meant}")
    return value


class EmaConfig(Section):
    decay: float = Field(default=0.999, gt=0, lt=1)
    """Weight, in the average, of what it was before a step; the step's weights have the rest. Steps in it: about
    1 / (1 - decay)."""


class OptimizerConfig(Section):
    name: str = "adamw"
    """Update rule: adamw, sgd, adafactor, muon (with AdamW for what is no hidden matrix), or a torch optimizer's class
    as module:Class."""
    options: dict[str, Value] = Field(default_factory=dict)
    """Other keyword arguments of the optimizer's class: {momentum: 0.9, nesterov: true} of sgd, {eps: 1e-6}; of muon
    those of torch.optim.Muon, and adamw_names, patterns of matrices that AdamW is to update."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, or L2 (sgd)."""
    decay_norms_and_biases: bool = False
    """Whether weight decay acts on biases, norms and all else of one dimension, too, where a task does not say so."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient of a step; null for no clipping."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises from 0, whatever the schedule."""
    on_nonfinite: Literal["fail", "skip", "keep"] = "fail"
    """If a step's loss or gradient is NaN or infinite. skip: leave out its update. fail: do so, and end with an error
    after nonfinite_limit steps in a row. keep: update with it all the same."""
    nonfinite_limit: PositiveInt = 10
    """With on_nonfinite: fail, how many steps in a row end training."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine or linear (falling to its end), constant, wsd (constant, then falling
    linearly: warm-up, stable, decay), or a function (step, total_steps) -> factor of your own as module:function."""
    schedule_steps: PositiveInt | None = None
    """Steps, warm-up included, after which the schedule is at its end; null for the job's own, max_steps or its epochs.
    Give it if the job is to end elsewhere, or later, without a change of its rates."""
    schedule_end: float = Field(default=0.0, ge=0, le=1)
    """What cosine, linear and wsd end with, as a share of lr."""
    cooldown_share: float = Field(default=0.2, gt=0, le=1)
    """With schedule: wsd, the share of the steps after the warm-up in which the rate falls."""
    ema: EmaConfig | None = None
    """Keep an exponential moving average of the weights, {decay: 0.999}, as a part of the state; null for none."""

    @field_validator("name")
    @classmethod
    def _is_an_optimizer(cls, name: str) -> str:
        return _named(name, OPTIMIZERS, "a class")

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, name: str) -> str:
        return _named(name, SCHEDULES, "a function")

    @field_validator("options")
    @classmethod
    def _are_others(cls, options: dict[str, Value]) -> dict[str, Value]:
        if own := sorted({"lr", "weight_decay", "params"} & set(options)):
            raise ValueError(f"'{own[0]}' is no option; lr and weight_decay are keys of optimizer")
        return options

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both must be at least 0 and less than 1")
        return betas


class EarlyStoppingConfig(Section):
    metric: str = "min loss"
    """What is to improve: 'min loss', 'max macro_f1', as in checkpoint.keep_best."""
    patience: PositiveInt = 5
    """How many validations in a row may pass without a better value; after the last of them training ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """By how much a value must be better than the best one to count."""

    @field_validator("metric")
    @classmethod
    def _names_a_best(cls, text: str) -> str:
        return checked_best(text)


class ValidationConfig(Section):
    every_steps: PositiveInt | None = 100
    """Validate every this many steps; null for only at the end."""
    max_samples: PositiveInt | None = None
    """Validate on the first this many samples only; null for all."""
    weights: Literal["trained", "ema"] = "trained"
    """Which weights are validated: those that are trained, or their average (optimizer.ema)."""
    early_stopping: EarlyStoppingConfig | None = None
    """End training once validations do not improve any more, {metric: min loss, patience: 5}; null to train to the
    end."""


def checked_best(text: str) -> str:
    """Return a text that `parse_best` takes; raise ValueError, which pydantic collects with its key, for another."""
    try:
        parse_best(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None  # pydantic collects these, with their keys
    return text


def parse_best(text: str) -> tuple[str, bool]:
    """Parse 'min METRIC' or 'max METRIC': return the metric and whether more of it is better; raises ConfigError."""
    found = re.fullmatch(r"(min|max)\s+(\S+)", text.strip())
    if found is None:
        raise ConfigError(f"'{text}' does not say which commit is best; write 'min loss', or 'max' and a metric")
    return found[2], found[1] == "max"
