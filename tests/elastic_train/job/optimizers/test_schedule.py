"""Schedules are pure functions of the step: bounded, continuous, with the specified end values."""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic_train.config.recipe import SCHEDULES, OptimizerConfig
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.schedule import check_schedule, num_warmup_steps, rate_factor

HERE = __name__


def halved(step: int, total_steps: int) -> float:
    return 0.5 if 2 * step >= total_steps else 1.0


def broken(step: int, total_steps: int) -> float:
    return math.nan if step > 3 else 1.0


def table(step: int, total_steps: int) -> float:
    return [1.0, 0.9, 0.8, 0.7][step]


class Decay:
    """Decreases with each call."""

    factor = 1.0

    def __call__(self, step: int, total_steps: int) -> float:
        self.factor *= 0.9
        return self.factor


decaying, _calls, _first = Decay(), itertools.count(), list[int]()


def counted(step: int, total_steps: int) -> float:
    return 1 / (1 + next(_calls))


def noisy(step: int, total_steps: int) -> float:
    return 1 + random.random()


def torch_noise(step: int, total_steps: int) -> float:
    return float(torch.rand(()))


def since_the_first_call(step: int, total_steps: int) -> float:
    """Warm up anew in each process."""
    _first.append(step)
    return min(1.0, max(0.1, (step - _first[0]) / total_steps))


@functools.cache
def remembered(step: int, total_steps: int) -> float:
    return counted(step, total_steps)


def ended(step: int, total_steps: int) -> float:
    os._exit(0)


def without_arguments() -> float:
    return 1.0


recipes = st.builds(
    lambda schedule, warmup, more, end, share: (
        OptimizerConfig(
            schedule=f"wsd:{share}" if schedule == "wsd" else schedule,
            warmup_steps=warmup,
            schedule_end=end,
            schedule_steps=warmup + more,
        ),
        warmup + more,
    ),
    st.sampled_from(SCHEDULES),
    st.integers(0, 50),
    st.integers(1, 500),
    st.floats(0, 1),
    st.floats(0.01, 1),
)


@given(recipes, st.integers(0, 1000))
def test_a_factor_is_between_the_end_and_1_and_falls_after_the_warm_up(
    recipe: tuple[OptimizerConfig, int], step: int
) -> None:
    config, last = recipe
    now, later = rate_factor(step, config, 7), rate_factor(step + 1, config, 7)
    if step < config.warmup_steps:
        assert now == (step + 1) / config.warmup_steps <= 1.0
        return
    least = 1.0 if config.schedule == "constant" else config.schedule_end
    assert least - 1e-12 <= later <= now + 1e-12 <= 1.0 + 2e-12
    if step >= last:
        assert now == pytest.approx(least)


@given(recipes, st.integers(0, 600))
def test_a_schedule_has_no_jump(recipe: tuple[OptimizerConfig, int], step: int) -> None:
    """Between two steps a rate changes by at most the steepest slope of its shape; it is 1 at the peak."""
    config, last = recipe
    length = last - config.warmup_steps
    steepest = {"constant": 0.0, "linear": 1.0, "cosine": math.pi / 2, "wsd": 1.0 / config.cooldown_share}
    at = config.warmup_steps + step
    change = rate_factor(at, config, 7) - rate_factor(at + 1, config, 7)
    assert change <= steepest[config.schedule.partition(":")[0]] / length + 1e-12
    assert rate_factor(config.warmup_steps, config, 7) == pytest.approx(1.0)


def test_a_warm_up_below_1_is_a_share_of_the_steps() -> None:
    """It fits a run of any length, and is that of the whole number of steps, rounded up."""
    share = OptimizerConfig(warmup_steps=0.05)
    for total, steps in ((1000, 50), (47, 3), (1, 1)):
        assert num_warmup_steps(share, total) == steps
        whole = OptimizerConfig(warmup_steps=steps)
        assert all(rate_factor(step, share, total) == rate_factor(step, whole, total) for step in range(total + 1))
    assert num_warmup_steps(OptimizerConfig(warmup_steps=0.05, schedule_steps=200), 1000) == 10
    assert num_warmup_steps(OptimizerConfig(warmup_steps=0), 1000) == 0
    with pytest.raises(ValidationError, match=r"whole number of steps, or a share of them below 1, such as 0\.05"):
        OptimizerConfig(warmup_steps=10.5)


