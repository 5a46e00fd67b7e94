"""Keep the recipe with the state, so that a resume reports its changes and their consequences.

Rates, decay, length, average and compilation may change between starts of a run. One line gives the values and rates
before and after, and says if the weights' bits will differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.schedule import num_warmup_steps, rate_factor
from elastic_train.system.wording import counted

_FREE = frozenset({"optimizer.ema_decay"})
"""Keys that do not affect trained weights."""
_LENGTH, _NUM_COMPARED = "the number of steps", 64
_OF_RATES = frozenset(
    {
        *(f"optimizer.{key}" for key in ("lr", "warmup_steps", "schedule", "schedule_steps", "schedule_end")),
        _LENGTH,
    }
)
"""Keys that affect weights only through the learning rate."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings that, given the gradients, determine a run's updates."""

    optimizer: OptimizerConfig
    total_steps: int
    compiles: bool

    def to_text(self) -> str:
        """Return the recipe as stored in a commit."""
        optimizer = self.optimizer.model_dump(mode="json", exclude_defaults=True)
        return json.dumps({"optimizer": optimizer, "total_steps": self.total_steps, "compile": self.compiles})

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.optimizer.lr * rate_factor(step, self.optimizer, self.total_steps)


def read_recipe(text: object) -> Recipe | None:
    """Return a commit's recipe; None if it has none, or one with another release's keys."""
    if not isinstance(text, str):
        return None
    fields: dict[str, Any] = json.loads(text)
    try:
        return Recipe(OptimizerConfig(**fields["optimizer"]), fields["total_steps"], fields["compile"])
    except (ValidationError, ConfigError):
        return None


def say_changes(before: Recipe | None, now: Recipe, step: int) -> str | None:
    """Describe the recipe's changes at a resume at `step`; None if there are none or the old recipe is unknown."""
    if before is None or not (changes := list(_changes(before, now))):
        return None
    parts = [", ".join(f"{key} was {_shown(old)} and is {_shown(new)}" for key, old, new in changes)]
    was, becomes = _rate(before, step), _rate(now, step)
    if was != becomes and step < now.total_steps:
        parts.append(f"the learning rate of step {step + 1} is {becomes}, where it would have been {was}")
    keys = {key for key, *_ in changes}
    if "optimizer.ema_decay" in keys:
        parts.append(_about_average(before, now))
    is_free = keys <= _FREE | (_OF_RATES if _have_same_rates(before, now, step) else set())
    parts.append(
        "by these changes the trained weights keep their bits"
        if is_free
        else "from here on the weights are not those of a run without the change"
    )
    return "; ".join(parts)


def _have_same_rates(before: Recipe, now: Recipe, step: int) -> bool:
    left = max(0, now.total_steps - step)
    spread = {step + left * part // _NUM_COMPARED for part in range(_NUM_COMPARED)}
    return all(before.rate_at(one) == now.rate_at(one) for one in spread)


def say_end_of_rates(recipe: Recipe, step: int) -> str | None:
    """Say if the warm-up takes half of the run, the schedule ends before it, or no steps are left; else None."""
    config, total = recipe.optimizer, recipe.total_steps
    warmup = num_warmup_steps(config, total)
    if step > total:
        return f"{step} steps are applied already, and max_steps or epochs ask for {total}: nothing is left to train"
    if step < min(total, warmup) and total <= 2 * warmup and warmup > 1:
        peak = f"optimizer.lr {_number(config.lr)}"
        reached = f"rises to {_number(recipe.rate_at(total - 1))} only, not to {peak}"
        return (
            f"optimizer.warmup_steps: {config.warmup_steps}, but the run has {counted(total, 'step')}: the rate "
            f"{reached if total < warmup else f'reaches {peak} at step {warmup}'}. Set fewer warmup_steps, such as "
            f"{total // 10}, or train for more epochs"
        )
    end = config.schedule_steps
    if end is None or end >= total or config.schedule == "constant" or config.has_own_schedule or step >= total:
        return None
    rate = recipe.rate_at(total - 1)
    effect = "no weight changes any more" if rate == 0 else "it stays there"
    return (
        f"optimizer.schedule ends after step {end} of {total} (optimizer.schedule_steps): from step "
        f"{max(step, end) + 1} on the learning rate is {_number(rate)}, and {effect}"
    )


def _changes(before: Recipe, now: Recipe) -> Iterator[tuple[str, object, object]]:
    old, new = (dict(_flat(one.optimizer.model_dump(mode="json"))) for one in (before, now))
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            yield f"optimizer.{key}", old.get(key), new.get(key)
    if before.total_steps != now.total_steps:
        yield _LENGTH, before.total_steps, now.total_steps
    if before.compiles != now.compiles:
        yield "compile", before.compiles, now.compiles


def _flat(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _about_average(before: Recipe, now: Recipe) -> str:
    if now.optimizer.ema_decay is None:
        return "the average of the weights is dropped, and would begin anew"
    return (
        "the average begins with these weights"
        if before.optimizer.ema_decay is None
        else "the average follows its new decay from here on"
    )


def _rate(recipe: Recipe, step: int) -> str:
    return _number(recipe.rate_at(step))


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return str(value)


def _number(value: float) -> str:
    return f"{value:.4g}"
