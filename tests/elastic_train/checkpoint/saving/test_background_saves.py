"""Background saves: a copy at the boundary, one in flight, parts by rank, and worlds that end during a save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.format.dcp import weights_digest
from elastic_train.checkpoint.format.layout import leaves_by_path, plan_attempt
from elastic_train.checkpoint.saving import save_thread
from elastic_train.checkpoint.saving.background_saves import SaveMemory
from elastic_train.checkpoint.saving.staging import Snapshot
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import BLOCK_BYTES, Sink
from elastic_train.errors import CommitError, FencedError, StorageError
from elastic_train.world.fencing import StoreFence
from tests.elastic_train.checkpoint.commit_samples import State, facts, small_state, take_steps, trained
from tests.elastic_train.checkpoint.save_samples import (
    DEADLINE_S,
    FullStore,
    HeldStore,
    all_still,
    open_saves,
    quick_retries,
)

__all__ = ["quick_retries"]


def test_changes_during_a_save_are_not_in_the_commit(tmp_path: Path) -> None:
    """The copy is of the step boundary: training changes every tensor during the upload, but no bit of the commit."""
    store = HeldStore(tmp_path)
    store.may_create.set()
    background = open_saves(store)
    model, optimizer = trained(3)
    state: State = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = {path: leaf.clone() for path, leaf in leaves_by_path(state).items() if isinstance(leaf, torch.Tensor)}
    digest = weights_digest(model, {})
    background.begin(
        state, facts(3), is_still=lambda path: "running" not in str(path) and "num_batches" not in str(path)
    )
    model(torch.randn(4, 6))  # a forward pass changes the batch norm's buffers at once
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
    """A store during whose writes the caller's bytes change after they were hashed."""

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


def test_a_staged_buffer_that_changes_during_its_upload_is_detected(tmp_path: Path) -> None:
    """Whichever hash saw the change, they disagree on the file, and discovery and loads refuse it."""
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
    """An update that does not wait fails the save, and no inconsistent state is published; clones are not affected."""
    state = small_state(1)
    part = plan_attempt(state).parts[0]
    memory = SaveMemory().staging
    for is_still in (False, True):
        snapshot = Snapshot(part, leaves_by_path(state), lambda path: is_still)  # noqa: B023 - called at once
        state["model"]["w"].add_(1)  # type: ignore[index]
        buffer = memory.buffer(snapshot.num_bytes, None)
        if is_still:
            with pytest.raises(StorageError, match=r"'model\.w' changed while it was read"):
                snapshot.copy(buffer, lambda: None, lambda num_there: None)
        else:
            snapshot.copy(buffer, lambda: None, lambda num_there: None)
            (content,) = buffer.contents_of(part)
            assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == [1.0] * 5


def test_the_last_save_is_written_from_where_the_state_is(tmp_path: Path) -> None:
    """It needs no staging memory, and training does not wait for it; it fails if the state changes nevertheless."""
    memory, store = SaveMemory(), HeldStore(tmp_path)
    store.may_create.set()
    memory.staging.buffer = None  # type: ignore[assignment,method-assign]  # nobody asks for it
    background = open_saves(store, memory)
    state = small_state(1)
    background.begin(state, facts(1), is_last=True)
    assert store.is_writing.wait(DEADLINE_S)
    background.await_staging()
    assert background.is_busy
    store.may_write.set()
    ended = background.wait()
    assert ended is not None and ended.commit is not None
    saved = read_state(store, ended.commit)
    assert torch.equal(saved["model"]["w"], state["model"]["w"])  # type: ignore[index]
    store.may_write.clear()
    store.is_writing.clear()
    background.begin(state, facts(2), is_last=True)
    assert store.is_writing.wait(DEADLINE_S)
    state["model"]["w"].add_(1)  # type: ignore[index]
    store.may_write.set()
    ended = background.wait()
    assert ended is not None and ended.commit is None and "'model.w' changed while it was read" in str(ended.error)
    assert discover(store).head is not None and discover(store).head.step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("num_failures", "is_saved"), [(2, True), (3, False)])
def test_a_full_disk_in_the_writer_thread_is_a_failed_save(tmp_path: Path, num_failures: int, is_saved: bool) -> None:
    """It is retried, then reported; the old head stays, nothing else is left, and the next save works."""
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


@pytest.mark.parametrize("without", ["save of", "copy of", "writing", "hashing", "syncing"])
def test_a_machine_without_threads_fails_a_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    """The next one succeeds, once threads are free again."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith(without):
            raise RuntimeError("can't start new thread")
        start(thread)

    saves, state = open_saves(LocalStore(tmp_path)), {"model": {"w": torch.ones(12_000_000)}}
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refusing)
        saves.begin(state, facts(1))
        saves.await_staging()
        ended = saves.wait()
    assert ended is not None and isinstance(ended.error, StorageError) and without in str(ended.error)
    saves.begin(state, facts(2))
    ended = saves.wait()
    assert ended is not None and ended.commit is not None and ended.commit.step == 2


def test_a_world_that_breaks_during_a_save_publishes_nothing(tmp_path: Path) -> None:
    """The next world begins while the old thread is stuck in a write, whose later return has no effect."""
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
    assert flight.commit is None and isinstance(flight.outcome().error, save_thread.Abandoned)
    found = discover(store)
    assert ended is not None and found.head == ended.commit and found.skipped == () and not new.is_owed
    assert {"/".join(entry.key.split("/")[:3]) for entry in store.list("data/")} == {found.head.attempt}  # type: ignore[union-attr]
    assert read_state(store, found.head)["scheduler"] == {"last_epoch": 7}  # type: ignore[arg-type]


def test_a_fenced_save_ends_with_the_fences_error(tmp_path: Path) -> None:
    """A newer term claimed while the files were written keeps the commit from becoming the head."""
    store = HeldStore(tmp_path)
    store.may_create.set()
    background = open_saves(store)
    background.begin(small_state(1), facts(1))
    newer = StoreFence(store).claim()
    store.may_write.set()
    ended = background.wait()
    assert ended is not None and ended.commit is None
    assert isinstance(ended.error, FencedError) and f"term {newer} was claimed" in str(ended.error)
