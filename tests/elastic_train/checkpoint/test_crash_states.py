"""Crash states: whenever the machine stops, whatever the disk had not synced, load yields the old commit or the new.

A save runs on a disk that records its operations. For every prefix of them, every state that a file system may leave
is built: names not synced may be there or not, bytes not synced may be whole, torn, zeros or absent.
"""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest
from commit_samples import facts, small_state

from elastic_train.checkpoint import CommitRecord, CommitWriter, Entry, discover, read_state
from elastic_train.checkpoint.disk import RealDisk
from elastic_train.checkpoint.local import LocalStore
from elastic_train.checkpoint.stores import KeyMissing, Sink
from elastic_train.fencing import StoreFence


@dataclass
class Inode:
    """A file's bytes, and how many of them are durable."""

    content: bytes = b""
    num_durable: int = 0


@dataclass
class Model:
    """What names lead where, now and after a crash that loses all that is not synced; folders lead to None."""

    names: dict[Path, Inode | None] = field(default_factory=dict)
    durable: dict[Path, Inode | None] = field(default_factory=dict)


class RecordingDisk(RealDisk):
    """A real disk that also writes down what is done to it, as functions of a model."""

    def __init__(self) -> None:
        self.operations: list[Callable[[Model], None]] = []

    def create(self, path: Path) -> BinaryIO:
        self.operations.append(lambda model: model.names.update({path: Inode()}))
        return RecordingFile(super().create(path), path, self)  # type: ignore[return-value]

    def sync(self, file: BinaryIO) -> None:
        assert isinstance(file, RecordingFile)
        path = file.path

        def apply(model: Model) -> None:
            inode = model.names[path]
            assert inode is not None
            inode.num_durable = len(inode.content)

        self.operations.append(apply)

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.operations.append(lambda model: model.names.update({target: model.names[source]}))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.operations.append(lambda model: model.names.__delitem__(path))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.operations.append(lambda model: model.names.update({path: None}))

    def sync_directory(self, path: Path) -> None:
        def apply(model: Model) -> None:
            for name in {*model.names, *model.durable}:
                if name.parent == path and name in model.names:
                    model.durable[name] = model.names[name]
                elif name.parent == path:
                    del model.durable[name]

        self.operations.append(apply)


class RecordingFile:
    """A file whose writes are written down."""

    def __init__(self, file: BinaryIO, path: Path, disk: RecordingDisk) -> None:
        self.file = file
        self.path = path
        self.disk = disk

    def __enter__(self) -> RecordingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        piece = bytes(content)

        def apply(model: Model) -> None:
            inode = model.names[self.path]
            assert inode is not None
            inode.content += piece

        self.disk.operations.append(apply)
        return self.file.write(piece)


class LeftStore:
    """What a crash left, for reading."""

    url = "left"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def open(self, key: str) -> BinaryIO:
        if key not in self.files:
            raise KeyMissing(key)
        return io.BytesIO(self.files[key])

    def list(self, prefix: str) -> list[Entry]:
        return [Entry(key, len(content), None) for key, content in sorted(self.files.items()) if key.startswith(prefix)]

    def create(self, key: str, content: bytes) -> None:
        raise NotImplementedError

    def write(self, key: str) -> AbstractContextManager[Sink]:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError


def torn(inode: Inode, how: str) -> bytes:
    """Return a file's bytes after a crash."""
    durable, lost = inode.content[: inode.num_durable], inode.content[inode.num_durable :]
    return durable + {"whole": lost, "torn": lost[: len(lost) // 2], "zeros": bytes(len(lost)), "absent": b""}[how]


def states_after(model: Model, root: Path, seed: int) -> Iterator[LeftStore]:
    """Yield what a crash may leave: a choice of the names that were not synced, times a fate of the bytes."""
    pending = [
        path for path in {**model.names, **model.durable} if model.names.get(path, 0) is not model.durable.get(path, 0)
    ]
    choice = random.Random(seed)
    subsets = [[], pending, *([path for path in pending if choice.random() < 0.5] for _ in range(3))]
    for happened, how in itertools.product(subsets, ("whole", "torn", "zeros", "absent")):
        names = dict(model.durable)
        for path in happened:
            if path in model.names:
                names[path] = model.names[path]
            else:
                del names[path]
        yield LeftStore(
            {
                path.relative_to(root).as_posix(): torn(inode, how)
                for path, inode in names.items()
                if inode is not None
                and all(above in names for above in path.parents if above != root and above.is_relative_to(root))
            }
        )


def recorded_save(root: Path) -> tuple[CommitRecord, CommitRecord, list[Callable[[Model], None]], int]:
    """Publish two commits; return both, all operations, and how many of them belong to the first."""
    disk = RecordingDisk()
    store = LocalStore(root, disk)
    commits = CommitWriter(store, StoreFence(store), 1, None)
    first = commits.save(small_state(1), facts(1))
    num_first = len(disk.operations)
    second = commits.save(small_state(2), facts(2))
    return first, second, disk.operations, num_first


def check_every_state(
    root: Path, operations: list[Callable[[Model], None]], first: CommitRecord, second: CommitRecord, num_first: int
) -> set[int]:
    """Assert the promise in every crash state; return the steps of the heads that were found."""
    model, heads = Model(), set()
    for number, operation in enumerate(operations, start=1):
        operation(model)
        if number < num_first:
            continue
        for left in states_after(model, root, seed=number):
            found = discover(left)
            assert found.skipped == (), f"after operation {number}"
            assert found.head in (first, second), f"after operation {number}"
            assert found.head is not None
            assert read_state(left, found.head)["scheduler"] == {"last_epoch": found.head.step}
            assert number < len(operations) or found.head == second, "a finished save was lost"
            heads.add(found.head.step)
    return heads


def test_every_crash_state_yields_the_old_commit_or_the_new(tmp_path: Path) -> None:
    """Never a third thing, never none, and the new one once `save` has returned."""
    first, second, operations, num_first = recorded_save(tmp_path)
    assert len(operations) - num_first >= 15
    assert check_every_state(tmp_path, operations, first, second, num_first) == {1, 2}


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_the_enumeration_sees_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omitted: str) -> None:
    """The check can fail: without syncing files, or without syncing folders, some state breaks the promise."""
    monkeypatch.setattr(RecordingDisk, omitted, lambda self, thing: None)
    first, second, operations, num_first = recorded_save(tmp_path)
    with pytest.raises(Exception, match=r"after operation|a finished save was lost|none is whole"):
        check_every_state(tmp_path, operations, first, second, num_first)
