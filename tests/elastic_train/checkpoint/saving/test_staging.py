"""Staging: copied data is written while the rest is copied, unless training waits for the copy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.commits.reader import discover, read_state
from elastic_train.checkpoint.saving import staging
from elastic_train.checkpoint.saving.staging import Snapshot, Staged, Staging
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Sink
from elastic_train.errors import StorageError
from tests.elastic_train.checkpoint.commit_samples import State, facts
from tests.elastic_train.checkpoint.commits.test_commits import assert_equal_trees
from tests.elastic_train.checkpoint.saving.test_background_saves import DEADLINE_S, all_still, open_saves

DEVICE = torch.device("cuda", 1)
CONTENTS = [memoryview(bytes([number])) for number in range(3)]


def test_only_copied_leaves_are_handed_out() -> None:
    """Each leaf waits until it is marked as copied; a second iteration does not wait."""
    staged, given, is_given = Staged(CONTENTS, lambda: False), [], threading.Semaphore(0)

    def go_through() -> None:
        for content in staged:
            given.append(content)
            is_given.release()

    thread = threading.Thread(target=go_through, daemon=True)
    thread.start()
    for num_there in (1, 3):
        assert given == CONTENTS[: len(given)] and len(given) < num_there
        staged.advance(num_there)
        while len(given) < num_there:
            assert is_given.acquire(timeout=DEADLINE_S)
    thread.join(DEADLINE_S)
    staged.wait()
    assert list(staged) == given == CONTENTS


def test_a_failed_copy_is_raised_in_every_iteration() -> None:
    """The error comes at the first leaf that was not copied, and again at the next iteration."""
    staged = Staged(CONTENTS, lambda: False)
    staged.fail(StorageError("changed"))
    for _ in range(2):
        with pytest.raises(StorageError, match="changed"):
            list(staged)
    with pytest.raises(StorageError, match="changed"):
        staged.wait()


def test_nothing_is_handed_out_while_training_waits() -> None:
    """The first leaf is handed out once the last is copied."""
    is_asked, num_there_then = threading.Event(), []

    def is_awaited() -> bool:
        is_asked.set()
        return True

    staged = Staged(CONTENTS, is_awaited)
    staged.advance(2)
    thread = threading.Thread(target=lambda: num_there_then.extend(staged._num_there for _ in staged), daemon=True)
    thread.start()
    assert is_asked.wait(DEADLINE_S)
    staged.advance(3)
    thread.join(DEADLINE_S)
    assert num_there_then == [3, 3, 3]


class TellingStore(LocalStore):
    """A local store that records every write of a part."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.events: list[str] = []
        self.num_files, self.has_written = 0, threading.Event()

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        self.num_files += 1
        with super().write(key) as file:
            yield _Telling(file, self)


class _Telling:
    def __init__(self, file: Sink, store: TellingStore) -> None:
        self._file, self._store = file, store

    def write(self, content: bytes | memoryview, /) -> int:
        self._store.events.append("written")
        self._store.has_written.set()
        return self._file.write(content)


def two_tensors() -> State:
    """Return a state of two tensors that are copied one after the other."""
    return {"model": {name: torch.arange(3_000_000) + place for place, name in enumerate("ab")}}


@pytest.mark.heavy
@pytest.mark.parametrize("is_awaited", [False, True])
def test_the_rest_is_copied_while_the_beginning_is_written(
    tmp_path: Path, is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If training waits, nothing is written until all is copied. The commit is the same."""
    store, has_begun = TellingStore(tmp_path), threading.Event()
    background = open_saves(store)

    def copied(snapshot: Snapshot, lo: int, hi: int) -> None:
        assert has_begun.wait(DEADLINE_S) and background._flight is not None
        if is_awaited:
            assert background._flight.awaited.wait(DEADLINE_S)
        elif lo:
            assert store.has_written.wait(DEADLINE_S), "nothing is written while the rest is copied"
        store.events.append("copied")

    monkeypatch.setattr(Snapshot, "_check_unchanged", copied)
    background.begin(two_tensors(), facts(1))
    has_begun.set()
    if is_awaited:
        background.await_staging()
    ended = background.wait()
    assert ended is not None and ended.commit is not None
    assert store.events[:2] == ["copied", "copied" if is_awaited else "written"]
    assert_equal_trees(read_state(store, ended.commit), two_tensors())


def test_a_change_while_the_beginning_is_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written part is removed, and there is no retry: the state of the boundary is gone."""
    store, state, check = TellingStore(tmp_path), two_tensors(), Snapshot._check_unchanged

    def changing(snapshot: Snapshot, lo: int, hi: int) -> None:
        if lo:
            assert store.has_written.wait(DEADLINE_S)
            state["model"]["b"].add_(1)  # type: ignore[index]
        check(snapshot, lo, hi)

    monkeypatch.setattr(Snapshot, "_check_unchanged", changing)
    background = open_saves(store)
    background.begin(state, facts(1), is_still=all_still)
    ended = background.wait()
    assert ended is not None and ended.commit is None and "'model.b' changed while it was read" in str(ended.error)
    assert store.num_files == 1
    assert discover(store).head is None and store.list("data/") == []


def test_memory_that_is_being_made_is_waited_for_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that comes earlier uses the same memory; if there is no memory, the save reports it."""
    is_asked, may_go, num_made = threading.Event(), threading.Event(), []

    def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        is_asked.set()
        assert may_go.wait(DEADLINE_S)
        num_made.append(num_bytes)
        if num_bytes > 100:
            raise MemoryError("no more pages")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(staging, "pinned", pinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    memory, taken = Staging(), []
    memory.prepare(100, DEVICE)
    assert is_asked.wait(DEADLINE_S)
    save = threading.Thread(target=lambda: taken.append(memory.buffer(80, DEVICE)), daemon=True)
    save.start()
    may_go.set()
    save.join(DEADLINE_S)
    assert num_made == [100] and taken == [memory.buffer(100, DEVICE)]
    is_asked.clear()
    memory.prepare(200, DEVICE)
    assert is_asked.wait(DEADLINE_S)
    with pytest.raises(StorageError, match="cannot allocate 200 bytes of host memory to stage a save: no more pages"):
        memory.buffer(200, DEVICE)
