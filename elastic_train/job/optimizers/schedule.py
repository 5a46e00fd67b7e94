"""The learning rate over a run's steps: pure functions of the step, so that nothing of them needs to be saved.

A linear warm-up comes first, whatever the schedule. After it a schedule is a shape over the progress p from 0, at the
end of the warm-up, to 1, at the schedule's end. A function of your own gets the step instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.dotted_path import import_named

OwnSchedule = Callable[[int, int], float]
"""Returns what the learning rate is multiplied by in a step, counted from 0, of so many."""


def rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return what the learning rate is multiplied by in a step counted from 0: linear warm-up, then the schedule.

    Raises ConfigError if a function of the user's returns anything but a finite number of at least 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    last = config.schedule_steps or total_steps
    if ":" in config.schedule:
        return _own_factor(config.schedule, step, last)
    progress = min(1.0, (step - config.warmup_steps) / max(1, last - config.warmup_steps))
    if config.schedule == "constant":
        return 1.0
    return config.schedule_end + (1.0 - config.schedule_end) * _shape(config, progress)


def _shape(config: OptimizerConfig, progress: float) -> float:
    """Return a schedule's value at a progress in [0, 1], which falls from 1 to 0."""
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    left = 1.0 - progress
    return left if config.schedule == "linear" else min(1.0, left / config.cooldown_share)


def own_schedule(path: str) -> OwnSchedule:
    """Import a user's function; raise ConfigError if there is none."""
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
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where} fails: {error}") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(f"{where} returns {factor!r}; it must be a finite number of at least 0")
    return float(factor)


def check_schedule(config: OptimizerConfig, total_steps: int) -> None:
    """Raise ConfigError if the schedule gives no rate at the first step, in the middle or at the last one."""
    for step in sorted({0, config.warmup_steps, total_steps // 2, max(0, total_steps - 1)}):
        rate_factor(step, config, total_steps)
