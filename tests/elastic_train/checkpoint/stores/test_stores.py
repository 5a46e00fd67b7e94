"""The contract of every store, checked on every kind of store."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic_train.checkpoint.stores import store as stores
from elastic_train.checkpoint.stores.disk import RealDisk
from elastic_train.checkpoint.stores.fsspec_store import FsspecStore
from elastic_train.checkpoint.stores.local import LocalStore
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import (
    DeadlineStore,
    KeyMissing,
    KeyTaken,
    NotAllowed,
    Store,
    Uncertain,
    create_once,
)
from elastic_train.errors import ConfigError, StorageError
from elastic_train.world.fencing import StoreFence
from tests.conftest import PATIENCE_S


def test_a_created_key_reads_back(store: Store) -> None:
    store.create("commits/a.json", b"content")
    assert stores.read(store, "commits/a.json") == b"content"


def test_a_key_is_created_once(store: Store) -> None:
    """A second create is refused and changes nothing."""
    store.create("commits/a.json", b"first")
    with pytest.raises(KeyTaken):
        store.create("commits/a.json", b"second")
    assert stores.read(store, "commits/a.json") == b"first"


def test_a_race_has_at_most_one_winner(store: Store) -> None:
    """Of many concurrent creates of one key, one wins, and its content stays; a claimed create may have no winner."""
    contents = [f"writer {number}".encode() for number in range(8)]

    def create(content: bytes) -> bool:
        try:
            store.create("commits/a.json", content)
        except KeyTaken:
            return False
        return True

    with ThreadPoolExecutor(len(contents)) as pool:
        is_winner = list(pool.map(create, contents))
    least = 0 if store.url.startswith("plain") else 1
    assert least <= is_winner.count(True) <= 1
    if any(is_winner):
        assert stores.read(store, "commits/a.json") == contents[is_winner.index(True)]


def test_a_retried_create_recognises_itself(store: Store) -> None:
    """A create that is refused because its own first try succeeded still counts as successful."""
    assert create_once(store, "terms/1.json", b"mine")
    assert create_once(store, "terms/1.json", b"mine")
    assert not create_once(store, "terms/1.json", b"another's")


def test_a_written_file_reads_back_in_parts(store: Store) -> None:
    """A file can be read from any offset."""
    with store.write("data/x/file") as sink:
        sink.write(b"0123")
        sink.write(memoryview(b"456789"))
    with store.open("data/x/file") as file:
        file.seek(3)
        assert file.read(4) == b"3456"


def test_a_failed_write_leaves_nothing(store: Store) -> None:
    """A file whose writing ended with an error does not exist."""
    with pytest.raises(ZeroDivisionError), store.write("data/x/file") as sink:
        sink.write(b"half")
        raise ZeroDivisionError
    assert store.list("data/") == []


def test_a_listing_names_what_is_below_a_folder(store: Store) -> None:
    """A listing is sorted, has sizes and ages, and is limited to the folder."""
    for key in ("data/b/2", "data/a/1", "database/3", "commits/4"):
        store.create(key, key.encode())
    assert [(entry.key, entry.size) for entry in store.list("data/")] == [("data/a/1", 8), ("data/b/2", 8)]
    assert all(entry.modified_at for entry in store.list("data/"))
    assert store.list("nothing/") == []


def test_a_folder_deleted_during_a_listing_is_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention deletes commits, and readers release holds, during listings."""
    store, scan = LocalStore(tmp_path), os.scandir
    for key in ("data/a/1", "data/b/2"):
        store.create(key, b"x")

    def scan_late(path: str | os.PathLike[str]) -> object:
        if Path(path).name == "a":
            store.delete("data/a/1")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert [entry.key for entry in store.list("data/")] == ["data/b/2"]


