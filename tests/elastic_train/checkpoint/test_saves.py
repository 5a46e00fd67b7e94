"""Saves in the background: a copy of the boundary, one in flight, parts by rank, and worlds that end in the middle."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commit_samples import State, facts, small_state, take_steps, trained

from elastic_train.checkpoint import (
    CommitWriter,
    Discovery,
    Role,
    SaveMemory,
    Saves,
    Store,
    discover,
    giving_up,
    read_state,
    stores,
    verify,
)
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.layout import leaves_by_path, plan_attempt
from elastic_train.checkpoint.local import LocalStore
from elastic_train.checkpoint.staging import Snapshot
from elastic_train.checkpoint.stores import Sink, Uncertain
from elastic_train.errors import CommitError, FencedError, StorageError
from elastic_train.fencing import StoreFence
from elastic_train.weights import weights_digest

DEADLINE_S = 30.0


class HeldStore(LocalStore):
    """A local store whose writes of files, and creations of records, wait until they are let through."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_write, self.may_create = threading.Event(), threading.Event()
        self.is_writing, self.is_creating = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with super().write(key) as file:
            self.is_writing.set()
            assert self.may_write.wait(DEADLINE_S), "never let through"
            yield file

    def create(self, key: str, content: bytes) -> None:
        if key.startswith("commits/"):
            self.is_creating.set()
            assert self.may_create.wait(DEADLINE_S), "never let through"
        super().create(key, content)


