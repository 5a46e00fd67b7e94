"""Weights initialised one by one equal the whole model's, and no rank ever has more than its shard and one block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.config.schema import ParallelConfig
from elastic_train.errors import ConfigError
from elastic_train.job.build import build_state
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.sharded.zero3_share import Zero3Share, without_memory
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.tasks.decoder.model import Decoder, DecoderShape, drawn_weights
from tests.elastic_train.job.sharded.shard_jobs import fingerprint, shards_of, train
from tests.elastic_train.job.sharded.test_held_state import newcomers
from tests.fake_memory import DeviceBytes

SHAPE = DecoderShape(vocabulary=301, dim=64, depth=6, heads=4, kv_heads=2, tied=True)
RECIPE = OptimizerConfig(lr=0.01, warmup_steps=2)


def built(shape: DecoderShape = SHAPE, *, is_deferred: bool, copies: int = 1) -> AppliedState:
    """Return the state of a decoder, with or without initialised weights."""
    torch.manual_seed(3)
    parallel = ParallelConfig(shards="parameters", copies=copies)
    if not is_deferred:
        return build_state(Decoder(shape), RECIPE, 50, "cpu", is_fp16=False, parallel=parallel)
    with torch.device("meta"):
        sketch = Decoder(shape)
    model = without_memory(sketch, torch.device("cpu"))
    state = build_state(model, RECIPE, 50, "cpu", is_fp16=False, parallel=parallel)
    gathered_of(state).first_weights = lambda: drawn_weights(shape)
    return state


def gathered_of(state: AppliedState) -> Zero3Share:
    assert isinstance(state.shards.share, Zero3Share)
    return state.shards.share


def seated(state: AppliedState, rank: int = 0, size: int = 1) -> AppliedState:
    group = Group(0, 1, None, 60) if size == 1 else cast(Group, SimpleNamespace(rank=rank, size=size))
    take_first_seat(group, state.shards, newcomers(size), begins=True)
    return state


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoders_weights_are_drawn_one_by_one_as_they_are_at_once(tied: bool) -> None:
    shape = DecoderShape(vocabulary=31, dim=32, depth=2, heads=4, tied=tied)
    torch.manual_seed(3)
    whole = dict(Decoder(shape).named_parameters())
    torch.manual_seed(3)
    found = dict(drawn_weights(shape))
    assert list(found) == list(whole)
    assert all(found[name].equal(parameter) for name, parameter in whole.items())


@pytest.mark.heavy
@pytest.mark.parametrize("size", [1, 3, 4])
def test_each_rank_begins_with_its_share_of_the_whole_model(size: int) -> None:
    """This holds for any world, and the gaps between tensors stay zero."""
    for rank in range(size):
        whole, apart = (shards_of(seated(built(is_deferred=how), rank, size)) for how in (False, True))
        assert [one.run for one in apart.runs] == [one.run for one in whole.runs]
        for one, other in zip(whole.runs, apart.runs, strict=True):
            assert one.weights.equal(other.weights)


@pytest.mark.heavy
def test_a_step_has_the_same_bits() -> None:
    group, found = Group(0, 1, None, 60), []
    for is_deferred in (False, True):
        state = seated(built(is_deferred=is_deferred))
        state.shards.share.agree_on_order(group, state.shards.order)
        train(group, state, 2)
        found.append(fingerprint(group, state))
    assert found[0] == found[1]


@pytest.mark.heavy
def test_a_rank_never_has_more_than_its_share_and_a_block() -> None:
    """Weights, moments and gradients of 4 ranks, from building the model on."""
    counted = DeviceBytes()
    state = built(is_deferred=True)
    with counted:
        first = counted.now()
        seated(state, rank=1, size=4)
    weights = sum(parameter.numel() * 4 for parameter in state.model.parameters())
    block = sum(parameter.numel() * 4 for parameter in state.model.get_submodule("blocks.0").parameters())
    held = sum(one.weights.nbytes for one in shards_of(state).runs)
    assert held <= 0.3 * weights
    assert first <= 0.1 * block, "what is built has no weights"
    assert counted.peak <= 4 * held + 1.2 * block < weights + 3 * held
    assert not any(parameter.untyped_storage().nbytes() for parameter in state.model.parameters())


def test_weights_that_do_not_come_are_named() -> None:
    state = built(is_deferred=True)
    gathered_of(state).first_weights = lambda: (pair for pair in drawn_weights(SHAPE) if pair[0] != "norm.weight")
    with pytest.raises(ConfigError, match=r"gives no 'norm.weight'"):
        seated(state)
