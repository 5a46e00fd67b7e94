"""A state that no further world takes over is committed by the process that holds it, as the child of its ancestor."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch import nn

from elastic_train.checkpoint.commits import reader
from elastic_train.checkpoint.commits.reader import discover
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.retention_policies import Retention
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving import save_thread
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.saving.store_health import StoreHealth
from elastic_train.checkpoint.stores import store as stores
from elastic_train.checkpoint.stores.disk import RealDisk
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore
from elastic_train.config.recipe import OptimizerConfig
from elastic_train.core.lineage import Interval
from elastic_train.errors import ElasticTrainError, Preempted, StorageError, TooFewNodesError
from elastic_train.job.build import build_state
from elastic_train.job.state import AppliedState, TrainProgress
from elastic_train.parallel.group import Group
from elastic_train.system.preemption import LeaveRequest
from elastic_train.system.watchdog import Watchdog
from elastic_train.training import open_session
from elastic_train.training.commits import describe_commit
from elastic_train.training.opening.resources import commit_alone, open_saves
from elastic_train.training.session import Process
from elastic_train.training.supervisor import _let_go, _next_world
from elastic_train.world.fencing import StoreFence
from tests.conftest import PATIENCE_S


def plan_of(folder: Path) -> SimpleNamespace:
    run = SimpleNamespace(dir=str(folder), seed=1)
    checkpoint = SimpleNamespace(accept_loss=None)
    parallel, one = SimpleNamespace(copies=1), lambda: "one"
    config = SimpleNamespace(
        checkpoint_url=str(folder), checkpoint=checkpoint, run=run, parallel=parallel, identity=one
    )
    manifest, order = SimpleNamespace(digest="two", num_rows=9), SimpleNamespace(block_row_groups=8, arrangement=None)
    return SimpleNamespace(config=config, manifest=manifest, order=order, num_lanes=8, micro_batch=8, sources=())


def state_of(*intervals: tuple[int, int, int]) -> AppliedState:
    """A state whose steps were applied by the terms of `intervals` (term, lo, hi)."""
    state = build_state(nn.Linear(2, 1), OptimizerConfig(lr=0.1), 50, "cpu", is_fp16=False)
    lineage = tuple(Interval(*interval) for interval in intervals)
    return replace(state, reached=TrainProgress(step=intervals[-1][2] if intervals else 0, intervals=lineage))


@pytest.mark.parametrize("error", [TooFewNodesError("few"), Preempted("asked to leave"), StorageError("etcd is away")])
def test_the_state_is_committed_however_the_wait_for_a_world_ends(error: ElasticTrainError, tmp_path: Path) -> None:
    """Its parent is the newest commit of its lineage, not a fenced writer's later record."""
    plan, store = plan_of(tmp_path), open_store(str(tmp_path))

    def commit(term: int, parent: CommitRecord | None, *intervals: tuple[int, int, int]) -> CommitRecord:
        state = state_of(*intervals)
        writer = CommitWriter(store, StoreFence(store), term, parent)
        return writer.save(state.shards.share.held(), describe_commit(plan, state, 1), state.reached.intervals)  # type: ignore[arg-type]

    ancestor = commit(1, None, (1, 0, 3))
    commit(1, ancestor, (1, 0, 6))  # term 2 continued from step 4 meanwhile
    left: list[bool] = []

    def form(*, as_last: bool) -> None:
        raise error

    leave = left.append
    worlds = SimpleNamespace(form=form, published=lambda: None, leave=lambda *, is_job_done: leave(is_job_done))
    state = state_of((1, 0, 4), (2, 4, 9))
    with pytest.raises(type(error)):
        _next_world(Process(plan, state, worlds, LeaveRequest(), Watchdog(), 0.0, StoreHealth(""), Mock()))  # type: ignore[arg-type]
    head = discover(store).head
    assert head is not None and (head.step, head.parent_key) == (9, ancestor.key)
    assert left == [False]


def test_a_damaged_commit_of_the_same_step_is_replaced_and_not_continued(tmp_path: Path) -> None:
    """Steps must grow along the chain: the parent is the damaged commit's parent."""
    plan, store, state = plan_of(tmp_path), open_store(str(tmp_path)), state_of((1, 0, 9))
    facts = describe_commit(plan, state, 1)  # type: ignore[arg-type]
    writer = CommitWriter(store, StoreFence(store), StoreFence(store).claim(), None)
    older = writer.save(state.shards.share.held(), replace(facts, step=6), (Interval(1, 0, 6),))
    damaged = writer.save(state.shards.share.held(), facts, state.reached.intervals)
    next(iter((tmp_path / damaged.attempt).iterdir())).unlink()
    commit_alone(plan, state, SaveMemory())  # type: ignore[arg-type]
    head = discover(store).head
    assert head is not None and (head.term, head.step, head.parent_key) == (2, 9, older.key)