class FullStore(LocalStore):
    """A local store on a disk that is full for so many files."""

    def __init__(self, root: Path, num_left: int) -> None:
        super().__init__(root)
        self.num_left = num_left

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with self._telling("write", key), super().write(key) as file:
            self.num_left -= 1
            if self.num_left >= 0:
                file.write(b"half of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file


class Heads:
    """A fence that lets everybody publish, and remembers what."""

    def __init__(self) -> None:
        self.published: list[str] = []

    def publish(self, term: int, commit: str) -> None:
        self.published.append(commit)


def open_saves(
    store: Store,
    memory: SaveMemory | None = None,
    *,
    term: int | None = None,
    place: int = 0,
    of: int = 1,
    fence: Heads | None = None,
) -> Saves:
    """Open one rank's saves in a world, under a new term if none is given."""
    claims = StoreFence(LocalStore(store.url) if fence else store)
    term = claims.claim() if term is None else term
    commits = CommitWriter(store, fence or claims, term, discover(store).head)
    return Saves(store, commits, term, Role(place, of, f"world{term}"), memory or SaveMemory())


def all_still(path: object) -> bool:
    """Say that only updates change the state."""
    return True


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.checkpoint.flight.RETRY_PAUSES_S", (0.0, 0.0))


def test_what_changes_while_a_save_is_written_is_not_in_the_commit(tmp_path: Path) -> None:
    """The copy is of the step boundary: training changes every tensor during the upload, and no bit of the commit."""
    store = HeldStore(tmp_path)
    store.may_create.set()
    background = open_saves(store)
    model, optimizer = trained(3)
    state: State = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = {path: leaf.clone() for path, leaf in leaves_by_path(state).items() if isinstance(leaf, torch.Tensor)}
    digest = weights_digest(model)
    background.begin(
        state, facts(3), is_still=lambda path: "running" not in str(path) and "num_batches" not in str(path)
    )
    model(torch.randn(4, 6))  # a forward changes the batch norm's buffers at once
    background.await_staging()
    take_steps(model, optimizer, 3, 5)
    assert background.is_busy and background.collect() is None
    store.may_write.set()
    ended = background.wait()
    assert ended is not None and ended.commit is not None and not background.is_busy
    saved = leaves_by_path(read_state(store, ended.commit))
    assert all(torch.equal(saved[path], tensor) for path, tensor in before.items())  # type: ignore[arg-type]
    assert any(not torch.equal(before[path], leaf) for path, leaf in leaves_by_path(state).items() if path in before)  # type: ignore[arg-type]
    assert ended.commit.weights_sha256 == digest


class RestlessStore(LocalStore):
    """A store during whose writes the bytes that it is given change behind its back, once they have been hashed."""

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with super().write(key) as file:
            yield RestlessFile(file) if key.endswith(".distcp") else file


class RestlessFile:
    """Flips a bit in the middle of the first whole block, in the memory from which it is written."""

    def __init__(self, file: Sink) -> None:
        self._file, self._is_done = file, False

    def write(self, content: bytes | memoryview, /) -> int:
        if not self._is_done and len(content) == BLOCK_BYTES and isinstance(content, memoryview):
            content[len(content) // 2] ^= 4
            self._is_done = True
        return self._file.write(content)


def test_a_staged_buffer_that_changes_during_its_upload_is_seen(tmp_path: Path) -> None:
    """Whichever of the hashes saw the change, they do not agree on the file, and discovery and loads refuse it."""
    first = open_saves(LocalStore(tmp_path))
    first.begin({"model": {"w": torch.ones(1_000_000)}}, facts(1))
    old = first.wait()
    background = open_saves(RestlessStore(tmp_path))
    background.begin({"model": {"w": torch.full((1_000_000,), 2.0)}}, facts(2))
    ended = background.wait()
    assert old is not None and ended is not None and ended.commit is not None
    found = discover(LocalStore(tmp_path))
    assert found.head == old.commit
    ((key, why),) = found.skipped
    assert key == ended.commit.key and "does not match" in why
    with pytest.raises(CommitError, match="checksum"):
        read_state(LocalStore(tmp_path), ended.commit)


def test_a_change_before_the_copy_fails_the_save(tmp_path: Path) -> None:
    """Who updates without waiting is told, and no third state is published; what was cloned is not affected."""
    state = small_state(1)
    part = plan_attempt(state).parts[0]
    memory = SaveMemory().staging
    for is_still in (False, True):
        snapshot = Snapshot(part, leaves_by_path(state), lambda path: is_still)  # noqa: B023 - called at once
        state["model"]["w"].add_(1)  # type: ignore[index]
        buffer = memory.buffer(snapshot.num_bytes, is_pinned=False)
        if is_still:
            with pytest.raises(StorageError, match=r"'model\.w' changed while it was copied"):
                snapshot.copy(buffer, lambda: None, lambda num_there: None)
        else:
            snapshot.copy(buffer, lambda: None, lambda num_there: None)
            (content,) = buffer.contents_of(part)
            assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == [1.0] * 5


@pytest.mark.parametrize(("num_failures", "is_saved"), [(2, True), (3, False)])
def test_a_full_disk_in_the_writer_thread_is_a_failed_save(tmp_path: Path, num_failures: int, is_saved: bool) -> None:
    """It is tried again, then reported; the old head stays, nothing else is left, and the next save works."""
    first = open_saves(LocalStore(tmp_path))
    first.begin(small_state(1), facts(1))
    old = first.wait()
    store = FullStore(tmp_path, num_failures)
    background = open_saves(store)
    background.begin(small_state(2), facts(2))
    ended = background.wait()
    assert old is not None and ended is not None
    assert (ended.commit is not None) == is_saved
    if not is_saved:
        assert isinstance(ended.error, StorageError) and "No space left" in str(ended.error)
        assert discover(store).head == old.commit
        assert {entry.key.split("/")[1] for entry in store.list("data/")} == {"step-000000000001"}
        background.begin(small_state(3), facts(3))
        ended = background.wait()
    assert ended is not None and ended.commit is not None and old.commit is not None
    assert ended.commit.parent == old.commit.digest
    assert discover(store).head == ended.commit


def test_a_world_that_breaks_in_a_save_publishes_nothing_of_it(tmp_path: Path) -> None:
    """The next world begins while the old thread is stuck in a write, which comes back, unseen and harmless."""
    stuck, memory = HeldStore(tmp_path), SaveMemory()
    old = open_saves(stuck, memory)
    old.begin(small_state(1), facts(1), is_still=all_still)
    flight = old._flight
    assert flight is not None and stuck.is_writing.wait(DEADLINE_S)
    assert old.abandon() is None

    store = LocalStore(tmp_path)
    new = open_saves(store, memory)
    assert new.is_owed
    new.begin(small_state(7), facts(1), is_still=all_still)
    ended = new.wait()
    stuck.may_write.set()
    assert flight.ended.wait(DEADLINE_S)
    assert flight.commit is None and isinstance(flight.outcome().error, giving_up.Abandoned)
    found = discover(store)
    assert ended is not None and found.head == ended.commit and found.skipped == () and not new.is_owed
    assert {"/".join(entry.key.split("/")[:3]) for entry in store.list("data/")} == {found.head.attempt}  # type: ignore[union-attr]
    assert read_state(store, found.head)["scheduler"] == {"last_epoch": 7}  # type: ignore[arg-type]


def test_stuck_writers_take_no_memory_and_block_nobody(tmp_path: Path) -> None:
    """Saves that world after world left in a store that hangs share one buffer, and when they wake publish nothing."""
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


def test_a_save_that_hangs_is_given_up_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that never returns costs its save, not the later ones; each that is given up gives the next more time."""
    monkeypatch.setattr(giving_up, "LEAST_S", 0.05)
    store, memory = HeldStore(tmp_path), SaveMemory()
    store.may_create.set()
    background = open_saves(store, memory)
    background.begin(small_state(1), facts(1))
    hung = background._flight
    ended = background.wait()
    assert ended is not None and ended.step == 1 and isinstance(ended.error, StorageError)
    assert "got no further" in str(ended.error) and str(tmp_path) in str(ended.error)
    assert background.is_owed and not background.is_busy and memory.patience.limit_s(0) == pytest.approx(0.1)
    monkeypatch.setattr(giving_up, "LEAST_S", DEADLINE_S)
    healthy = threading.Event()
    monkeypatch.setattr(store, "may_write", healthy)  # the first stays where it is
    healthy.set()
    background.begin(small_state(2), facts(2))
    ended = background.wait()
    assert ended is not None and ended.commit is not None and ended.commit.step == 2 and not background.is_owed
    assert memory.patience.limit_s(0) == DEADLINE_S
    assert hung is not None and not hung.ended.is_set()


def test_a_large_part_may_be_silent_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload tells nothing before it is through: slow storage is given the time that so many bytes take."""
    monkeypatch.setattr(giving_up, "LEAST_S", 0.05)
    monkeypatch.setattr(giving_up, "SLOWEST_BYTES_S", 1.0)
    store = HeldStore(tmp_path)
    store.may_create.set()
    background = open_saves(store)
    background.begin({"model": {"w": torch.zeros(100_000)}}, facts(1))
    threading.Timer(0.5, store.may_write.set).start()
    ended = background.wait()
    assert ended is not None and ended.commit is not None


class MuteHeads(Heads):
    """Lets the first publish fail, and does not answer the second."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def publish(self, term: int, commit: str) -> None:
        super().publish(term, commit)
        if len(self.published) == 1:
            raise StorageError("no answer")
        self.is_asked.set()
        assert self.may_answer.wait(DEADLINE_S), "never let through"


def test_a_commit_that_exists_and_does_not_become_the_head_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step is published again, and nothing is copied: who waits for the copy, or gives it up, goes on."""
    monkeypatch.setattr("elastic_train.checkpoint.flight.PUBLISH_PATIENCE_S", 0.0)
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
def test_a_publish_that_hangs_sets_no_later_commit_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wakes_first: bool
) -> None:
    """A record that its store creates late is no ancestor of what was published since, nor the head."""
    monkeypatch.setattr(giving_up, "LEAST_S", 0.05)
    monkeypatch.setattr("elastic_train.checkpoint.flight.PUBLISH_PATIENCE_S", 0.0)
    store, fence = HeldStore(tmp_path), Heads()
    store.may_write.set()
    background = open_saves(store, fence=fence)
    background.begin(small_state(1), facts(1))
    hung = background._flight
    assert hung is not None and store.is_creating.wait(DEADLINE_S)
    ended = background.wait()
    assert ended is not None and ended.commit is None and isinstance(ended.error, StorageError)
    monkeypatch.setattr(giving_up, "LEAST_S", DEADLINE_S)
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
    """Creates a record, and lets nobody know: it is silent until it may answer, or says that it does not know."""

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
    """What was given up and came to exist is the commit of its step, whoever waits for it: not another writer's."""
    monkeypatch.setattr("elastic_train.checkpoint.flight.PUBLISH_PATIENCE_S", 0.0)
    store, fence = LateStore(tmp_path, num_unknown=int(late == "is unknown")), Heads()
    if late == "is unknown":
        store.may_create.set()
        monkeypatch.setattr(stores, "_is_content", unknown)
    background = open_saves(store, fence=fence)
    background.begin(small_state(1), facts(1))
    first = background._flight
    if late != "is unknown":
        assert store.is_creating.wait(DEADLINE_S)
        monkeypatch.setattr(giving_up, "LEAST_S", 0.05)
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


def test_a_publish_that_has_begun_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next world reads the lineage with the commit in it, not while it comes to exist."""
    monkeypatch.setattr("elastic_train.checkpoint.flight.PUBLISH_PATIENCE_S", DEADLINE_S)
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


def test_a_fenced_save_ends_with_the_fences_error(tmp_path: Path) -> None:
    """A newer term that was claimed while the files were written keeps the commit from becoming the head."""
    store = HeldStore(tmp_path)
    store.may_create.set()
    background = open_saves(store)
    background.begin(small_state(1), facts(1))
    newer = StoreFence(store).claim()
    store.may_write.set()
    ended = background.wait()
    assert ended is not None and ended.commit is None
    assert isinstance(ended.error, FencedError) and f"term {newer} was claimed" in str(ended.error)