def test_wsd_is_constant_until_it_cools_down() -> None:
    """The last tenth of the steps after warm-up cools to a fifth of the rate; total_steps is the default length."""
    config = OptimizerConfig(schedule="wsd:0.1", warmup_steps=10, schedule_end=0.2)
    factors = [rate_factor(step, config, 110) for step in range(111)]
    assert factors[9:100] == [1.0] * 91 and factors[100] == pytest.approx(1.0)
    assert factors[105] == pytest.approx(0.6) and factors[110] == pytest.approx(0.2)


@pytest.mark.heavy
def test_a_function_of_ones_own_follows_the_warm_up() -> None:
    config = OptimizerConfig(schedule=f"{HERE}:halved", warmup_steps=2)
    check_schedule(config, 10)
    assert [rate_factor(step, config, 10) for step in (0, 1, 2, 4, 5)] == [0.5, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{HERE}:nothing", r"optimizer\.schedule: '.*:nothing' cannot be imported .*write module:name"),
        (f"{HERE}:HERE", "is no function of a step"),
        (f"{HERE}:broken", r"called with \(4, 10\), returns nan; it must be a finite number of at least 0"),
        (f"{HERE}:without_arguments", r"called with \(0, 10\), fails: .*takes 0 positional arguments"),
    ],
)
def test_what_gives_no_rate_is_refused_before_training(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_schedule(OptimizerConfig(schedule=name, warmup_steps=0), 10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "cosin"}, "must be constant, linear, cosine, wsd, or a function.*did you mean 'cosine'"),
        ({"schedule": "wsd:2"}, "wsd:SHARE takes a share of the steps"),
        ({"schedule": "wsd:x"}, "wsd:SHARE takes a share of the steps"),
        ({"name": "adam"}, "must be adamw, sgd, adafactor, muon, or a class.*did you mean 'adamw'"),
        ({"options": {"lr": 1.0}}, "'lr' is no option"),
        ({"ema_decay": 1.0}, "less than 1"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**values)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decaying", "asked again"),
        ("counted", "asked again"),
        ("noisy", "asked again"),
        ("torch_noise", "asked again"),
        ("remembered", "asked in another order"),
        ("since_the_first_call", "asked in another order"),
        ("ended", "does not return, or ends its process"),
    ],
)
def test_a_function_that_does_not_depend_on_the_step_alone_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.schedule: '{HERE}:{name}'.*{message}"):
        check_schedule(OptimizerConfig(schedule=f"{HERE}:{name}", warmup_steps=0), 40)


@pytest.mark.heavy
def test_a_function_is_asked_before_training_without_a_trace_of_it() -> None:
    """A pure function may cache its results; only the values that it returns count."""
    check_schedule(OptimizerConfig(schedule=f"{HERE}:halved"), 40)
    with pytest.raises(ConfigError):
        check_schedule(OptimizerConfig(schedule=f"{HERE}:since_the_first_call", warmup_steps=0), 40)
    assert _first == []


@pytest.mark.heavy
def test_the_end_of_a_run_asks_for_no_rate_that_no_step_has() -> None:
    """Torch's scheduler asks for one step more than there are, which a table of the run's steps lacks."""
    config = OptimizerConfig(schedule=f"{HERE}:table", warmup_steps=0)
    check_schedule(config, 4)
    assert [rate_factor(step, config, 4) for step in range(5)] == [1.0, 0.9, 0.8, 0.7, 0.7]
    with pytest.raises(ConfigError, match="IndexError"):
        check_schedule(config, 5)
