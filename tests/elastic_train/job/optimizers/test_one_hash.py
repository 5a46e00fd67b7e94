"""Every optimizer and the average have one hash for any world and sharding, and after a resume."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.format.layout import AVERAGE, bytes_of
from elastic_train.core.mesh import Mesh
from elastic_train.errors import ConfigError
from elastic_train.job.peer_states import PeerState
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from tests.elastic_train.job.sharded.shard_jobs import MUON, Shards, build, compute, facts_of, fingerprint, meet, train
from tests.memory_machine import in_memory

STEPS = 3
EMA = {"ema_decay": 0.9}
MOMENTUM = {"name": "sgd", "options": {"momentum": 0.9, "nesterov": True}}
RECIPES: dict[str, tuple[Mapping[str, Any], list[Shards]]] = {
    "adamw": (
        {"schedule": "wsd", "options": {"amsgrad": True}, **EMA},
        ["none", "optimizer", "gradients", "parameters"],
    ),
    "sgd": ({**MOMENTUM, **EMA}, ["none", "optimizer", "parameters"]),
    "plain sgd": ({"name": "sgd", "schedule": "linear", **EMA}, ["none", "gradients"]),
    "adafactor": ({"name": "adafactor", **EMA}, ["none", "optimizer", "gradients", "parameters"]),
    "fused": ({"options": {"fused": True}}, ["none", "gradients"]),
    "muon": ({**MUON, **EMA}, ["none", "optimizer", "gradients", "parameters"]),
    "torch's own": ({"name": "torch.optim:NAdam"}, ["none"]),
}


def trained(group: Group, shards: Shards, recipe: Mapping[str, Any], *, resumes: bool = False) -> list[str]:
    """Return the weights and the averaged model's outputs after each step; resumed after the first if asked."""
    state, found = build(shards, recipe=recipe), list[str]()
    state.shards.enter(Mesh(group.rank, group.size), None)
    if isinstance(state.shards.share, Zero1Share):
        nobody = [PeerState(Place(0, 0), None, ("", str(number))) for number in range(group.size)]
        take_first_seat(group, state.shards, nobody)
    for step in range(STEPS):
        train(group, state, step + 1)
        if resumes and step == 0:
            state = resumed(state, recipe)
        found += [fingerprint(group, state), *([average(group, state)] if "ema" in recipe else [])]
    return found


def average(group: Group, state: AppliedState) -> str:
    """Return a digest of the outputs of the model with averaged weights."""
    state.shards.sum_of(group, 7)
    state.model.eval()
    with torch.no_grad(), state.shards.share.averaged(group):
        [said] = [state.model(torch.arange(300).view(3, 100)) for _ in state.shards.share.turns(group, iter([0]))]
    state.model.train()
    return hashlib.sha256(bytes_of(said.contiguous())).hexdigest()


def resumed(state: AppliedState, recipe: Mapping[str, Any]) -> AppliedState:
    """Return another state that has restored this one as from a commit."""
    saved, other = copy.deepcopy(state.shards.share.held()), build("none", recipe=recipe)
    other.restore(lambda tensors: tensors.update(saved), state.reached, keeps_rates=True)
    return other


def ranks(rank: int, size: int) -> dict[str, list[str]]:
    torch.set_num_threads(1)
    group, found = meet("world", rank, size), {}
    for name, (recipe, modes) in RECIPES.items():
        for mode in modes:
            found[f"{name}, {mode}"] = trained(group, mode, recipe)
    group.barrier()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[str]]:
    """The results of one rank that is never stopped."""
    torch.set_num_threads(1)
    return {name: trained(Group(0, 1, None, 60), "none", recipe) for name, (recipe, _) in RECIPES.items()}


