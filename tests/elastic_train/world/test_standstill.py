"""Jobs that get nowhere stop: by histories, by worlds without a step, and where nodes end each other's worlds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.errors import NoProgressError, PeerLostError
from elastic_train.job.plan import Plan
from elastic_train.parallel.group import Group
from elastic_train.system.watchdog import Watchdog
from elastic_train.tracking import history
from elastic_train.tracking.history import History, UnformedWorlds
from elastic_train.tracking.history_files import Stagnation
from elastic_train.training.open_session import check_progress
from elastic_train.world import forming
from elastic_train.world.forming import LiveWorlds, Standstill
from elastic_train.world.world import World
from rendezvous import MemoryStore, live_member
from rendezvous.context import LiveContext
from rendezvous.membership.records import Job
from tests.conftest import PATIENCE_S
from tests.elastic_train.tracking.unqueued import Unqueued

WORLDS = 6
CONFIG = SimpleNamespace(give_up_after_worlds=WORLDS, data=SimpleNamespace(validation="rows/validation"))
PLAN: Plan = SimpleNamespace(config=CONFIG)  # type: ignore[assignment]


def world_after(folder: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool, validates: bool = False) -> World:
    """Return the world after a number of worlds in which a process applied step 3 again, and no later step."""
    for term in range(1, WORLDS + 2):
        monkeypatch.setattr(history, "process_identity", lambda born=term if dies else 0: {"host": "a", "born": born})
        past = History(Unqueued(), folder, term, 0)
        past.form(world=1, cause="lost", joined_at=None, sealed_at=1.0, started_at=2.0)
        past.step(step=3, epoch=0, lo=3, hi=4, lanes=range(4), num_samples=4, world=1, loss=0.5)
        if validates:
            past.validate(step=3)
            past.phases(step=3, steps=1, seconds=[[0.1] * 12] * 64)  # which a world records when it breaks
            past.memory(step=3, facts={"peak": 1})
        past.close()
    term = WORLDS + 2
    group = Group(0, 1, None, 5.0)
    history_ = History(Unqueued(), folder, term, 0)
    return SimpleNamespace(group=group, term=term, history=history_)  # type: ignore[return-value]


def test_worlds_that_their_processes_outlive_end_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number does not matter: otherwise a network fault of a minute would end the job."""
    found = check_progress(world_after(tmp_path, monkeypatch, dies=False), PLAN)
    assert found == Stagnation(WORLDS, 3)


@pytest.mark.parametrize(
    ("validates", "suspect"),
    [
        (False, "points to the samples of the next step or to a device"),
        (True, f"the validation set rows/validation \\({WORLDS} of {WORLDS} worlds ended while they validated\\)"),
    ],
)
def test_worlds_that_end_their_processes_end_the_job_and_the_suspect_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validates: bool, suspect: str
) -> None:
    world = world_after(tmp_path, monkeypatch, dies=True, validates=validates)
    with pytest.raises(NoProgressError, match=suspect):
        check_progress(world, PLAN)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(forming, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_worlds_without_a_step_end_the_process_once_they_have_gone_on_for_long(clock: SimpleNamespace) -> None:
    """Several within a second are an outage; the one after a minute exceeds the limit."""
    counted = Standstill(3, 60.0, lambda: 7)
    for clock.now in (0.0, 0.3, 0.6, 0.9, 59.0):
        counted.note("it did not form: connection refused")
    clock.now = 60.0
    with pytest.raises(
        NoProgressError, match=r"6 worlds in a row, for 60 s, did not get beyond step 7; .*refused"
    ) as no:
        counted.note("it did not form: connection refused")
    assert no.value.exit_code == 93


def test_a_few_worlds_are_not_enough_however_long_they_take(clock: SimpleNamespace) -> None:
    counted = Standstill(3, 60.0, lambda: 7)
    for clock.now in (0.0, 1000.0):
        counted.note("it did not form")


def test_a_step_begins_the_count_again(clock: SimpleNamespace) -> None:
    """A network that occasionally permits a step is progress."""
    steps = itertools.count()
    counted = Standstill(1, 0.0, lambda: next(steps))
    for _ in range(100):
        counted.note("it ended")


def test_steps_that_are_lost_again_are_no_progress_and_commits_are(clock: SimpleNamespace) -> None:
    """Two nodes hold one state together, and one dies after a few steps each time: 5, 7, 6 … after a commit at 0.

    A node with its own folder has no history of these deaths, so the survivor would start again for ever.
    """
    steps, committed = itertools.cycle((5, 7, 6)), 0
    counted = Standstill(4, 60.0, lambda: next(steps))
    for clock.now in range(0, 180, 20):
        committed += 1
        counted.note("it ended", committed)
    with pytest.raises(NoProgressError, match="4 worlds in a row, for 60 s, did not get beyond step 7"):
        for clock.now in range(180, 400, 20):
            counted.note("it ended", committed)
    assert clock.now == 240


def test_null_never_gives_up(clock: SimpleNamespace) -> None:
    counted = Standstill(None, 1.0, lambda: 0)
    for clock.now in range(0, 10_000, 100):
        counted.note("it did not form")


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
