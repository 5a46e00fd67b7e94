"""A store's expectations of a disk, for the machine's and the simulated one; and the losses of the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.checkpoint.stores.disk import Disk, RealDisk
from tests.elastic_train.checkpoint.simulated_disk import Image, SimulatedDisk

Read = Callable[[Path], bytes]


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Read]:
    """An empty disk of each kind, and a way to read from it."""
    if request.param == "real":
        return RealDisk(), Path.read_bytes
    simulated = SimulatedDisk(tmp_path)
    return simulated, simulated.content


def put(disk: Disk, path: Path, content: bytes, *, is_synced: bool = True) -> None:
    """Write a file."""
    with disk.create(path) as file:
        file.write(content)
        if is_synced:
            disk.sync([file], [])


def test_a_synced_file_reads_back_under_all_of_its_names(disk: tuple[Disk, Read], tmp_path: Path) -> None:
    """A link is a second name of the same bytes, and outlives the first."""
    kind, read = disk
    kind.make_directory(tmp_path / "folder")
    put(kind, tmp_path / "folder" / "a", b"content")
    kind.link(tmp_path / "folder" / "a", tmp_path / "b")
    kind.unlink(tmp_path / "folder" / "a")
    kind.sync([], [tmp_path / "folder"])
    assert read(tmp_path / "b") == b"content"
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "folder" / "a")


def test_a_name_is_taken_once(disk: tuple[Disk, Read], tmp_path: Path) -> None:
    """Creating, linking and making a directory never replace."""
    kind, read = disk
    put(kind, tmp_path / "a", b"first")
    put(kind, tmp_path / "b", b"second")
    kind.make_directory(tmp_path / "folder")
    for act in (
        lambda: kind.create(tmp_path / "a"),
        lambda: kind.link(tmp_path / "b", tmp_path / "a"),
        lambda: kind.make_directory(tmp_path / "folder"),
    ):
        with pytest.raises(FileExistsError):
            act()
    assert read(tmp_path / "a") == b"first"


def test_missing_files_and_folders_are_errors(disk: tuple[Disk, Read], tmp_path: Path) -> None:
    """No operation creates missing names or parent directories."""
    kind, _ = disk
    for act in (
        lambda: kind.unlink(tmp_path / "a"),
        lambda: kind.link(tmp_path / "a", tmp_path / "b"),
        lambda: kind.create(tmp_path / "folder" / "a"),
        lambda: kind.make_directory(tmp_path / "folder" / "below"),
    ):
        with pytest.raises(FileNotFoundError):
            act()


def images(disk: SimulatedDisk) -> list[Image]:
    """Return every state that a crash may leave, without repeats."""
    return [dict(image) for image in {frozenset(image.items()) for image in disk.images()}]


def test_only_what_is_synced_must_survive(tmp_path: Path) -> None:
    """A name needs its directory's sync, bytes need their file's; either may survive without the other."""
    disk = SimulatedDisk(tmp_path)
    put(disk, tmp_path / "a", b"xy", is_synced=False)
    whole, torn, zeros = {"a": b"xy"}, {"a": b"x"}, {"a": b"\0\0"}
    left = images(disk)
    assert all(image in left for image in ({}, {"a": b""}, whole, torn, zeros, {"a": b"\0y"}))
    disk.sync([], [tmp_path])
    assert {} not in images(disk)
    assert torn in images(disk)
    disk = SimulatedDisk(tmp_path)
    put(disk, tmp_path / "a", b"xy")
    assert sorted(images(disk), key=len) == [{}, whole]


def test_later_names_may_be_durable_before_earlier_ones(tmp_path: Path) -> None:
    """A file system guarantees no order without a sync, and a file below a lost directory is lost."""
    disk = SimulatedDisk(tmp_path)
    disk.make_directory(tmp_path / "folder")
    put(disk, tmp_path / "folder" / "a", b"")
    put(disk, tmp_path / "b", b"")
    disk.sync([], [tmp_path / "folder"])
    assert sorted(sorted(image) for image in images(disk)) == [[], ["b"], ["b", "folder/a"], ["folder/a"]]
    disk.sync([], [tmp_path])
    disk.unlink(tmp_path / "b")
    assert sorted(sorted(image) for image in images(disk)) == [["b", "folder/a"], ["folder/a"]]
