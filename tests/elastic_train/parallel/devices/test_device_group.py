"""Exchanges between devices give the bits of exchanges between hosts, and no result of an unfinished one is used."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_train.errors import HungError, PeerLostError
from elastic_train.parallel.devices import device as devices
from elastic_train.parallel.devices.device import Device, DeviceGroup, HostQueue, nccl_hazard
from elastic_train.parallel.group import Group
from rendezvous.waiting import Bystander
from tests.conftest import run_ranks
from tests.elastic_train.parallel.test_gradient_sum import LANES, train
from tests.fake_device import KINDS, FakeCommunicator, FakeDevice, FakeWork

pytestmark = pytest.mark.process


def direct() -> Device:
    return FakeDevice().seen()


def through_host() -> Device:
    return Device(torch.device("cpu"), lambda tensor: tensor.dtype in KINDS, HostQueue, HostQueue, None)


def sums(rank: int, size: int, folder: str, make: Callable[[], Device]) -> None:
    """Reduce gradients, and run each of the other collectives once."""
    torch.set_num_threads(1)
    group = Group(rank, size, FileStore(f"{folder}/store", size), 60, make())
    digests = {str(num_lanes): train(group, num_lanes) for num_lanes in LANES}
    beside = {str(num_lanes): train(group, num_lanes, bucket_bytes=1) for num_lanes in LANES}
    assert beside == digests, "exchanges beside the backward pass change a bit"
    mine, copied, arrived = torch.tensor([float(rank)]), torch.tensor([float(rank)]), torch.empty(1)
    group.broadcast(copied, source=1)
    if rank < 2:
        group.transfer(mine if rank == 0 else arrived, **({"to": 1} if rank == 0 else {"source": 0}))
    others = [digests, group.all_gather(mine).flatten().tolist(), copied.tolist(), arrived.tolist() if rank == 1 else 0]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(others))
    group.close()
    os._exit(0)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", [direct, through_host])
def test_devices_give_the_bits_that_hosts_give(tmp_path: Path, size: int, make: Callable[[], Device]) -> None:
    """Code that reads or adds to a tensor before the device is done sees NaN, and gets other weights."""
    torch.set_num_threads(1)
    expected = {str(num_lanes): train(Group(0, 1, None, 60), num_lanes) for num_lanes in LANES}
    run_ranks(sums, size, str(tmp_path), make)
    ranks = [float(rank) for rank in range(size)]
    for rank in range(size):
        received = [0.0] if rank == 1 else 0
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected, ranks, [1.0], received]


def worlds(rank: int, size: int, folder: str, how: str, is_beside: bool) -> None:
    """Lose the last rank in an exchange that its device has begun; continue without it in the same process."""
    torch.set_num_threads(1)
    device, is_broken = FakeDevice(), threading.Event()
    store = FileStore(f"{folder}/store", size)
    group = Group(rank, size, PrefixStore("1", store), 60, device.seen(), is_broken=lambda _: is_broken.is_set())
    pid = int(group.all_gather(torch.tensor(os.getpid()))[-1])
    if rank == size - 1:
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "frozen":
        threading.Timer(0.2, is_broken.set).start()
    gradient = torch.ones(1000)
    with pytest.raises(PeerLostError):
        if is_beside:
            train(group, 4, bucket_bytes=1)
        else:
            group.all_reduce(gradient)
    assert is_beside or gradient.isnan().all(), "only an abort ends what was not finished"
    assert device.num_done < device.num_asked
    group.abandon()
    assert device.num_done == device.num_asked, "the device is free again"
    is_broken.clear()
    group = Group(rank, size - 1, PrefixStore("2", store), 60, device.seen(), is_broken=lambda _: is_broken.is_set())
    group.all_reduce(again := torch.ones(1000))
    (Path(folder) / f"{rank}.json").write_text(json.dumps([again.unique().tolist(), device.num_aborts]))
    group.close()
    os._exit(0)


@pytest.mark.parametrize("is_beside", [False, True], ids=["after a pass", "beside a pass"])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_peer_lost_in_an_exchange_frees_the_device_for_the_next_world(
    tmp_path: Path, how: str, is_beside: bool
) -> None:
    """The process does not block, the aborted sum is not used, and the next world forms in the same process."""
    run_ranks(worlds, 3, str(tmp_path), how, is_beside, codes=(0, 0, None))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[[2.0], 1]] * 2


def alone(folder: Path, device: FakeDevice, kind: type[FakeCommunicator], *, breaks: bool = False) -> Group:
    """Return a group whose device has no peers: the communicator decides what peers do.

    If it `breaks`, its world has changed for whoever waits for a tenth of a second, once it has its device.
    """
    group, seen = Group(0, 1, None, 60), device.seen(kind)
    group.size, group._holds = 2, seen.holds
    group._bystander = Bystander("alone")
    folder.mkdir(exist_ok=True)
    store, timeout = FileStore(str(folder / "alone"), 1), timedelta(seconds=60)
    group._device = DeviceGroup(seen, store, 0, 1, timeout, group)
    group._is_broken = lambda waited_s: breaks and waited_s > 0.1
    return group


class NeverConnects(FakeCommunicator):
    """Like NCCL when a peer died before it connected."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._is_aborted.wait()
        raise RuntimeError("communicator was aborted")


