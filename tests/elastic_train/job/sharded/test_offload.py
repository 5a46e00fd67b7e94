"""State in host memory has the bits of state on the device, for any order of the copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.checkpoint.format.state_tree import Pieces, leaves_of
from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.optimizers.optimizer_memory import OWN
from elastic_train.job.reshard import take_first_seat
from elastic_train.job.sharded.held_tree import HeldRun
from elastic_train.job.sharded.streamed_update import Offload, StreamedUpdate, Updated
from elastic_train.job.state import AppliedState, norm_of
from elastic_train.parallel.devices.host_memory import HostMemory, pinned
from elastic_train.parallel.group import Group
from elastic_train.placement.holdings import Run
from tests.elastic_train.job.sharded.shard_jobs import (
    MUON,
    Offloads,
    Shards,
    build,
    compute,
    facts_of,
    fingerprint,
    replicated,
    shards_of,
    train,
)
from tests.elastic_train.job.sharded.test_held_state import newcomers
from tests.fake_memory import DeviceBytes, FakeMemory

STEPS = 2
_SMALL = 4096
"""Bytes that belong to no element."""
MODES: Sequence[tuple[Shards, Offloads]] = (
    ("none", "optimizer"),
    ("optimizer", "optimizer"),
    ("gradients", "optimizer"),
    ("parameters", "optimizer"),
    ("parameters", "all"),
)


def seated(
    group: Group, shards: Shards, offload: Offloads, seed: int = 1, recipe: Mapping[str, Any] | None = None
) -> AppliedState:
    """Return a state with its shards in a world; the seed sets the device's schedule but not the weights."""
    state = build(shards, 2, offload=offload, recipe=recipe)
    if offload != "none":
        memory_of(state).draw(seed)
    take_first_seat(group, state.shards, newcomers(group.size))
    return state


def memory_of(state: AppliedState) -> FakeMemory:
    offloaded = shards_of(state).offload
    assert offloaded is not None and isinstance(offloaded.memory, FakeMemory)
    return offloaded.memory


@pytest.fixture(scope="module")
def whole() -> Sequence[str]:
    """The weights after each step of one rank that holds everything on its device."""
    return replicated(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "offload"), MODES)
def test_no_order_of_copies_shows_in_the_bits(shards: Shards, offload: Offloads, whole: Sequence[str]) -> None:
    """Whenever a device copies, once the events permit: nothing is read too early or overwritten."""
    group, orders = Group(0, 1, None, 60), set()
    for seed in range(3):
        state = seated(group, shards, offload, seed)
        train(group, state, STEPS)
        assert fingerprint(group, state) == whole[-1]
        orders.add(tuple(memory_of(state).order))
    assert len(orders) == 3, "schedules differ"


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "offload"), MODES)
def test_the_device_has_blocks_in_place_of_what_is_offloaded(shards: Shards, offload: Offloads) -> None:
    """It also has weights and gradients unless these are offloaded; an update needs no more than blocks either."""
    group, found = Group(0, 1, None, 60), []
    for what in ("none", offload):
        counted = DeviceBytes()
        state = (
            seated(group, "optimizer" if shards == "none" else shards, "none")
            if what == "none"
            else seated(group, shards, offload)
        )
        measured = compute(group, state)
        with counted:
            found.append(counted.now())
            if what != "none":
                state.apply(facts_of(state), norm_of(group.all_gather(measured), state.shards.table))
    weights = sum(one.weights.nbytes for one in shards_of(state).trained_runs)
    offloaded, rooms = shards_of(state).offloaded, 2 * FakeMemory.room_bytes
    assert offloaded is not None, "the optimizer's state is offloaded"
    saved_bytes = offloaded.num_bytes
    assert saved_bytes >= (2 + (offload == "all")) * weights > 10 * rooms / 2
    assert offloaded.room_bytes == rooms
    assert found[1] <= found[0] - saved_bytes + rooms + _SMALL
    assert counted.peak <= found[1] + 2 * rooms


def saved(state: AppliedState) -> dict[tuple[object, ...], object]:
    """Return the tensors that a commit would have, by path."""
    found: dict[tuple[object, ...], object] = {}
    for path, leaf in leaves_of(state.shards.share.held()):
        if isinstance(leaf, Pieces):
            found |= {(*path, span): memory.tolist() for span, memory in leaf.held.items()}
        else:
            found[tuple(path)] = leaf.tolist() if isinstance(leaf, Tensor) else leaf
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "offload"), MODES[::4])
def test_a_commit_right_after_an_update_has_what_it_came_to(shards: Shards, offload: Offloads) -> None:
    """It is staged from host memory while the last blocks may be in flight, and can be restored."""
    group, sharded = Group(0, 1, None, 60), "optimizer" if shards == "none" else shards
    plain = seated(group, sharded, "none")
    train(group, plain, 2)
    for seed in range(6):  # under some schedules much is still in flight
        state = seated(group, shards, offload, seed)
        train(group, state, 2)
        assert saved(state) == saved(plain)
    tree, other = copy.deepcopy(state.shards.share.held()), seated(group, shards, offload, seed=3)
    other.restore(lambda tensors: fill_from(tensors, tree), state.reached)
    for one in (other, plain):
        train(group, one, 3)
    assert fingerprint(group, other) == fingerprint(group, plain)


