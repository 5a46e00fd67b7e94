"""The group of ranks: the results of its collectives, its end, and the error when it cannot form."""

from __future__ import annotations

import json
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from elastic_train.errors import ConfigError, PeerLostError
from elastic_train.parallel.group import SLOT_BYTES, SMALL_BYTES, Group, connect
from elastic_train.parallel.point_to_point import Aside
from rendezvous.process_table import is_stopped
from rendezvous.waiting import Bystander
from tests.conftest import eventually, run_ranks

pytestmark = pytest.mark.slow


def ranks(rank: int, size: int, folder: str) -> None:
    """Run each collective once, close the group, and let the interpreter exit normally."""
    is_broken = (lambda waited_s: False) if Path(folder).name == "live" else None
    group = Group(rank, size, FileStore(f"{folder}/store", size), 60, is_broken=is_broken)
    mine = torch.tensor([float(rank), 10.0 * rank])
    total, copied = mine.clone(), mine.clone()
    group.all_reduce(total)
    group.broadcast(copied, source=1)
    arrived = torch.empty(size, 2)
    others = [other for other in range(size) if other != rank]
    group.exchange([(other, mine) for other in others], [(other, arrived[other]) for other in others])
    arrived[rank] = mine
    results = {
        "all_gather": group.all_gather(mine).tolist(),
        "all_reduce": total.tolist(),
        "broadcast": copied.tolist(),
        "large": group.all_gather(torch.full([SMALL_BYTES], rank)).sum(1).tolist(),
        "object": group.broadcast_object({"rank": rank, "text": "ä" * rank}, source=2),
        "long object": group.broadcast_object("ä" * SLOT_BYTES),
        "objects": group.all_gather_objects({"rank": rank}),
        "long objects": group.all_gather_objects("ä" * rank * (SLOT_BYTES // 3)),
        "exchange": arrived.tolist(),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    group.close()


@pytest.mark.parametrize("mode", ["live", "restart"])
def test_collectives_agree_and_closing_is_clean(tmp_path: Path, mode: str) -> None:
    """Every rank gets the same from each collective; processes that close their group exit with 0."""
    folder = tmp_path / mode
    folder.mkdir()
    run_ranks(ranks, 3, str(folder))
    everything = [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]]
    expected = {
        "all_gather": everything,
        "all_reduce": [3.0, 30.0],
        "broadcast": [1.0, 10.0],
        "large": [0, SMALL_BYTES, 2 * SMALL_BYTES],
        "object": {"rank": 2, "text": "ää"},
        "long object": "ä" * SLOT_BYTES,
        "objects": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "long objects": ["ä" * rank * (SLOT_BYTES // 3) for rank in range(3)],
        "exchange": everything,
    }
    assert [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)] == [expected] * 3


def test_a_world_of_one_needs_no_peers() -> None:
    """Every collective returns its input, and closing does nothing."""
    group = Group(0, 1, None, 60)
    value = torch.ones(2)
    group.all_reduce(value)
    group.broadcast(value)
    assert group.all_gather(value).tolist() == [[1.0, 1.0]]
    assert group.broadcast_object([1]) == [1]
    group.close()


def test_an_incomplete_launcher_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If WORLD_SIZE is set without the other variables, the error names the missing ones and how to start."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RANK, MASTER_ADDR, MASTER_PORT is not set: start all ranks with torchrun"):
        connect("term-1", 5)


def frozen_again_and_again(rank: int, size: int, folder: str, *, is_beside: bool) -> None:
    """Rank 1 freezes in every world; rank 0 abandons the world, and counts its open resources before the next one."""
    counts: list[list[int]] = []
    for number in range(4):
        store = PrefixStore(str(number), FileStore(f"{folder}/store", size))
        is_broken = threading.Event()
        group = Group(rank, size, store, 300, is_broken=lambda _, given_up=is_broken: given_up.is_set())  # type: ignore[misc]
        pid = int(group.all_gather(torch.tensor(os.getpid()))[1])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            eventually(lambda pid=pid: is_stopped(pid))  # type: ignore[misc]
        threading.Timer(0.3, is_broken.set).start()
        thread, vector = Bystander("beside"), torch.ones(1_000_000)
        if is_beside:  # this call is stuck as well, and nobody waits for it
            group.expect(thread.begin(partial(Aside(group).exchange, [], [(1 - rank, vector)])))
        try:
            group.all_reduce(torch.ones(1_000_000))
        except PeerLostError:
            group.abandon()
        thread.leave()
        if rank == 0:
            if counts:
                eventually(lambda: all(now <= first for now, first in zip(opened(), counts[0], strict=True)))
            else:
                eventually(lambda: threading.active_count() == 1)
            counts.append(opened())
            os.kill(pid, signal.SIGCONT)
    if rank == 0:
        (Path(folder) / "counts.json").write_text(json.dumps(counts))
    os._exit(0)


def opened() -> list[int]:
    """Return the number of this process's file descriptors and threads."""
    return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")]


@pytest.mark.parametrize("is_beside", [False, True])
def test_worlds_given_up_for_a_frozen_peer_leave_nothing_open(tmp_path: Path, is_beside: bool) -> None:
    """Otherwise each keeps five threads, fifteen descriptors and its tensors for as long as peers are waited for."""
    run_ranks(partial(frozen_again_and_again, is_beside=is_beside), 2, str(tmp_path))
    assert len(json.loads((tmp_path / "counts.json").read_text())) == 4
