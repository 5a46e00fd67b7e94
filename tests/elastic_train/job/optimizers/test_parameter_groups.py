"""A task's parameter groups: the optimizer's rates and decays, frozen parameters, mistakes, and changed groups."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.accounting import CoverageSums, SampleAccount
from elastic_train.core.order import Cursor
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.optimizers.choice import precision_hazard
from elastic_train.job.optimizers.parameter_groups import FirstStates, describe_groups
from elastic_train.job.state import AppliedState, StepFacts
from elastic_train.parallel.gradient_sum import place_gradients
from elastic_train.tasks.task import ParameterGroup

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.5, warmup_steps=2, decay_norms_and_biases=True)
BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")


class Tied(nn.Module):
    """Two layers that share a weight, with a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.outer.weight = self.inner.weight


def built(*groups: ParameterGroup, config: OptimizerConfig = CONFIG) -> AppliedState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return build_state(model, config, 20, "cpu", is_fp16=False, groups=groups)


def step(state: AppliedState, times: int = 1) -> None:
    for _ in range(times):
        for number, parameter in enumerate(state.model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.25 + number) if parameter.requires_grad else None
        state.apply(StepFacts(Cursor(0, state.step + 1), CoverageSums(), 1, SampleAccount()), state.measure())


def resumed(state: AppliedState, other: AppliedState) -> AppliedState:
    """Return the other state after it has restored this one as from a commit."""
    saved = copy.deepcopy(state.shards.share.held())
    other.restore(lambda tensors: tensors.update(saved), state.reached, keeps_rates=True)
    return other


def settings(state: AppliedState) -> list[tuple[int, float, float]]:
    return [(len(group["params"]), group["lr"], group["weight_decay"]) for group in state.optimizer.param_groups]


def weights(state: AppliedState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


def moments(state: AppliedState, name: str) -> dict[str, Tensor]:
    return state.optimizer.state[dict(state.model.named_parameters())[name]]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups_have_their_rates_and_decays(name: str) -> None:
    """The default group comes first; every rate follows warm-up and schedule."""
    config = CONFIG.model_copy(update={"name": name})
    state = built(ParameterGroup(["2.weight"], lr_factor=4.0, weight_decay=0.0), config=config)
    assert settings(state) == [(3, 0.05, 0.5), (1, 0.2, 0.0)], "the first of two steps of warm-up"
    step(state)
    assert settings(state) == [(3, 0.1, 0.5), (1, 0.4, 0.0)]
    assert state.scheduler.get_last_lr()[0] == 0.1


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_without_groups_nothing_changes(name: str) -> None:
    """The keys of the optimizer's state and the bits of the weights equal those of torch's plain optimizer."""
    config = CONFIG.model_copy(update={"name": name, "warmup_steps": 0, "schedule": "constant", "clip_norm": None})
    state, alone = built(config=config), built(config=config).model
    plain = (
        torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.5)
        if name == "sgd"
        else torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.5)
    )
    step(state, times=3)
    for _ in range(3):
        for number, parameter in enumerate(alone.parameters()):
            parameter.grad = torch.full_like(parameter, 0.25 + number)
        plain.step()
    assert all(torch.equal(tensor, alone.state_dict()[key]) for key, tensor in weights(state).items())
    [mine], [theirs] = state.optimizer.state_dict()["param_groups"], plain.state_dict()["param_groups"]
    mine.pop("initial_lr")
    assert list(mine.items()) == list(theirs.items())


def test_frozen_parameters_are_saved_and_not_trained() -> None:
    """They have no gradient buffer, moments or decay, but are in every commit and hand-over."""
    state = built(ParameterGroup(BODY, is_frozen=True))
    before = weights(state)
    assert sum(flat.numel() for flat in place_gradients(list(state.model.parameters()))[0]) == 3 * 2 + 2
    step(state, times=2)
    after, saved = weights(state), state.shards.share.held()
    assert [torch.equal(before[name], after[name]) for name in (*BODY, *HEAD)] == [True, True, False, False]
    assert list(saved["model"]) == [*BODY, *HEAD] and set(saved["optimizer"]["state"]) == set(HEAD)  # type: ignore[call-overload,index]