def test_connecting_ends_when_the_world_does(tmp_path: Path) -> None:
    device = FakeDevice()
    group = alone(tmp_path, device, NeverConnects, breaks=True)
    assert group._device is not None
    with pytest.raises(PeerLostError, match="the world has changed"):
        group._device.connect()
    group.abandon()
    assert device.num_aborts == 1


def test_an_update_waits_until_the_device_has_finished(tmp_path: Path) -> None:
    """The call's return is not enough: reading a value from the device would block the process."""
    device = FakeDevice()
    group = alone(tmp_path, device, FakeCommunicator)
    device.gate.clear()
    threading.Timer(0.2, device.gate.set).start()
    group.all_reduce(gradient := torch.ones(3))
    assert device.gate.is_set()
    assert gradient.tolist() == [1.0, 1.0, 1.0]
    group.abandon()


def test_an_exchange_that_somebody_else_ended_was_not_finished(tmp_path: Path) -> None:
    """NCCL's watchdog in torch is an example: the device is done, but the gradient is not the sum."""

    class Ended(FakeCommunicator):
        def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
            work = super().allreduce(tensors)
            work._is_done, work._error = True, RuntimeError("NCCL communicator was aborted")
            return work

    group = alone(tmp_path, FakeDevice(), Ended)
    with pytest.raises(PeerLostError, match="an operation between devices has failed"):
        group.all_reduce(torch.ones(3))


class NeverAborts(FakeCommunicator):
    def abort(self) -> None:
        threading.Event().wait()


@pytest.mark.parametrize("kind", [NeverAborts, FakeCommunicator], ids=["abort hangs", "device hangs"])
def test_a_process_whose_device_does_not_get_free_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[FakeCommunicator]
) -> None:
    """It would only block the next world; a launcher or a standby process replaces it."""
    monkeypatch.setattr(devices, "ABORT_S", 0.2)
    device = FakeDevice()
    group = alone(tmp_path, device, kind, breaks=True)
    device.is_deaf = True
    device.gate.clear()
    with pytest.raises(PeerLostError):
        group.all_reduce(torch.ones(3))
    with pytest.raises(HungError, match=r"rank 0 of 2: an exchange was ended, .* another can take its place"):
        group.abandon()
    device.gate.set()


class AbortsLast(FakeCommunicator):
    """Its abort ends only when the device is free, as NCCL's may."""

    def abort(self) -> None:
        super().abort()
        while self._device.num_done < self._device.num_asked:
            threading.Event().wait(0.001)


def test_groups_that_hold_a_device_up_together_are_ended_together(tmp_path: Path) -> None:
    """A cell's exchange whose peer is missing, and one of its shard group that the device has queued behind it."""
    device = FakeDevice()
    world, part = (alone(tmp_path / name, device, AbortsLast, breaks=True) for name in ("1", "2"))
    world._parts.append(part)
    device.gate.clear()
    for group in (world, part):
        group.begin(lambda backend: backend.allreduce([torch.ones(3)]), torch.ones(3), "all_reduce")
    assert device.num_asked == 2
    world.abandon()
    assert device.num_aborts == device.num_done == 2 and world._parts == []


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_own_device_is_no_lost_peer(tmp_path: Path, kind: type[RuntimeError]) -> None:
    """It would recur in the next world; any other RuntimeError is attributed to the peers."""

    class Fails(FakeCommunicator):
        error: RuntimeError = kind("no room")

        def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
            raise self.error

    group = alone(tmp_path, FakeDevice(), Fails)
    with pytest.raises(kind):
        group.all_reduce(torch.ones(3))
    Fails.error = RuntimeError("gone")
    with pytest.raises(PeerLostError, match="a collective failed: gone"):
        group.all_reduce(torch.ones(3))


def test_nccl_takes_the_calls_that_are_made_here() -> None:
    """It takes them as torch's backends do, with or without a GPU: the first call raises no TypeError."""
    base = "(self: torch._C._distributed_c10d.Backend)"
    for name in ("_start_coalescing", "_end_coalescing", "abort"):
        assert f"{name}{base} ->" in (getattr(torch.distributed.ProcessGroupGloo, name).__doc__ or "")
    doc = torch.distributed.ProcessGroupGloo.eager_connect_single_device.__doc__ or ""
    assert "(self: torch._C._distributed_c10d.Backend, arg0: torch.device)" in doc


@pytest.mark.parametrize(
    ("version", "part"),
    [((2, 21, 5), "one after another"), ((2, 22, 3), None), ((2, 28, 9), None), ((2, 31, 0), "when it was shrunk")],
)
def test_versions_of_nccl_that_are_known_to_hang_are_named(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], part: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    said = nccl_hazard()
    assert (said is None) == (part is None)
    assert said is None or (part is not None and part in said and "parallel.transport to gloo" in said)
