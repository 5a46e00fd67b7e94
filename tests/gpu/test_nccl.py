"""NCCL under a group: what it gives, and that a peer which dies or freezes in an operation holds nobody up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_train.errors import PeerLostError
from elastic_train.parallel.devices.device import device_of
from elastic_train.parallel.group import Group
from tests.conftest import run_ranks
from tests.elastic_train.parallel.test_gradient_sum import LANES, train
from tests.gpu.conftest import DEVICE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(DEVICE != "cuda", reason="NCCL needs a GPU")]


def device_of_rank(rank: int) -> torch.device:
    """Return a device; ranks that have to share one look to NCCL like ranks of different hosts, which it lets them."""
    if rank >= torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def sums(rank: int, size: int, folder: str) -> None:
    device = device_of_rank(rank)
    with torch.device(device):
        group = Group(rank, size, FileStore(f"{folder}/store", size), 60, device_of(device, "auto"))
        digests = {str(num_lanes): train(group, num_lanes) for num_lanes in LANES[:3]}
        beside = {str(num_lanes): train(group, num_lanes, bucket_bytes=1) for num_lanes in LANES[:3]}
        assert beside == digests, "exchanges beside the backward pass change a bit"
        ranks = group.all_gather(torch.tensor([float(rank)])).flatten().tolist()
    (Path(folder) / f"{rank}.json").write_text(json.dumps([digests, ranks]))
    group.close()
    os._exit(0)


@pytest.mark.parametrize("size", [2, 3])
def test_devices_add_up_in_the_order_of_the_tree(tmp_path: Path, size: int) -> None:
    """Any number of ranks ends with the weights of one."""
    device = device_of_rank(0)
    with torch.device(device):
        expected = {str(num_lanes): train(Group(0, 1, None, 60), num_lanes) for num_lanes in LANES[:3]}
    run_ranks(sums, size, str(tmp_path))
    for rank in range(size):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [expected, [float(of) for of in range(size)]]


def worlds(rank: int, size: int, folder: str, how: str) -> None:
    """Lose the last rank in an operation; form the next world without it, in the same process."""
    device, is_broken = device_of_rank(rank), threading.Event()
    store, seen = FileStore(f"{folder}/store", size), device_of(device, "auto")
    group = Group(rank, size, PrefixStore("1", store), 60, seen, is_broken=lambda _: is_broken.is_set())
    pid = int(group.all_gather(torch.tensor(os.getpid()))[-1])
    if rank == size - 1:
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    threading.Timer(1.0, is_broken.set).start()
    began = time.monotonic()
    try:
        group.all_reduce(torch.ones(1 << 20, device=device))
        raise AssertionError("an operation without one of its ranks has ended")
    except PeerLostError:
        group.abandon()
    took_s = time.monotonic() - began
    is_broken.clear()
    group = Group(rank, size - 1, PrefixStore("2", store), 60, seen, is_broken=lambda _: is_broken.is_set())
    group.all_reduce(again := torch.ones(1 << 20, device=device))
    (Path(folder) / f"{rank}.json").write_text(json.dumps([again.unique().tolist(), took_s < 10.0]))
    group.close()
    os._exit(0)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_peer_lost_in_an_operation_frees_the_device_for_the_next_world(tmp_path: Path, how: str) -> None:
    run_ranks(worlds, 3, str(tmp_path), how, codes=(0, 0, None))
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[[2.0], True]] * 2
