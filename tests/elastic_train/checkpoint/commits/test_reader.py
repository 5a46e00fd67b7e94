"""A file that opens but cannot be read to its end: a bad sector is damage, a failing server is not."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFile

from elastic_train.checkpoint.commits.reader import discover, load
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import Store
from elastic_train.errors import StorageError
from tests.elastic_train.checkpoint.commit_samples import commit_steps, small_state
from tests.elastic_train.checkpoint.commits.test_damage import files_of


class Failing(io.FileIO):
    """A file that opens but cannot be read."""

    code = errno.EIO

    def readinto(self, buffer: object, /) -> int:
        raise OSError(self.code, os.strerror(self.code))

    def readall(self) -> bytes:
        raise OSError(self.code, os.strerror(self.code))


def failing_at(bad: Path, code: int, patch: pytest.MonkeyPatch) -> None:
    """Make reads of one file fail."""
    open_file = Path.open

    def fail(path: Path, mode: str) -> object:
        return io.BufferedReader(Failing(path)) if path == bad else open_file(path, mode)

    patch.setattr(Path, "open", fail)
    patch.setattr(Failing, "code", code)


@pytest.mark.parametrize("file", [0, 1, 2], ids=["record", "data", "metadata"])
def test_a_bad_sector_is_passed_over(local_store: Store, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that the medium cannot return is damaged; a load that hits it says where."""
    first, second = commit_steps(local_store, 1, 2)
    bad = files_of(local_store, second)[file]
    failing_at(bad, errno.EIO, monkeypatch)
    found = discover(local_store)
    assert found.head == first
    assert str(bad) in found.skipped[0][1]
    with pytest.raises(StorageError, match="cannot read") if file else contextlib.nullcontext():
        load(local_store, second, small_state(0))


@pytest.mark.parametrize("file", [0, 1, 2], ids=["record", "data", "metadata"])
def test_a_server_failing_in_the_middle_of_a_read_is_not_damage(
    local_store: Store, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be complete if the error has another cause: the search ends, and is retried later."""
    _, second = commit_steps(local_store, 1, 2)
    failing_at(files_of(local_store, second)[file], errno.ESTALE, monkeypatch)
    with pytest.raises(StorageError, match="cannot read"):
        discover(local_store)


@pytest.mark.parametrize("kind", ["commits", "data"])
def test_an_object_store_failing_in_the_middle_of_a_read_is_not_damage(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system's error asks for fewer requests: the search ends with it."""
    store = open_store(f"memory://{kind}-busy/run")
    commit_steps(store, 1, 2)
    read = MemoryFile.read

    def busy(file: MemoryFile, size: int | None = -1) -> bytes:
        if f"/{kind}/" in str(file.path):
            raise OSError(errno.EBUSY, "please reduce your request rate")
        return read(file, size)

    monkeypatch.setattr(MemoryFile, "read", busy, raising=False)
    with pytest.raises(StorageError, match="reduce your request rate"):
        discover(store)
