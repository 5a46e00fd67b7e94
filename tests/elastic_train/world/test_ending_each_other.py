"""Two nodes that end each other's worlds, for any reason: both exit with 93 once the allowed number is reached."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.errors import NoProgressError, PeerLostError
from elastic_train.system.watchdog import Watchdog
from elastic_train.tracking.history import UnformedWorlds
from elastic_train.world import forming
from elastic_train.world.forming import LiveWorlds
from elastic_train.world.standstill import Standstill
from rendezvous import MemoryStore, live_member
from rendezvous.context import LiveContext
from rendezvous.membership.records import Job
from tests.conftest import PATIENCE_S

MOST = 5


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of this process meet in one store only."""
    store = MemoryStore()
    place = SimpleNamespace(host=lambda seal: ("127.0.0.1", 1), connect=lambda world: "a store")
    monkeypatch.setattr(live_member, "EtcdStore", lambda _: store)
    monkeypatch.setattr(live_member, "Meeting", lambda *_: place)
    monkeypatch.setattr(forming.one_store, "check_before_joining", lambda *_: None)
    monkeypatch.setattr(forming, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


def train(node: str, applied: Callable[[], Iterator[int]]) -> tuple[int, str]:
    """Run one world after another as a node's worker; return their number and the last message.

    `applied` gives its step at the end of each.
    """
    config: Config = SimpleNamespace(  # type: ignore[assignment]
        batch=SimpleNamespace(num_lanes=8), peer_timeout_s=PATIENCE_S, parallel=ParallelConfig()
    )
    context = LiveContext(
        ("memory",), "job", node, node, "127.0.0.1", "", 2, 2, 3.0, 0.0, timeout_s=PATIENCE_S, compacts=False
    )
    watchdog: Watchdog = SimpleNamespace(resting=None, moved=None)  # type: ignore[assignment]
    unformed: UnformedWorlds = SimpleNamespace(note=lambda *_: None)  # type: ignore[assignment]
    step, steps, num = [0], applied(), 0
    counted = Standstill(MOST, 0.0, lambda: step[0])
    worlds = LiveWorlds(context, config, torch.device("cpu"), watchdog, lambda: False, Job(), counted, unformed)
    try:
        for num in itertools.count():
            assert worlds.form() is not None and num < 10 * MOST
            step[0] = next(steps)
    except NoProgressError as error:
        return num, str(error)
    finally:
        worlds.leave(is_job_done=False)


@pytest.mark.parametrize(
    ("forms", "applied", "num", "said"),
    [
        (False, lambda: itertools.repeat(0), 0, "step 0; the last one: it did not form: connection refused"),
        (True, lambda: itertools.repeat(0), MOST, "step 0; the last one: it ended before a step"),
        (True, lambda: itertools.cycle((4, 2, 3)), MOST + 1, "step 4; the last one: it ended before a step"),
    ],
    ids=["none forms", "each breaks at once", "each takes its steps along"],
)
def test_two_nodes_that_end_each_others_worlds_give_up_after_so_many(
    monkeypatch: pytest.MonkeyPatch, forms: bool, applied: Callable[[], Iterator[int]], num: int, said: str
) -> None:
    """Each finds the other unfit in a world that both have entered; neither is lost, so no agent counts a failure."""
    both = threading.Barrier(2)

    def connect(*_: object, **__: object) -> object:
        both.wait(PATIENCE_S)
        if not forms:
            raise PeerLostError("connection refused")
        return "a group"

    monkeypatch.setattr(forming, "Group", connect)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(train, ("a", "b"), (applied, applied)))
    assert [found for found, _ in ends] == [num, num]
    assert all(f"did not get beyond {said}" in why for _, why in ends)
