"""Saves that hang, in a write or while becoming a commit: abandoned, waited for, or found again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.commits.reader import Discovery, discover, read_state, verify
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving import save_thread
from elastic_train.checkpoint.saving.background_saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.stores import store as stores
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Store, Uncertain
from elastic_train.errors import StorageError
from tests.elastic_train.checkpoint.commit_samples import facts, small_state
from tests.elastic_train.checkpoint.save_samples import DEADLINE_S, Heads, HeldStore, open_saves, quick_retries

__all__ = ["quick_retries"]


def test_stuck_writers_take_no_memory_and_block_nobody(tmp_path: Path) -> None:
    """Abandoned saves of several worlds in a hanging store share one buffer, and publish nothing when they resume."""
    stuck, memory = HeldStore(tmp_path), SaveMemory()
    flights, buffers = [], set()
    for number in range(1, 5):
        world = open_saves(stuck, memory)
        world.begin(small_state(number), facts(number))
        flights.append(world._flight)
        world.await_staging()
        buffers.add(memory.staging._buffer)
        world.abandon()
    assert len(buffers) == 1
    store = LocalStore(tmp_path)
    last = open_saves(store, memory)
    last.begin(small_state(7), facts(5))
    ended = last.wait()
    stuck.may_create.set()
    stuck.may_write.set()
    assert all(flight is not None and flight.ended.wait(DEADLINE_S) for flight in flights)
    assert ended is not None and ended.commit is not None and {*buffers} == {memory.staging._buffer}
    assert [entry.key for entry in store.list("commits/")] == [ended.commit.key]
    assert read_state(store, ended.commit)["scheduler"] == {"last_epoch": 7}


def test_a_hanging_save_is_abandoned_and_the_next_one_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that never returns costs its save, not later ones; each abandoned save gives the next more time."""
    monkeypatch.setattr(save_thread, "LEAST_S", 0.05)
    store, memory = HeldStore(tmp_path), SaveMemory()
    store.may_create.set()
    background = open_saves(store, memory)
    background.begin(small_state(1), facts(1))
    hung = background._flight
    assert store.is_writing.wait(DEADLINE_S)
    ended = background.wait()
    assert ended is not None and ended.step == 1 and isinstance(ended.error, StorageError)
    assert "made no progress" in str(ended.error) and str(tmp_path) in str(ended.error)
    assert background.is_owed and not background.is_busy and memory.timeout.limit_s(0) == pytest.approx(0.1)
    monkeypatch.setattr(save_thread, "LEAST_S", DEADLINE_S)
    healthy = threading.Event()
    monkeypatch.setattr(store, "may_write", healthy)  # the first write stays blocked
    healthy.set()
    background.begin(small_state(2), facts(2))
    ended = background.wait()
    assert ended is not None and ended.commit is not None and ended.commit.step == 2 and not background.is_owed
    assert memory.timeout.limit_s(0) == DEADLINE_S
    assert hung is not None and not hung.ended.is_set()


def test_a_large_part_may_take_long_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload shows no progress before it ends: slow storage gets time in proportion to the bytes."""
    monkeypatch.setattr(save_thread, "LEAST_S", 0.05)
    monkeypatch.setattr(save_thread, "SLOWEST_BYTES_S", 1.0)
    store = HeldStore(tmp_path)
    store.may_create.set()
    background = open_saves(store)
    background.begin({"model": {"w": torch.zeros(100_000)}}, facts(1))
    threading.Timer(0.5, store.may_write.set).start()
    ended = background.wait()
    assert ended is not None and ended.commit is not None


def test_a_store_that_hangs_when_it_is_looked_at_blocks_nobody(tmp_path: Path) -> None:
    """The state is copied before the store has answered, so training continues; the abandoned save writes nothing."""
    is_looking, may_look, store = threading.Event(), threading.Event(), LocalStore(tmp_path)

    def look(parent: CommitRecord | None) -> None:
        is_looking.set()
        assert may_look.wait(2 * DEADLINE_S), "never let through"

    background = Saves(store, CommitWriter(store, Heads(), 1, None, look), 1, Role(0, 1, "world"), SaveMemory())
    background.begin(small_state(1), facts(1))
    flight = background._flight
    assert flight is not None and is_looking.wait(DEADLINE_S)
    assert flight.staged.wait(DEADLINE_S), "training waits for the store"
    background.await_staging()
    background.abandon()
    may_look.set()
    assert flight.ended.wait(DEADLINE_S) and store.list("") == []


class MuteHeads(Heads):
    """Fails the first publish, and does not answer the second."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def publish(self, term: int, commit: str) -> None:
        super().publish(term, commit)
        if len(self.published) == 1:
            raise StorageError("no answer")
        self.is_asked.set()
        assert self.may_answer.wait(DEADLINE_S), "never let through"