def test_a_tied_parameter_counts_once_under_any_of_its_names() -> None:
    """It is in one group, once, and two groups cannot share it under two names."""
    groups = [ParameterGroup(["outer.weight", "inner.weight"], weight_decay=0.0)]
    state = build_state(Tied(), CONFIG, 20, "cpu", is_fp16=False, groups=groups)
    assert settings(state) == [(2, 0.05, 0.5), (1, 0.05, 0.0)]
    step(state)
    again = resumed(state, build_state(Tied(), CONFIG, 20, "cpu", is_fp16=False, groups=groups))
    assert torch.equal(moments(again, "inner.weight")["exp_avg"], moments(state, "inner.weight")["exp_avg"])
    with pytest.raises(
        ConfigError, match=r"'inner\.weight' is in group 0 already as 'outer\.weight', which is the same"
    ):
        build_state(
            Tied(),
            CONFIG,
            20,
            "cpu",
            is_fp16=False,
            groups=[ParameterGroup(["outer.weight"]), ParameterGroup(["inner.weight"])],
        )


def test_all_mistakes_are_reported_at_once() -> None:
    """Each error has the group and the value or the nearest name; in that case no parameter is frozen."""
    groups = [
        ParameterGroup(["0.wieght", "2.bias"], lr_factor=-1.0),
        ParameterGroup(["2.bias"], weight_decay=float("nan")),
        ParameterGroup(["0.bias"], lr_factor=2.0, is_frozen=True),
    ]
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ConfigError) as caught:
        build_state(model, CONFIG, 20, "cpu", is_fp16=False, groups=groups)
    where = "the task's parameter_groups, group"
    assert list(caught.value.problems) == [
        f"{where} 0: lr_factor must be a finite number of at least 0, not -1.0",
        f"{where} 0: the model has no parameter '0.wieght'; did you mean '0.weight'?",
        f"{where} 1: weight_decay must be a finite number of at least 0, not nan",
        f"{where} 1: '2.bias' is in group 0 already; name it in one group",
        f"{where} 2: it is frozen, so lr_factor and weight_decay would have no effect; leave them out",
    ]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_fully_frozen_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="every parameter is frozen, so there is nothing to train"):
        built(ParameterGroup(BODY, is_frozen=True), ParameterGroup(HEAD, is_frozen=True))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), (ParameterGroup(HEAD, lr_factor=0.5),)),
        ((ParameterGroup(HEAD, lr_factor=2.0),), (ParameterGroup(HEAD, lr_factor=0.5, weight_decay=0.0),)),
        ((ParameterGroup(HEAD),), (ParameterGroup(BODY, lr_factor=3.0),)),
        ((ParameterGroup(["2.weight"]), ParameterGroup(["2.bias"])), ()),
        ((), (ParameterGroup(BODY, lr_factor=2.0), ParameterGroup(HEAD, lr_factor=0.5))),
    ],
    ids=["split", "another factor", "moved", "merged", "all named"],
)
def test_changed_groups_keep_every_parameters_moments(
    before: Sequence[ParameterGroup], after: Sequence[ParameterGroup]
) -> None:
    """Rates and decays are the new ones; moments go by name, whatever group the parameter was in, now and later."""
    state = built(*before)
    step(state, times=4)
    again, never_stopped = resumed(state, built(*after)), built(*after)
    step(never_stopped, times=4)
    assert settings(again) == settings(never_stopped) and len(again.scheduler.base_lrs) == len(settings(again))
    for name in (*BODY, *HEAD):
        for key, value in moments(state, name).items():
            assert torch.equal(moments(again, name)[key], value), f"{key} of {name}"
    step(again, times=2)
    step(never_stopped, times=2)
    assert settings(again) == settings(never_stopped)
    step(resumed(again, built(*after)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_layer_may_be_frozen_and_thawed_between_runs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Freezing drops moments and keeps weights; thawing starts as at a first step, with a message."""
    config = OptimizerConfig(name=name, lr=0.1, warmup_steps=0)
    state = built(config=config)
    step(state, times=3)
    frozen = resumed(state, built(ParameterGroup(BODY, is_frozen=True), config=config))
    kept = weights(frozen)
    step(frozen, times=2)
    assert all(torch.equal(kept[name], weights(frozen)[name]) for name in BODY)
    assert set(frozen.shards.share.held()["optimizer"]["state"]) <= set(HEAD)  # type: ignore[call-overload,index]
    thawed = resumed(frozen, built(config=config))
    assert all(torch.equal(kept[name], weights(thawed)[name]) for name in BODY)
    if name == "adamw":
        assert [int(moments(thawed, name)["step"]) for name in HEAD] == [5, 5]
        assert "2 parameters that were not trained begin as at a first step: 0.weight, 0.bias" in caplog.text
    step(thawed)
    if name == "adamw":
        assert [int(moments(thawed, name)["step"]) for name in (*BODY, *HEAD)] == [1, 1, 6, 6]
    assert not torch.equal(kept["0.weight"], weights(thawed)["0.weight"])


def test_descriptions_differ_exactly_where_groups_do() -> None:
    """Ranks compare them: parameters, rates and decays, whatever the order of the names."""

    def of(*groups: ParameterGroup) -> list[str]:
        state = built(*groups)
        return describe_groups(state.model, state.optimizer)

    assert of(ParameterGroup(HEAD)) == of(ParameterGroup(HEAD[::-1]))
    some = [of(), of(ParameterGroup(HEAD)), of(ParameterGroup(BODY)), of(ParameterGroup(HEAD, lr_factor=2.0))]
    some += [of(ParameterGroup(HEAD, weight_decay=0.0)), of(ParameterGroup(HEAD, is_frozen=True))]
    assert len({tuple(lines) for lines in some}) == len(some)
    state = built(ParameterGroup(HEAD, lr_factor=2.0))
    lines = state.outline["the list of parameter groups"]
    step(state)
    assert lines == state.outline["the list of parameter groups"] and lines[1].endswith("rate 0.2, weight decay 0.5")


def test_first_states_of_two_parameters_share_no_memory() -> None:
    """A commit is read into them: a shared step count would advance once per parameter."""
    first = FirstStates(torch.optim.AdamW([nn.Parameter(torch.ones(3))]), torch.optim.AdamW, keeps_average=True)
    one, other = (first.of(0, torch.ones(3))[1] for _ in range(2))
    assert {"step", "exp_avg", "exp_avg_sq"} < set(one) == set(other)
    assert not {value.data_ptr() for value in one.values()} & {value.data_ptr() for value in other.values()}


@pytest.mark.parametrize(
    ("dtype", "name", "lr", "is_lost"),
    [
        (torch.bfloat16, "adamw", 5e-6, True),
        (torch.float16, "torch.optim:Adam", 1e-7, True),
        (torch.bfloat16, "adamw", 1e-2, False),
        (torch.float32, "adamw", 5e-6, False),
        (torch.bfloat16, "sgd", 5e-6, False),
    ],
)
def test_updates_below_the_precision_of_weights_are_warned_of(
    dtype: torch.dtype, name: str, lr: float, is_lost: bool
) -> None:
    """The warning names type, key, value and fraction; frozen weights have no updates."""
    weights = (torch.randn(300, 50, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype).requires_grad_()
    frozen = torch.ones(9000, dtype=torch.bfloat16)
    hazard = precision_hazard([weights, frozen], name, lr)
    assert bool(hazard) == is_lost
    if is_lost:
        assert "16" in hazard and f"optimizer.lr, {lr:g}, rounds to nothing for 9" in hazard
