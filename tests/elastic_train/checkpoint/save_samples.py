"""Stores that block, fill up or do not answer, and saves on them, for the tests of saves."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.checkpoint.commits.reader import discover
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.saving.background_saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.store import Sink, Store
from elastic_train.world.fencing import StoreFence
from tests.conftest import PATIENCE_S

DEADLINE_S = PATIENCE_S


class HeldStore(LocalStore):
    """A local store whose file writes and record creations wait until they are permitted."""

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
    """A local store on a disk that is full for a number of files."""

    def __init__(self, root: Path, num_left: int) -> None:
        super().__init__(root)
        self.num_left = num_left

    @contextlib.contextmanager
    def write(self, key: str) -> Iterator[Sink]:
        with self._translating("write", key), super().write(key) as file:
            self.num_left -= 1
            if self.num_left >= 0:
                file.write(b"half of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file


class Heads:
    """A fence that permits every publish, and records them."""

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
    """Declare that only updates change any leaf."""
    return True


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.checkpoint.saving.save_thread.RETRY_PAUSES_S", (0.0, 0.0))
