"""The keys of a training recipe: optimizer, schedule, average of the weights, validation, early stopping."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from elastic_train.config.section import Forms, Old, Section, Value, has_unit, periods_of, whole, written
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest

OPTIMIZERS, SCHEDULES = ("adamw", "sgd", "adafactor", "muon"), ("constant", "linear", "cosine", "wsd")


def _named(value: str, known: Sequence[str], what: str) -> str:
    """Refuse what is neither a known name nor a dotted path."""
    if value not in known and not re.fullmatch(r"[\w.]+:\w+", value):
        meant = did_you_mean(nearest(value, known), "")
        raise ValueError(f"must be {', '.join(known)}, or {what} of your own, as module:name{meant}")
    return value


def _ema_decay(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the decay of a section that has a mapping for the average."""
    ema = old["ema"]
    return {"ema_decay": ema.get("decay", 0.999) if isinstance(ema, Mapping) else ema}


def _betas(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the options of a section that has a key for AdamW's decay rates; others have none."""
    options = old.get("options") or {}
    return {"options": {**options, "betas": old["betas"]}} if old.get("name", "adamw") in ("adamw", "muon") else {}


class OptimizerConfig(Section):
    name: str = "adamw"
    """Optimizer: adamw, sgd, adafactor, muon (AdamW updates everything but hidden matrices), or a torch optimizer's
    class as module:Class."""
    options: dict[str, Value] = Field(default_factory=dict)
    """Other keyword arguments of the optimizer's class, such as {betas: [0.9, 0.95]} for adamw, or {momentum: 0.9,
    nesterov: true} for sgd. muon also takes betas, of its AdamW, and adamw_names: patterns of matrices that AdamW
    updates."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay, or L2 (sgd)."""
    decay_norms_and_biases: bool = False
    """Also apply weight decay to biases, norms and other one-dimensional parameters. A task's parameter groups
    override it."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum norm of a step's whole gradient. null: no clipping."""
    warmup_steps: int | float = Field(default=20, ge=0)
    """Steps in which the learning rate rises from 0, with any schedule; below 1, a share of schedule_steps or of the
    job's length, such as 0.05."""
    on_nonfinite: Literal["fail", "skip", "keep"] = "fail"
    """When a step's loss or gradient is NaN or infinite. skip: leave out the update. fail: also end with an error
    after ten such steps in a row. keep: update anyway."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine or linear (fall to schedule_end), constant, wsd (constant, then a
    linear fall in the last fifth of the steps; wsd:0.1: in the last tenth), or your own function (step, total_steps)
    -> factor as module:function."""
    schedule_steps: PositiveInt | None = None
    """Length of the schedule in steps, with the warm-up. null: the job's length. Set it to train shorter or longer
    with the same rates."""
    schedule_end: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of cosine, linear and wsd, as a share of lr."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the weights: the share of the old average that a step keeps, such as
    0.999, which spans about 1 / (1 - 0.999) steps. null: none."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "betas": Old(tuple[float, float], [0.9, 0.999], "is now options: {betas: [B1, B2]}", _betas),
        "nonfinite_limit": Old(int, 10, "is ignored: ten steps in a row end training"),
        "cooldown_share": Old(
            float,
            0.2,
            "is now schedule: wsd:SHARE",
            lambda old: {"schedule": f"wsd:{old['cooldown_share']}"} if old.get("schedule") == "wsd" else {},
        ),
        "ema": Old(dict[str, float] | None, None, "is now ema_decay", _ema_decay),
    }

    @field_validator("name")
    @classmethod
    def _is_an_optimizer(cls, name: str) -> str:
        return _named(name, OPTIMIZERS, "a class")

    @field_validator("warmup_steps")
    @classmethod
    def _is_a_number_or_a_share(cls, steps: float) -> float:
        if steps < 1 or steps == int(steps):
            return steps if 0 < steps < 1 else int(steps)
        raise ValueError("takes a whole number of steps, or a share of them below 1, such as 0.05")

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, name: str) -> str:
        if name.startswith("wsd:"):
            try:
                share = float(name.removeprefix("wsd:"))
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ValueError("wsd:SHARE takes a share of the steps, more than 0 and at most 1, such as wsd:0.1")
            return name
        return _named(name, SCHEDULES, "a function")

    @field_validator("options")
    @classmethod
    def _are_others(cls, options: dict[str, Value]) -> dict[str, Value]:
        if own := sorted({"lr", "weight_decay", "params"} & set(options)):
            raise ValueError(f"'{own[0]}' is no option; lr and weight_decay are keys of optimizer")
        return options

    @property
    def has_own_schedule(self) -> bool:
        """True if the schedule is the user's own function."""
        return ":" in self.schedule and not self.schedule.startswith("wsd:")

    @property
    def cooldown_share(self) -> float:
        """The share of the steps after the warm-up in which wsd falls."""
        return float(self.schedule.partition(":")[2] or 0.2) if self.schedule.startswith("wsd") else 0.2