@pytest.mark.slow
def test_no_world_and_no_shards_show_in_the_bits(alone: dict[str, list[str]]) -> None:
    """This holds in every mode that an optimizer accepts, and no two optimizers give equal results."""
    for found in in_memory(ranks, 3):
        assert found == {f"{name}, {mode}": alone[name] for name, (_, modes) in RECIPES.items() for mode in modes}
    assert len({hashes[-1] for hashes in alone.values()}) == len(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_resumption_does_not_show_in_the_bits(name: str, alone: dict[str, list[str]]) -> None:
    assert trained(Group(0, 1, None, 60), "none", RECIPES[name][0], resumes=True) == alone[name]


def stepped(state: AppliedState, *, norm: float = 1.0) -> None:
    for parameter in state.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(state.step))
    state.apply(facts_of(state), torch.tensor(norm, dtype=torch.float64))


def test_the_average_weighs_steps_by_their_age_and_skipped_ones_not_at_all() -> None:
    """The debiased average: weights of n steps ago have weight decay^n, the initial weights none."""
    state = build("none", recipe={"lr": 0.1, "clip_norm": None, **EMA})
    parameter = state.model.get_parameter("norm.weight")
    history = []
    for _ in range(5):
        stepped(state)
        history.append(parameter.detach().double().clone())
    shares = torch.tensor([0.9 ** (4 - number) for number in range(5)], dtype=torch.float64)
    expected = (torch.stack(history) * (shares / shares.sum())[:, None]).sum(0)
    assert torch.allclose(state.optimizer.state[parameter][AVERAGE].double(), expected, atol=1e-6)
    before = state.optimizer.state[parameter][AVERAGE].clone()
    stepped(state, norm=float("nan"))
    assert state.reached.skipped_steps == ((5, 6),) and state.optimizer.state[parameter][AVERAGE].equal(before)


@pytest.mark.heavy
@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
def test_an_average_begins_with_the_weights_in_shards_too(shards: Shards) -> None:
    """The first updates may be skipped, while a scaler searches for its scale."""
    group, found = Group(0, 1, None, 60), []
    for mode in ("none", shards):
        state = build(mode, recipe=EMA)  # type: ignore[arg-type]
        if isinstance(state.shards.share, Zero1Share):
            take_first_seat(group, state.shards, [PeerState(Place(0, 0), None, ("", "0"))])
        compute(group, state)
        state.apply(facts_of(state), torch.tensor(torch.nan, dtype=torch.float64))
        train(group, state, 2)
        found.append(average(group, state))
    assert found[0] == found[1]


def test_an_average_may_begin_and_end_when_a_run_resumes() -> None:
    """It starts from the resumed weights; an average that is switched off leaves nothing in commits."""
    state = build("none")
    stepped(state)
    begun = resumed(state, EMA)
    before, parameter = state.model.get_parameter("norm.weight"), begun.model.get_parameter("norm.weight")
    assert begun.optimizer.state[parameter][AVERAGE].equal(parameter)
    assert begun.optimizer.state[parameter]["exp_avg"].equal(state.optimizer.state[before]["exp_avg"])
    stepped(begun)
    ended = resumed(begun, {})
    assert not any(AVERAGE in values for values in ended.optimizer.state.values())


def test_another_optimizers_moments_are_refused() -> None:
    state = build("none")
    stepped(state)
    with pytest.raises(ConfigError, match=r"has exp_avg, exp_avg_sq, step of .* keeps momentum_buffer: set optimizer"):
        resumed(state, MOMENTUM)


def test_the_model_has_its_weights_again_whatever_ends_a_validation() -> None:
    """Meanwhile no bit of the saved state changes."""
    state, group = build("none", recipe=EMA), Group(0, 1, None, 60)
    for _ in range(2):
        stepped(state)
    held, digest = copy.deepcopy(state.shards.share.held()), fingerprint(group, state)
    with pytest.raises(KeyError), state.shards.share.averaged(group):
        assert fingerprint(group, state) != digest
        raise KeyError
    assert fingerprint(group, state) == digest
    again = state.shards.share.held()
    assert all(held["model"][name].equal(value) for name, value in again["model"].items())  # type: ignore[attr-defined,index]