def test_a_rank_with_nothing_to_lose_has_something_once_the_next_world_gives_it_a_state() -> None:
    """Its peers may be lost before its first step there: if it left at once, the applied steps would be, too."""
    state, leave = state_of(), SimpleNamespace(lost=lambda: "nothing is lost", may_go=lambda: True)
    _let_go(SimpleNamespace(state=state, leave=leave), SimpleNamespace(group=Mock()))  # type: ignore[arg-type]
    assert leave.may_go()
    state.reached = TrainProgress(step=9, intervals=(Interval(1, 0, 9),))
    assert not leave.may_go()


@pytest.mark.slow
@pytest.mark.parametrize("hung", ["write", "sync", "read"])
def test_hanging_storage_does_not_keep_a_process_from_leaving(
    hung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever storage call hangs, the process exits and reports what it could not commit."""
    plan, store, state = plan_of(tmp_path), open_store(str(tmp_path)), state_of((1, 0, 9))
    facts = describe_commit(plan, state, 1)  # type: ignore[arg-type]
    earlier = CommitWriter(store, StoreFence(store), StoreFence(store).claim(), None)
    first = earlier.save(state.shards.share.held(), replace(facts, step=6), (Interval(1, 0, 6),))
    may_continues, is_hung = threading.Event(), threading.Event()

    def hang(*_: object) -> bool:
        is_hung.set()
        return may_continues.wait(PATIENCE_S)

    where = {"write": (LocalStore, "write"), "sync": (RealDisk, "sync"), "read": (reader, "find_damage")}
    monkeypatch.setattr(*where[hung], hang)
    monkeypatch.setattr(save_thread, "LEAST_S", 3.0)
    left: list[bool] = []
    worlds = SimpleNamespace(form=few, published=lambda: None, leave=lambda *, is_job_done: left.append(is_job_done))
    with pytest.raises(TooFewNodesError):
        _next_world(Process(plan, state, worlds, LeaveRequest(), Watchdog(), 0.0, StoreHealth(""), Mock()))  # type: ignore[arg-type]
    assert is_hung.is_set() and left == [False]
    assert "step 9 could not be committed: the storage made no progress" in capsys.readouterr().err
    monkeypatch.undo()
    assert discover(store).head == first
    may_continues.set()


def few(*, as_last: bool) -> None:
    raise TooFewNodesError("few")


def test_a_save_waits_longer_for_slow_storage_than_a_world_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world's short store calls have a deadline; a save's have none, since it is abandoned as a whole."""

    is_asked, may_answer = threading.Event(), threading.Event()

    class Slow(LocalStore):
        def create(self, key: str, content: bytes) -> None:
            is_asked.set()
            assert may_answer.wait(PATIENCE_S)
            super().create(key, content)

    slow, state = Slow(tmp_path), state_of((1, 0, 9))
    fence = StoreFence(slow)
    world = SimpleNamespace(
        keeper=None,
        term=StoreFence(LocalStore(tmp_path)).claim(),
        group=Group(0, 1, None, 1.0),
        fence=fence,
        store=DeadlineStore(slow, lambda: None),
        save_store=slow,
        word="0" * 12,
        writes=True,
    )
    process = SimpleNamespace(
        plan=SimpleNamespace(retention=Retention.of(last=1), config=None), save_memory=SaveMemory(), state=state
    )
    monkeypatch.setattr(stores, "ANSWER_S", 0.02)
    with pytest.raises(StorageError, match="no answer"):
        world.store.create("pins/00000001-000000000001", b"")
    assert is_asked.wait(PATIENCE_S)
    may_answer.set()  # releases that call; the save's calls are answered later
    may_answer = threading.Event()
    is_asked.clear()
    saves = open_saves(process, world, None)  # type: ignore[arg-type]
    facts = describe_commit(plan_of(tmp_path), state, world_size=1)  # type: ignore[arg-type]
    saves.begin(state.shards.share.held(), facts, state.reached.intervals)
    assert is_asked.wait(PATIENCE_S)
    time.sleep(10 * stores.ANSWER_S)
    may_answer.set()
    ended = saves.wait()
    assert ended is not None and ended.error is None and ended.commit is not None


@pytest.mark.parametrize(
    ("rank", "local_rank", "shown", "logged"),
    [(0, 0, 1, 0), (1, 1, 0, 0), (2, 0, 0, 1)],
    ids=["leader", "other", "node"],
)
def test_the_first_rank_of_every_node_warns_once_of_its_mount(
    rank: int,
    local_rank: int,
    shown: int,
    logged: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0's view of its own mount says nothing about other nodes' mounts."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(open_session, "hazards", lambda url: iter([f"{url} is on tmpfs"]))
    said: list[str] = []
    world = SimpleNamespace(is_leader=rank == 0, announce=said.append)
    process = SimpleNamespace(plan=plan_of(Path("/run")), warned=set())
    for _ in range(2):
        open_session._warn_of_file_system(process, world)  # type: ignore[arg-type]
    assert (len(said), len(caplog.messages)) == (shown, logged)
    assert all(text.endswith("/run is on tmpfs") for text in (*said, *caplog.messages))