def test_a_commit_that_does_not_become_the_head_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step is published again without a copy: waiting for the copy, or abandoning it, returns."""
    monkeypatch.setattr("elastic_train.checkpoint.saving.save_thread.PUBLISH_PATIENCE_S", 0.0)
    fence = MuteHeads()
    background = open_saves(LocalStore(tmp_path), fence=fence)
    background.begin(small_state(1), facts(1))
    ended = background.wait()
    assert ended is not None and isinstance(ended.error, StorageError)
    background.begin(small_state(1), facts(1))
    assert fence.is_asked.wait(DEADLINE_S)
    abandoning = threading.Thread(target=background.abandon, daemon=True)
    abandoning.start()
    abandoning.join(DEADLINE_S / 2)
    is_held_up = abandoning.is_alive()
    fence.may_answer.set()
    assert not is_held_up


@pytest.mark.parametrize("wakes_first", [False, True])
def test_a_hanging_publish_does_not_undo_later_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes_first: bool
) -> None:
    """A record that its store creates late is not an ancestor of later commits, nor the head."""
    monkeypatch.setattr("elastic_train.checkpoint.saving.save_thread.PUBLISH_PATIENCE_S", 0.0)
    store, fence = HeldStore(tmp_path), Heads()
    store.may_write.set()
    background = open_saves(store, fence=fence)
    background.begin(small_state(1), facts(1))
    hung = background._flight
    assert hung is not None and store.is_creating.wait(DEADLINE_S)
    monkeypatch.setattr(save_thread, "LEAST_S", 0.05)
    ended = background.wait()
    assert ended is not None and ended.commit is None and isinstance(ended.error, StorageError)
    monkeypatch.setattr(save_thread, "LEAST_S", DEADLINE_S)
    late, store.may_create = store.may_create, threading.Event()
    if wakes_first:
        late.set()
        assert hung.ended.wait(DEADLINE_S)
    store.may_create.set()
    for step in (2, 3):
        background.begin(small_state(step), facts(step))
        ended = background.wait()
        assert ended is not None and ended.commit is not None
    late.set()
    assert hung.ended.wait(DEADLINE_S)
    steps = [1, 2, 3] if wakes_first else [2, 3]
    assert [int(commit[-17:-5]) for commit in fence.published] == steps
    head = discover(LocalStore(tmp_path)).head
    assert head is not None and head == ended.commit and len(store.list("commits/")) == 3


class LateStore(HeldStore):
    """Creates a record without telling: it stays silent until it may answer, or says that it does not know."""

    def __init__(self, root: Path, num_unknown: int) -> None:
        super().__init__(root)
        self.may_write.set()
        self._num_unknown = num_unknown

    def create(self, key: str, content: bytes) -> None:
        LocalStore.create(self, key, content)
        if key.startswith("commits/") and self._num_unknown:
            self._num_unknown -= 1
            raise Uncertain("nobody knows")
        if key.startswith("commits/"):
            self.is_creating.set()
            assert self.may_create.wait(DEADLINE_S), "never let through"


@pytest.mark.parametrize("late", ["hangs", "wakes meanwhile", "is unknown"])
def test_the_same_step_saved_again_finds_its_own_late_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """An abandoned record that appears later is its step's commit, and is not mistaken for another writer's."""
    monkeypatch.setattr("elastic_train.checkpoint.saving.save_thread.PUBLISH_PATIENCE_S", 0.0)
    store, fence = LateStore(tmp_path, num_unknown=int(late == "is unknown")), Heads()
    if late == "is unknown":
        store.may_create.set()
        monkeypatch.setattr(stores, "_is_content", unknown)
    background = open_saves(store, fence=fence)
    background.begin(small_state(1), facts(1))
    first = background._flight
    if late != "is unknown":
        assert store.is_creating.wait(DEADLINE_S)
        monkeypatch.setattr(save_thread, "LEAST_S", 0.05)
    ended = background.wait()
    assert first is not None and ended is not None and ended.commit is None and isinstance(ended.error, StorageError)
    assert len(store.list("commits/")) == 1
    monkeypatch.undo()
    if late == "wakes meanwhile":
        store.may_write.clear()
        store.is_writing.clear()
    background.begin(small_state(1), facts(1))
    if late == "wakes meanwhile":
        assert store.is_writing.wait(DEADLINE_S)
        store.may_create.set()
        assert first.ended.wait(DEADLINE_S) and first.commit is not None
        store.may_write.set()
    again = background.wait()
    assert again is not None and again.error is None and again.commit is not None
    store.may_create.set()
    assert first.ended.wait(DEADLINE_S)
    background.begin(small_state(2), facts(2))
    second = background.wait()
    assert second is not None and second.commit is not None and second.commit.parent == again.commit.digest
    assert discover(store) == Discovery(second.commit, ()) and {*fence.published} == {
        again.commit.key,
        second.commit.key,
    }
    verify(store, again.commit)
    attempts = {"/".join(entry.key.split("/")[:3]) for entry in store.list("data/")}
    assert attempts == {again.commit.attempt, second.commit.attempt}


def unknown(store: Store, key: str, content: bytes) -> bool:
    raise Uncertain("nobody knows")


def test_a_started_publish_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next world reads the lineage with the commit in it, not during its creation."""
    monkeypatch.setattr("elastic_train.checkpoint.saving.save_thread.PUBLISH_PATIENCE_S", DEADLINE_S)
    store = HeldStore(tmp_path)
    store.may_write.set()
    background = open_saves(store)
    background.begin(small_state(1), facts(1))
    assert store.is_creating.wait(DEADLINE_S)
    letting_through = threading.Timer(0.1, store.may_create.set)
    letting_through.start()
    background.abandon()
    assert store.may_create.is_set()
    head = discover(store).head
    assert head is not None and head.step == 1
