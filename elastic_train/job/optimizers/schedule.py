"""Learning-rate schedules as pure functions of the step, so that commits need not save them.

A linear warm-up always comes first. After it, a schedule is a function of the progress p, from 0 at the end of the
warm-up to 1 at the schedule's end. A user's own function gets the step instead.
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
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.system.imports import import_named

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
