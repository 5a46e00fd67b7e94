"""The disk under a local store: five operations, so that tests can replace it by one that loses unsynced data.

The store relies on POSIX: bytes are durable after `sync` of their file, a name after `sync` of its directory, and
`link` names a complete file or fails because the name is taken. One call syncs in parallel: a journal takes all of it
in about the time of one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from elastic_train.checkpoint.stores.direct_io import DirectFile, Runs
from elastic_train.system.failpoints import reach
from rendezvous.waiting import begin


class Disk(Protocol):
    """The file system operations of a local store; every method may raise OSError."""

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing; raise FileExistsError if the name is taken."""

    def sync(self, files: Sequence[BinaryIO], directories: Sequence[Path]) -> None:
        """Make the files' bytes written so far, and the directories' names, durable; in any order."""

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; raise FileExistsError if that is taken."""

    def unlink(self, path: Path) -> None:
        """Remove a name; raise FileNotFoundError if there is none."""

    def make_directory(self, path: Path) -> None:
        """Make one directory in an existing one; raise FileExistsError if it exists."""


class RealDisk:
    """The machine's own file system."""

    def __init__(self) -> None:
        self._runs = Runs()

    def create(self, path: Path) -> BinaryIO:
        return cast(BinaryIO, DirectFile(path, self._runs))

    def sync(self, files: Sequence[BinaryIO], directories: Sequence[Path]) -> None:
        reach("sync")
        acts = [*(partial(_sync_file, file) for file in files), *(partial(_sync_directory, at) for at in directories)]
        syncing = [begin("syncing", act) for act in acts]
        for call in syncing:  # all, even after an error: the caller closes or removes them next
            call.ended.wait()
        for call in syncing:
            call.result()

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_directory(self, path: Path) -> None:
        path.mkdir()


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