def fill_from(tensors: dict[str, object], tree: dict[str, object]) -> None:
    """Fill a nested state in place with another's values, as a reader of commits does."""
    for key, value in tree.items():
        mine = tensors.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            fill_from(mine, value)
        elif isinstance(mine, Pieces) and isinstance(value, Pieces):
            for span, memory in value.held.items():
                mine.held[span].copy_(memory)
        elif isinstance(mine, Tensor) and isinstance(value, Tensor):
            mine.copy_(value)
        else:
            tensors[key] = value


def test_an_update_that_needs_more_than_a_parameter_is_not_offloaded() -> None:
    with pytest.raises(ConfigError, match=r"set parallel.shards to none, parallel.offload to none"):
        build("none", offload="optimizer", recipe={"name": "sgd", "options": {"momentum": 0.9, "dampening": 0.5}})


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "offload"), MODES[::4])
@pytest.mark.parametrize("recipe", [MUON, {"name": "adafactor"}], ids=["muon", "adafactor"])
def test_a_matrix_that_is_updated_as_a_whole_is_in_one_block(
    shards: Shards, offload: Offloads, recipe: Mapping[str, Any]
) -> None:
    """Blocks grow to the largest matrix; for any order of copies the bits equal those of a state on the device."""
    group = Group(0, 1, None, 60)
    for seed in range(3):
        state = seated(group, shards, offload, seed, recipe)
        train(group, state, STEPS)
        assert fingerprint(group, state) == replicated(STEPS, recipe)[-1]
        held = state.shards.share.held()["optimizer"]
        assert OWN not in held, "nor does Muon within it keep what a block was updated in"
        largest = -(-301 * 250 // 64) * 64 * 4 * ((recipe is MUON) + (offload == "all"))
        offloaded = shards_of(state).offloaded
        assert offloaded is not None and max(FakeMemory.room_bytes, 2 * largest) <= offloaded.room_bytes


def test_a_rank_that_holds_nothing_of_a_parameter_group_has_host_memory_for_it() -> None:
    """There are more ranks than grains: even memory without elements has the group's type."""
    for memory in (HostMemory().zeros(0, torch.float32), pinned(0, torch.device("cpu")).view(torch.float32)):
        assert memory.dtype == torch.float32 and not memory.numel()


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"parallel": {"offload": "all"}}, "parallel.shards to parameters .* or parallel.offload to optimizer"),
        (
            {"parallel": {"offload": "optimizer"}, "device": "cpu"},
            "set parallel.offload to none, or device to auto or cuda",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused_with_the_remedy(keys: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        Config(data={"train": "rows"}, **keys)  # type: ignore[arg-type]


def stream_of(memory: FakeMemory) -> StreamedUpdate:
    """Return the stream of one parameter, which copies its moments in."""
    parameter = nn.Parameter(torch.zeros(64))
    stream = StreamedUpdate(torch.optim.AdamW([parameter], lr=0.1), Offload(memory))
    moments = {name: memory.zeros(64, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    stream.take([Updated(0, parameter, HeldRun(Run(0, 0, 64), parameter.data, moments))])
    return stream


def test_nothing_is_copied_into_memory_that_earlier_computations_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's memory is given out again as soon as it is freed, before the work enqueued there has been done."""
    for seed in range(8):
        memory, freed, read = FakeMemory(seed), torch.ones(FakeMemory.room_bytes, dtype=torch.uint8), list[Tensor]()
        monkeypatch.setattr(memory, "room", lambda num_bytes, freed=freed: freed[:num_bytes])
        memory.compute(lambda freed=freed, read=read: read.append(freed.clone()))  # type: ignore[misc]
        stream_of(memory)
        memory.join()
        assert read[0].all() and read[0].max() == 1


def test_a_rank_that_comes_to_another_part_updates_that_alone() -> None:
    """The new shard replaces the old one in the optimizer's step."""
    weights = [torch.zeros(64) for _ in range(2)]
    parameters = [nn.Parameter(one.clone()) for one in weights]
    optimizer = torch.optim.AdamW(parameters[:1], lr=0.1)
    offload = Offload(FakeMemory(1), with_weights=False)
    for one in weights:
        stream = StreamedUpdate(optimizer, offload)
        parameter = nn.Parameter(one)
        parameter.grad = torch.ones(64)
        moments = {name: offload.memory.zeros(64, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.param_groups[0]["params"] = [parameter]
        optimizer.state.clear()
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        stream.take([Updated(0, parameter, HeldRun(Run(0, 0, 64), parameter.data, moments))])
    optimizer.step()
    assert not weights[0].any() and bool((weights[1] != 0).all())
