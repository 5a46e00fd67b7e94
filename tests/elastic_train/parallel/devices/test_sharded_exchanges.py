"""Sharded state on devices: the host waits for exchanges alone, and survives a peer that it loses in any of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_train.errors import PeerLostError
from elastic_train.job.peer_states import gather_peer_states, roll_forward
from elastic_train.job.reshard import take_first_seat, take_state
from elastic_train.job.sharded.zero1_share import Zero1Share
from elastic_train.job.state import AppliedState, norm_of
from elastic_train.parallel.group import Group
from elastic_train.parallel.reduce_scatter_sum import ReduceScatterSum
from elastic_train.parallel.unit_weights import UnitWeights
from tests.conftest import eventually, run_ranks
from tests.elastic_train.job.sharded import shard_jobs
from tests.elastic_train.job.sharded.shard_jobs import (
    NUM_LANES,
    Net,
    Shards,
    facts_of,
    fingerprint,
    loss_of,
    replicated,
    train,
)
from tests.elastic_train.job.sharded.test_held_state import newcomers
from tests.fake_device import FakeDevice

pytestmark = pytest.mark.slow
STEPS = 4


def with_blocks(shards: Shards, num_blocks: int = 5) -> AppliedState:
    """Return the initial state of a model with this number of blocks; ranks have no shard in common."""
    with mock.patch.object(shard_jobs, "Net", partial(Net, [90] * num_blocks)):
        return shard_jobs.build(shards, copies=1)


class BusyDevice(FakeDevice):
    """A device that the host never finds idle: a computation ends only when the next one has been enqueued."""

    num_enqueued = num_ended = 0

    def compute(self, *arguments: object) -> None:
        """Enqueue a computation; takes the arguments of a hook."""
        self.num_enqueued += 1
        number, self.num_ended = self.num_enqueued, max(self.num_ended, self.num_enqueued - 1)
        self.computing.follow(lambda: self.num_ended >= number)

    def catch_up(self) -> None:
        """End the last computation: nothing follows it for now."""
        self.num_ended = self.num_enqueued


def enqueue_by(state: AppliedState, device: BusyDevice) -> None:
    """Enqueue a computation for each module of a forward pass, and for each gradient of a backward pass."""
    for module in state.model.modules():
        if not list(module.children()):
            module.register_forward_hook(device.compute)
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(device.compute)  # type: ignore[no-untyped-call]


def busy(rank: int, size: int, folder: str, shards: Shards) -> None:
    """Take steps on a busy device; write the weights after each of them."""
    torch.set_num_threads(1)
    device = BusyDevice()
    group = Group(rank, size, FileStore(f"{folder}/store", size), 30, device.seen())
    state = with_blocks(shards)
    enqueue_by(state, device)
    take_first_seat(group, state.shards, newcomers(size))
    found = []
    for _ in range(2):
        gradients = state.shards.sum_of(group, NUM_LANES)
        gradients.begin()
        for lane in (*state.shards.table.assigned(NUM_LANES)[rank], None):
            if lane is None:
                device.catch_up()
            with gradients.turn(lane):
                if lane is not None:
                    state.scaler.scale(loss_of(state, lane)).backward()
        device.catch_up()
        gradients.finish(3.0 * NUM_LANES)
        measured = group.all_gather(state.measure())
        state.apply(facts_of(state), norm_of(measured, state.shards.table))
        state.shards.share.refresh(group)
        found.append(fingerprint(group, state))
        device.catch_up()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    group.close()
    os._exit(0)


@pytest.mark.parametrize("shards", ["gradients", "parameters"])
def test_a_device_has_its_next_unit_before_it_has_computed_the_last(tmp_path: Path, shards: Shards) -> None:
    """The host waits for exchanges, but for no computation that has been enqueued since they began."""
    torch.set_num_threads(1)
    whole, alone, expected = with_blocks("none"), Group(0, 1, None, 60), []
    for step in range(2):
        train(alone, whole, step + 1)
        expected.append(fingerprint(alone, whole))
    run_ranks(busy, 2, str(tmp_path), shards)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [expected] * 2


def at_call(number: int, of: type, name: str, act: Callable[[], object]) -> None:
    """Act at a call of a method, counted from 0, before it is made."""
    made, count = getattr(of, name), iter(range(1 << 30))

    def call(*arguments: object, **named: object) -> object:
        if next(count) == number:
            act()
        return made(*arguments, **named)

    mock.patch.object(of, name, call).start()


PLACES = {
    "gather": ("parameters", 3, UnitWeights, "_post"),
    "reduce-scatter": ("parameters", 2, ReduceScatterSum, "_exchange"),
    "mean": ("parameters", 0, ReduceScatterSum, "_finish"),
    "update": ("gradients", 0, Zero1Share, "refresh"),
}
"""Kinds of shards and places in a step: the number of a call of a method."""


def losing(rank: int, size: int, folder: str, how: str, place: str) -> None:
    """Lose the last rank within the second step, when all are there; continue without it in the same process."""
    torch.set_num_threads(1)
    shards, number, of, name = PLACES[place]
    device, store, lost = FakeDevice(), FileStore(f"{folder}/store", size), Path(folder) / "lost"

    def meet(term: int, size: int) -> Group:
        """Form a world; the first one is broken once membership has seen the loss."""
        name = PrefixStore(str(term), store)
        return Group(rank, size, name, 60, device.seen(), is_broken=lambda _: term == 1 and lost.exists())

    def arrive() -> None:
        (Path(folder) / f"{rank}.there").touch()

    def lose() -> None:
        for other in range(size - 1):
            eventually((Path(folder) / f"{other}.there").exists, f"rank {other} is there")
        lost.touch()
        os.kill(pids[rank], signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    group, state = meet(1, size), shard_jobs.build(shards)  # type: ignore[arg-type]
    pids = group.all_gather(torch.tensor(os.getpid())).tolist()
    take_first_seat(group, state.shards, newcomers(size))
    state.shards.trained_in = 1
    train(group, state, 1, 1)
    at_call(number, of, name, lose if rank == size - 1 else arrive)
    with pytest.raises(PeerLostError):
        train(group, state, STEPS, 1)
    group.abandon()
    was_at, group = state.step, meet(2, size - 1)
    brought = roll_forward(group, state, gather_peer_states(group, state, ("", str(rank))))
    assert not take_state(group, state, brought).lost.size
    assert state.step == was_at, "no step is lost"
    state.shards.trained_in = 2
    train(group, state, STEPS, 2)
    found = [was_at, device.num_aborts, fingerprint(group, state)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    group.close()
    os._exit(0)


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("place", PLACES)
def test_a_peer_lost_in_an_exchange_of_shards_costs_no_step(tmp_path: Path, place: str, how: str) -> None:
    """The host never blocks on the device, uses nothing that was aborted, and trains on with the shards' copies."""
    torch.set_num_threads(1)
    expected = [2 if place == "update" else 1, 1, replicated(STEPS)[-1]]
    run_ranks(losing, 3, str(tmp_path), how, place, codes=(0, 0, None))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [expected] * 2
