"""All that determines an optimizer's next update is in a commit, or the optimizer is refused before training."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.optimizers.choice import choose
from elastic_train.job.sharded.elementwise import slots_of
from elastic_train.job.state import AppliedState, StepFacts
from tests.elastic_train.job.optimizers import odd_optimizers
from tests.elastic_train.job.optimizers.odd_optimizers import REFUSED, SAVED, CountingGroups, TensorInGroups


def config_of(kind: type[Optimizer], **values: object) -> OptimizerConfig:
    decay = {} if kind.__module__ == odd_optimizers.__name__ else {"weight_decay": 0.0}
    return OptimizerConfig(name=f"{kind.__module__}:{kind.__name__}", lr=0.1, warmup_steps=0, **decay, **values)


def rehearse(config: OptimizerConfig) -> None:
    choose(config).rehearse(config.name, "cpu")


def built(kind: type[Optimizer], dtype: torch.dtype = torch.float32) -> AppliedState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(dtype)
    return build_state(model, config_of(kind), 40, "cpu", is_fp16=False)


def step(state: AppliedState, times: int) -> None:
    for _ in range(times):
        generator = torch.Generator().manual_seed(state.step)
        for one in state.model.parameters():
            one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)
        state.apply(StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount()), state.measure())


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("num_steps", [1, 13])
@pytest.mark.parametrize("keeps_rates", [True, False])
def test_an_optimizer_goes_on_from_a_commit_and_from_a_peer_with_the_same_bits(
    kind: type[Optimizer], num_steps: int, keeps_rates: bool
) -> None:
    """The process that restores may have trained on; it returns to the older state entirely."""
    rehearse(config_of(kind))
    through = built(kind)
    step(through, num_steps)
    saved, reached = copy.deepcopy(through.shards.share.held()), through.reached
    others = [built(kind), built(kind)]
    step(others[1], 4)
    step(through, 12)
    for other in others:
        other.restore(lambda tree: tree.update(copy.deepcopy(saved)), reached, keeps_rates=keeps_rates)
        step(other, 12)
        assert weights_digest(other.model, other.layout.dims) == weights_digest(through.model, {})


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_whose_next_update_no_commit_decides_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}.*{REFUSED[kind]}"):
        rehearse(config_of(kind))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", [one for one in (*SAVED, *REFUSED) if one not in (CountingGroups, TensorInGroups)])
def test_shards_refuse_what_is_kept_apart_from_parameters_and_groups(kind: type[Optimizer]) -> None:
    """A shard sees only its own elements at every step, and so does state kept elsewhere."""
    with pytest.raises(ConfigError):
        choice = choose(config_of(kind))
        choice.rehearse("odd", "cpu")
        slots_of(choice.tried(), choice.make)


def test_shards_keep_what_an_optimizer_counts_in_its_groups() -> None:
    """Only values that do not depend on the number of a group's parameters are the same for every shard."""
    choice = choose(config_of(CountingGroups))
    assert [one.moments for one in slots_of(choice.tried(), choice.make)] == [()]


class Viewing(odd_optimizers.Odd):
    """Treats every parameter as contiguous."""

    def scale(self, group: dict[str, object], parameter: torch.Tensor) -> float:
        return float(parameter.view(-1).shape[0])


def test_an_optimizer_that_takes_row_layers_for_contiguous_is_refused_before_training() -> None:
    choice = choose(config_of(Viewing))
    choice.rehearse("odd", "cpu")
    with pytest.raises(
        ConfigError, match=r"'odd' calls `view` .* stores some matrices column by column .* call `reshape`"
    ):
        choice.rehearse("odd", "cpu", by_columns=True)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", SAVED)
def test_an_optimizer_goes_on_from_a_commit_of_matrices_that_by_columns(kind: type[Optimizer]) -> None:
    choose(config_of(kind)).rehearse("odd", "cpu", by_columns=True)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_the_named_optimizers_take_matrices_that_by_columns(name: str) -> None:
    choose(OptimizerConfig(name=name)).rehearse(name, "cpu", by_columns=True)


def test_a_rehearsal_leaves_the_generators_where_they_were() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    rehearse(OptimizerConfig())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]


@pytest.mark.parametrize(
    "options", [{"capturable": True}, {"differentiable": True}], ids=["capturable", "differentiable"]
)
def test_options_with_which_no_step_can_be_taken_are_refused(options: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match=r"'adamw' fails in a rehearsal of its step.*optimizer.options"):
        rehearse(OptimizerConfig(options=options))


class WideMoments(odd_optimizers.Odd):
    """Keeps momentum in fp32, whatever the parameter's type."""

    def scale(self, group: dict[str, object], parameter: torch.Tensor) -> torch.Tensor:
        assert parameter.grad is not None, "gradients are in place"
        kept = self.state[parameter].setdefault("m", torch.zeros(parameter.shape))
        return kept.mul_(0.9).add_(parameter.grad.float()).to(parameter.dtype)


def test_moments_that_are_wider_than_the_weights_keep_their_type() -> None:
    """Torch's own loading would make them 16-bit and change later updates."""
    through, again = built(WideMoments, torch.bfloat16), built(WideMoments, torch.bfloat16)
    step(through, 3)
    saved = copy.deepcopy(through.shards.share.held())
    again.restore(lambda tree: tree.update(saved), through.reached, keeps_rates=True)
    assert {one["m"].dtype for one in again.optimizer.state.values()} == {torch.float32}
    step(through, 3)
    step(again, 3)
    assert weights_digest(again.model, again.layout.dims) == weights_digest(through.model, {})
