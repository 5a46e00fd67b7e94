"""The disk under a local store: five operations, so that tests can replace it by one that loses unsynced data.

The store relies on POSIX: bytes are durable after `sync` of their file, a name after `sync` of its directory, and
`link` names a complete file or fails because the name is taken. One call syncs in parallel: a journal takes all of it
in about the time of one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt

from elastic_train.system.failpoints import reach
from elastic_train.system.files import sync
from rendezvous.waiting import Bystander, Call, begin

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


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
        acts = [*(partial(_sync_file, file) for file in files), *(partial(sync, at) for at in directories)]
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


RUN_BYTES = 8 << 20
MOST_RUNS = 3
Run = npt.NDArray[np.uint8]


class Runs:
    """Aligned memory that is reused from file to file."""

    def __init__(self) -> None:
        self._kept: list[Run] = []

    def take(self) -> Run:
        try:
            return self._kept.pop()
        except IndexError:
            return np.frombuffer(mmap.mmap(-1, RUN_BYTES), np.uint8)

    def give(self, run: Run) -> None:
        if len(self._kept) < MOST_RUNS:
            self._kept.append(run)


class DirectFile:
    """A file open for writing; after `flush` or close the kernel has its bytes.

    A new file whose writes bypass the page cache (O_DIRECT), where new pages cost more than all hashing of a save.

    Bytes are gathered in aligned, reused memory, run by run; a thread writes runs while the next is gathered, so
    the disk is busy from the first run on. Ordinary writes are used for partial pages, for files shorter than a
    run, and where the file system does not support direct ones. The thread's errors are raised by a later call, at
    the latest by `flush`.
    """

    def __init__(self, path: Path, runs: Runs) -> None:
        """Create the file; raise FileExistsError if it exists."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._runs = runs
        self._run, self._num_gathered = runs.take(), 0
        self._offset = 0  # file offset of the current run
        self._thread: Bystander | None = None
        self._writing: deque[tuple[Call[None], Run]] = deque()
        self._is_direct, self._is_open = False, True

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._let_go()

    def fileno(self) -> int:
        return self._descriptor

    def write(self, content: Buffer, /) -> int:
        view = memoryview(content).cast("B")
        done = 0
        while done < len(view):
            piece = np.frombuffer(view[done : done + RUN_BYTES - self._num_gathered], np.uint8)
            np.copyto(self._run[self._num_gathered : self._num_gathered + len(piece)], piece)
            self._num_gathered, done = self._num_gathered + len(piece), done + len(piece)
            if self._num_gathered == RUN_BYTES:
                self._hand_on()
        return len(view)

    def flush(self) -> None:
        """Write what has been gathered, and wait for all writes."""
        while self._writing:
            self._runs.give(self._await_one())
        num_whole = self._num_gathered - self._num_gathered % mmap.PAGESIZE if self._is_direct else 0
        self._put(self._run[:num_whole], self._offset)
        self._set_direct(False)
        self._put(self._run[num_whole : self._num_gathered], self._offset + num_whole)
        self._offset, self._num_gathered = self._offset + self._num_gathered, 0

    def close(self) -> None:
        if self._is_open:
            try:
                self.flush()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        self._is_open = False
        if self._thread is not None:  # wait for the current write; later ones are dropped
            self._thread.begin(lambda: None).result()
            self._thread.leave()
        os.close(self._descriptor)
        self._runs.give(self._run)

    def _hand_on(self) -> None:
        """Pass a full run to the thread, and start another."""
        if self._thread is None:
            self._thread = Bystander("writing")
            self._set_direct(True)
        self._writing.append((self._thread.begin(partial(self._put_if_open, self._run, self._offset)), self._run))
        self._offset, self._num_gathered = self._offset + RUN_BYTES, 0
        self._run = self._runs.take() if len(self._writing) < MOST_RUNS else self._await_one()

    def _await_one(self) -> Run:
        """Return the memory of the oldest run in flight, once written."""
        writing, run = self._writing.popleft()
        writing.result()
        return run

    def _put_if_open(self, run: Run, offset: int) -> None:
        if self._is_open:
            self._put(run, offset)

    def _put(self, run: Run, offset: int) -> None:
        done = 0
        while done < len(run):
            try:
                done += os.pwrite(self._descriptor, run[done:].data, offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._set_direct(False)  # direct writes work on this file system, but not for this one

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
        except OSError:
            is_direct = False  # not supported by this file system
        self._is_direct = is_direct
