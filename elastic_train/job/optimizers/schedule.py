"""Learning-rate schedules as pure functions of the step, so that commits need not save them.

A linear warm-up always comes first. After it, a schedule is a function of the progress p, from 0 at the end of the
warm-up to 1 at the schedule's end. A user's own function gets the step instead.

The recipe is kept with the state, so that a resume reports its changes and their consequences.

Rates, decay, length, average and compilation may change between starts of a run. One line gives the values and rates
before and after, and says if the weights' bits will differ.
"""

from __future__ import annotations

import functools
import json
import math
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.system.extras import import_named
from elastic_train.system.wording import counted

OwnSchedule = Callable[[int, int], float]
"""Function of (step, number of steps), step counted from 0, that returns the learning-rate factor."""
_NUM_ASKED, _ANSWER_S = 48, 20.0
"""Number of steps a function is tried at before training, and the time limit in seconds."""


def rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning-rate factor of a step counted from 0: linear warm-up, then the schedule.

    Raises ConfigError if a user's function returns anything but a finite number of at least 0.
    """
    warmup = num_warmup_steps(config, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    last = config.schedule_steps or total_steps
    if config.has_own_schedule:
        return _own_factor(config.schedule, min(step, max(0, total_steps - 1)), last)  # the end itself is not a step
    progress = min(1.0, (step - warmup) / max(1, last - warmup))
    if config.schedule == "constant":
        return 1.0
    return config.schedule_end + (1.0 - config.schedule_end) * _shape(config, progress)


def num_warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the steps of the warm-up; a share of them is rounded up."""
    steps = config.warmup_steps
    return math.ceil(steps * (config.schedule_steps or total_steps)) if steps < 1 else int(steps)


def _shape(config: OptimizerConfig, progress: float) -> float:
    """Return a schedule's value at a progress in [0, 1]; it falls from 1 to 0."""
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    left = 1.0 - progress
    return left if config.schedule == "linear" else min(1.0, left / config.cooldown_share)


def own_schedule(path: str) -> OwnSchedule:
    """Import a user's schedule function; raise ConfigError if it cannot be imported or called."""
    found = _imported(path)
    if not callable(found):
        raise ConfigError(f"optimizer.schedule: '{path}' is no function of a step and the number of steps")
    schedule: OwnSchedule = found
    return schedule


@functools.cache
def _imported(path: str) -> object:
    return import_named("optimizer.schedule", path)


def _own_factor(path: str, step: int, last: int) -> float:
    where = f"optimizer.schedule: '{path}', called with ({step}, {last}),"
    try:
        factor = own_schedule(path)(step, last)
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"{where} fails: {type(error).__name__}: {error}") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(f"{where} returns {factor!r}; it must be a finite number of at least 0")
    return float(factor)


def check_schedule(config: OptimizerConfig, total_steps: int) -> None:
    """Raise ConfigError if the schedule fails at some step or is not a pure function."""
    last_step, warmup = max(0, total_steps - 1), num_warmup_steps(config, total_steps)
    spread = {last_step * part // _NUM_ASKED for part in range(_NUM_ASKED + 1)}
    steps = sorted({0, min(warmup, last_step), min(1, last_step)} | spread)
    if config.has_own_schedule:
        _check_purity(config, total_steps, [step for step in steps if step >= warmup])


def _check_purity(config: OptimizerConfig, total_steps: int, steps: Sequence[int]) -> None:
    """Call a user's function in separate processes, as resumed runs do: in two orders, and twice."""
    path, last = config.schedule, config.schedule_steps or total_steps
    own_schedule(path)
    twice = _ask_apart(path, [*steps, *steps], last)
    once, again = twice[: len(steps)], twice[len(steps) :]
    backwards = _ask_apart(path, steps[::-1], last)[::-1]
    for answers, how in ((again, "asked again"), (backwards, "asked in another order")):
        for step, first, other in zip(steps, once, answers, strict=True):
            if first != other:
                raise ConfigError(
                    f"optimizer.schedule: '{path}', called with ({step}, {last}), returns {first} and, {how}, {other}: "
                    "a process that resumes the run would train with other rates. Compute the factor from these two "
                    "numbers alone, without counters, attributes that change, or random numbers"
                )


def _ask_apart(path: str, steps: Sequence[int], last: int) -> list[float]:
    """Return a user's factors for some steps, computed in this order in a forked process.

    Raises ConfigError if a call fails.
    """
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # locks of other threads: the child only calls the function
        process = os.fork()
    if process == 0:
        _answer_and_exit(path, steps, last, writes)
    os.close(writes)
    try:
        answer = _read_within(reads, _ANSWER_S)
    finally:
        os.close(reads)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    if not answer:
        raise ConfigError(f"optimizer.schedule: '{path}' does not return, or ends its process, for steps up to {last}")
    found: dict[str, Any] = json.loads(answer)
    if "problem" in found:
        raise ConfigError(found["problem"])
    return list(found["factors"])


def _answer_and_exit(path: str, steps: Sequence[int], last: int, writes: int) -> NoReturn:
    answer: dict[str, object] = {}
    try:
        answer = {"factors": [_own_factor(path, step, last) for step in steps]}
    except ConfigError as error:
        answer = {"problem": str(error)}
    finally:
        with os.fdopen(writes, "w") as file:
            file.write(json.dumps(answer) if answer else "")
        os._exit(0)


def _read_within(source: int, limit_s: float) -> bytes:
    """Read to the end of the stream; return b"" if that takes longer than `limit_s` seconds."""
    end, content = time.monotonic() + limit_s, b""
    while select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(source, 1 << 16)
        if not piece:
            return content
        content += piece
    return b""


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
