"""Recipe changes at a resume are reported with both values and the effect on rates and bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.job.build import build_state
from elastic_train.job.optimizers.schedule import Recipe, read_recipe, say_changes, say_end_of_rates
from elastic_train.job.state import AppliedState, TrainProgress

OTHER_BITS = "from here on the weights are not those of a run without the change"


def recipe(total_steps: int = 40, *, compiles: bool = False, **values: Any) -> Recipe:
    return Recipe(OptimizerConfig(**{"lr": 0.01, "warmup_steps": 0, **values}), total_steps, compiles)


@pytest.mark.parametrize(
    ("before", "now", "step", "said"),
    [
        (recipe(), recipe(), 10, None),
        (
            recipe(lr=0.01, schedule="constant"),
            recipe(lr=0.002, schedule="constant"),
            10,
            "optimizer.lr was 0.01 and is 0.002; the learning rate of step 11 is 0.002, where it would have been 0.01; "
            + OTHER_BITS,
        ),
        (
            recipe(40),
            recipe(80),
            40,
            "the number of steps was 40 and is 80; the learning rate of step 41 is 0.005, where it would have been 0; "
            + OTHER_BITS,
        ),
        (
            recipe(80, schedule="constant"),
            recipe(60, schedule="constant"),
            40,
            "the number of steps was 80 and is 60; by these changes the trained weights keep their bits",
        ),
        (
            recipe(ema_decay=0.9),
            recipe(),
            10,
            (
                "optimizer.ema_decay was 0.9 and is none; the average of the weights is dropped, and would begin anew; "
                "by these changes the trained weights keep their bits"
            ),
        ),
        (
            recipe(ema_decay=0.9),
            recipe(ema_decay=0.99),
            10,
            (
                "optimizer.ema_decay was 0.9 and is 0.99; the average follows its new decay from here on; by these "
                "changes the trained weights keep their bits"
            ),
        ),
        (recipe(), recipe(compiles=True), 10, "compile was false and is true; " + OTHER_BITS),
        (
            recipe(options={"eps": 1e-6}),
            recipe(options={}),
            10,
            "optimizer.options.eps was 1e-06 and is none; " + OTHER_BITS,
        ),
    ],
)
def test_a_change_is_said_with_both_values_and_its_effect(
    before: Recipe, now: Recipe, step: int, said: str | None
) -> None:
    assert say_changes(read_recipe(before.to_text()), now, step) == said


@pytest.mark.parametrize(
    ("one", "step", "said"),
    [
        (recipe(40), 0, None),
        (recipe(40, schedule="constant", schedule_steps=10), 0, None),
        (
            recipe(40, schedule_steps=10),
            0,
            (
                "optimizer.schedule ends after step 10 of 40 (optimizer.schedule_steps): from step 11 on the learning "
                "rate is 0, and no weight changes any more"
            ),
        ),
        (
            recipe(40, schedule="linear", schedule_steps=10, schedule_end=0.5),
            20,
            (
                "optimizer.schedule ends after step 10 of 40 (optimizer.schedule_steps): from step 21 on the learning "
                "rate is 0.005, and it stays there"
            ),
        ),
        (recipe(17, warmup_steps=8), 0, None),
        (recipe(1, warmup_steps=1), 0, None),
        (recipe(16, warmup_steps=8), 8, None),
        (
            recipe(16, warmup_steps=8),
            7,
            (
                "optimizer.warmup_steps: 8, but the run has 16 steps: the rate reaches optimizer.lr 0.01 at "
                "step 8. Set fewer warmup_steps, such as 1, or train for more epochs"
            ),
        ),
        (
            recipe(4, warmup_steps=8),
            0,
            (
                "optimizer.warmup_steps: 8, but the run has 4 steps: the rate rises to 0.005 only, not to "
                "optimizer.lr 0.01. Set fewer warmup_steps, such as 0, or train for more epochs"
            ),
        ),
        (recipe(40), 60, "60 steps are applied already, and max_steps or epochs ask for 40: nothing is left to train"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_said(one: Recipe, step: int, said: str | None) -> None:
    assert say_end_of_rates(one, step) == said


def test_a_state_knows_what_has_changed_since_the_commit_that_it_continues() -> None:
    """A commit of an older release has no recipe and reports nothing; a peer's state has the same recipe."""

    def built(own: Recipe | None) -> AppliedState:
        torch.manual_seed(1)
        state = build_state(nn.Linear(3, 2), (own or recipe()).optimizer, 40, "cpu", is_fp16=False)
        if own is not None:
            state.keep_recipe(own)
        return state

    for saved, now, said in (
        (recipe(), recipe(), False),
        (recipe(), recipe(lr=0.5), True),
        (None, recipe(lr=0.5), False),
    ):
        tree, state = copy.deepcopy(built(saved).shards.share.held()), built(now)
        state.restore(lambda into: into.update(tree), TrainProgress(step=2), keeps_rates=True)  # noqa: B023 - called at once
        assert (state.changes is not None) == said
        again = copy.deepcopy(state.shards.share.held())
        state.restore(lambda into: into.update(again), TrainProgress(step=2), keeps_rates=True)  # noqa: B023 - called at once
        assert state.changes is None