def test_a_folder_that_is_removed_before_its_first_file_is_made_again(tmp_path: Path) -> None:
    """A reader that releases the last hold in a folder removes the folder while the next reader takes its hold."""

    class Losing(RealDisk):
        """Loses the folder before every other file."""

        is_lost = False

        def create(self, path: Path) -> BinaryIO:
            self.is_lost = not self.is_lost
            if self.is_lost:
                path.parent.rmdir()
            return super().create(path)

    store = LocalStore(tmp_path, Losing())
    store.create("holds/1-2/9-a", b"x")
    with store.write("data/x/file") as sink:
        sink.write(b"y")
    assert [entry.key for entry in store.list("")] == ["data/x/file", "holds/1-2/9-a"]


def test_a_folder_that_may_not_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without permission to list, it cannot be known to be empty."""
    store, scan = LocalStore(tmp_path), os.scandir
    store.create("commits/a.json", b"x")

    def scan_denied(path: str | os.PathLike[str]) -> object:
        if Path(path).name == "commits":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_denied)
    with pytest.raises(StorageError, match="commits: cannot list: Permission denied"):
        store.list("commits/")


@pytest.mark.parametrize(
    ("number", "is_refused"), [(errno.EROFS, True), (errno.EACCES, True), (errno.EIO, False), (errno.ENOSPC, False)]
)
def test_who_may_not_write_is_told_apart_from_who_cannot_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    """A refusal needs a person to fix it, the other error may pass."""
    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(StorageError, match=f"cannot create: {os.strerror(number)}") as caught:
        store.create("commits/a.json", b"x")
    assert isinstance(caught.value, NotAllowed) == is_refused


def test_a_bucket_that_refuses_writes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore("memory://denied")
    monkeypatch.setattr(store._fs, "rm_file", Mock(side_effect=PermissionError("Access Denied")))
    with pytest.raises(NotAllowed, match="cannot delete: Access Denied"):
        store.delete("data/a/1")


def test_deleting_is_repeatable(store: Store) -> None:
    """A deleted key is gone; deleting it again is not an error."""
    store.create("data/a/1", b"x")
    store.delete("data/a/1")
    store.delete("data/a/1")
    assert store.list("data/") == []
    with pytest.raises(KeyMissing):
        stores.read(store, "data/a/1")


def test_an_unknown_protocol_is_a_config_error() -> None:
    """A URL that nothing can open is refused before training starts."""
    with pytest.raises(ConfigError, match="nosuch"):
        open_store("nosuch://bucket/run")


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    """file:// and a plain path name the same store."""
    assert open_store(f"file://{tmp_path}").url == open_store(str(tmp_path)).url


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A path through a file fails with a storage error that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/run"):
        open_store(str(tmp_path / "file" / "run")).create("commits/a.json", b"")


def http_error(status: int) -> OSError:
    """Return an error as s3fs raises it for an HTTP status."""
    cause = OSError("from the SDK")
    cause.response = {"ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
    error = OSError("translated")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("answers", "expected"),
    [([409, None], None), ([412], KeyTaken), ([409, 412], KeyTaken), ([409] * 9, Uncertain), ([500], Uncertain)],
)
def test_every_http_status_of_a_conditional_create_is_handled(
    monkeypatch: pytest.MonkeyPatch, answers: list[int | None], expected: type[StorageError] | None
) -> None:
    """409 is retried a bounded number of times; 412 means taken; anything else leaves the outcome open."""
    store = FsspecStore("memory://answers")
    left = list(answers)

    def answer(self: MemoryFileSystem, path: str, value: bytes, mode: str) -> None:
        status = left.pop(0)
        if status is not None:
            raise http_error(status)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", answer)
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        store.create("commits/a.json", b"")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda store: store.create("commits/a.json", b"x"), Uncertain),
        (lambda store: store.open("commits/a.json"), StorageError),
        (lambda store: store.list("commits/"), StorageError),
        (lambda store: store.delete("commits/a.json"), StorageError),
    ],
)
def test_storage_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Store], object], error: type[StorageError]
) -> None:
    """The caller gets an error after a while and abandons the hanging call; a create may still succeed."""
    monkeypatch.setattr(stores, "ANSWER_S", 0.05)
    woken, reports = threading.Event(), list[None]()

    class Away:
        url = "somewhere"

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *_: woken.wait(PATIENCE_S)

    try:
        with pytest.raises(error, match=r"somewhere: cannot .* no answer in") as raised:
            act(DeadlineStore(Away(), lambda: reports.append(None)))  # type: ignore[arg-type]
        assert type(raised.value) is error and len(reports) == 1
    finally:
        woken.set()