class EarlyStoppingConfig(Section):
    metric: str = "min loss"
    """Metric that has to improve, such as 'min loss' or 'max macro_f1'."""
    patience: PositiveInt = 5
    """Training ends after this many validations in a row without a better value."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest difference from the best value that counts as better."""

    @field_validator("metric")
    @classmethod
    def _names_a_best(cls, text: str) -> str:
        return checked_best(text)


NEVER = 1 << 62
"""A patience that no job exhausts."""


def judged_by(stopping: EarlyStoppingConfig | None, keep_best: str | None) -> EarlyStoppingConfig | None:
    """Return how a job finds its best validation: by early stopping, or without an end by `checkpoint.keep_best`."""
    if stopping is None and keep_best is not None:
        return EarlyStoppingConfig(metric=keep_best, patience=NEVER)
    return stopping


_EVERY_FORMS = Forms(("steps", "epochs"), "write '100 steps', '2 epochs', or null (only at the end)")


def _validation_every(old: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the interval of a section that has a key for steps, and one for epochs."""
    epochs = old.get("every_epochs")
    today = periods_of(old.get("every", "100 steps"), _EVERY_FORMS).get("steps")
    return {"every": written(steps=old.get("every_steps", today if epochs is None else None), epochs=epochs)}


class ValidationConfig(Section):
    every: str | None = "100 steps"
    """Validate after so many steps or epochs, such as '100 steps' or '2 epochs'. null: only at the end."""
    max_samples: PositiveInt | None = None
    """Validate on the first N samples. null: on all."""
    weights: Literal["trained", "ema"] = "trained"
    """Validate the trained weights, or their average (optimizer.ema_decay)."""
    early_stopping: EarlyStoppingConfig | None = None
    """End training when validations stop improving, such as {metric: min loss, patience: 5}. null: never."""

    OLD: ClassVar[Mapping[str, Old]] = {
        "every_steps": Old(int | None, 100, "is now every: 'N steps'", _validation_every),
        "every_epochs": Old(int | None, None, "is now every: 'N epochs'", _validation_every),
    }

    @field_validator("every", mode="before")
    @classmethod
    def _has_a_unit(cls, every: object) -> object:
        return has_unit(every, _EVERY_FORMS)

    @field_validator("every")
    @classmethod
    def _is_one_period(cls, text: str | None) -> str | None:
        if len(periods_of(text, _EVERY_FORMS)) > 1:
            raise ValueError(f"'{text}' is two periods: {_EVERY_FORMS.advice}")
        return text

    @property
    def every_steps(self) -> int | None:
        return whole(periods_of(self.every, _EVERY_FORMS).get("steps"))

    @property
    def every_epochs(self) -> int | None:
        return whole(periods_of(self.every, _EVERY_FORMS).get("epochs"))


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