def test_a_claim_outlives_a_hung_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging create of a term is retried: the claim succeeds, and the call that wakes up finds it made."""
    woken, is_through, is_hung = threading.Event(), threading.Event(), threading.Event()

    class Hanging(LocalStore):
        def create(self, key: str, content: bytes) -> None:
            if is_hung.is_set():
                return super().create(key, content)
            is_hung.set()
            assert woken.wait(PATIENCE_S)
            try:
                super().create(key, content)
            finally:
                is_through.set()

    class ImpatientAtFirst(DeadlineStore):
        num_creates = 0

        def create(self, key: str, content: bytes) -> None:
            self.num_creates += 1
            with monkeypatch.context() as patch:
                if self.num_creates == 1:
                    patch.setattr(stores, "ANSWER_S", 0.5)
                super().create(key, content)

    store = ImpatientAtFirst(Hanging(tmp_path), lambda: None)
    assert StoreFence(store).claim() == 1
    claim = stores.read(store, "terms/00000001.json")
    woken.set()
    assert is_through.wait(PATIENCE_S)
    assert stores.read(store, "terms/00000001.json") == claim and StoreFence(store).claim() == 2


def test_every_store_operation_counts_as_progress(tmp_path: Path) -> None:
    """Every answer, and every piece of a file: a long load over slow storage shows progress."""
    reports: list[None] = []
    store = DeadlineStore(LocalStore(tmp_path), lambda: reports.append(None))

    def grows(act: Callable[[], object]) -> None:
        before = len(reports)
        act()
        assert len(reports) > before

    with store.write("data/x/file") as sink:
        for _ in range(3):
            grows(lambda: sink.write(b"abc"))
    with store.open("data/x/file") as file:
        grows(lambda: file.read(2))
        grows(lambda: file.readinto(memoryview(bytearray(4))))  # type: ignore[attr-defined]
    grows(lambda: store.list("data/"))
    grows(lambda: store.delete("data/x/file"))


def test_a_name_that_was_not_there_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client caches missing names until it opens their folder; the store opens it, so nobody waits."""
    store = LocalStore(tmp_path)
    store.create("commits/key", b"made by another node")
    open_file, open_folder, is_fresh = Path.open, os.open, [False]

    def remembering(path: Path, mode: str) -> object:
        if path.name == "key" and not is_fresh[0]:
            raise FileNotFoundError(path)
        return open_file(path, mode)

    def refreshing(path: Path, flags: int, *more: object) -> int:
        is_fresh[0] = is_fresh[0] or bool(flags & os.O_DIRECTORY and Path(path).name == "commits")
        return open_folder(path, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", remembering)
    monkeypatch.setattr(os, "open", refreshing)
    assert stores.read(store, "commits/key") == b"made by another node"


@pytest.mark.parametrize(
    ("bytes_left", "files_left", "advice"),
    [(9, 0, "no free inodes"), (9, 9, "free some space"), (0, 0, "free some space")],
)
def test_a_disk_that_is_full_of_files_is_not_called_full_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_left: int, files_left: int, advice: str
) -> None:
    """Both are ENOSPC; deleting a few large files does not help if inodes are exhausted."""
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    found = Mock(f_files=100, f_favail=files_left, f_bavail=bytes_left)
    monkeypatch.setattr(os, "statvfs", Mock(return_value=found))
    with pytest.raises(StorageError, match=f"No space left on device; {advice}"):
        LocalStore(tmp_path / "run").create("commits/a.json", b"x")
