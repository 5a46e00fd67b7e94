"""Atomic replacement of small files, atomic publication of files and folders, and locks.

Locks are between the threads of all processes of a node, released when their holder dies: bytes of a file, or all of
it.

Open-file-description locks (Linux) belong to one opening of the file, so threads exclude each other as well, and one
file serves for many locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process


def draft_of(path: Path) -> Path:
    """Return a unique name next to a file: containers that share a folder may have equal process ids.

    Raise IsADirectoryError for a path without a name, such as the working folder's.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old text or the new one. A failed draft is removed.

    Any number of processes on any machines may replace it at once: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def publish(draft: Path, target: Path) -> None:
    """Rename a file or folder once it is on disk: after a power loss it is complete or missing."""
    for path in draft.rglob("*"):
        sync(path)
    sync(draft)
    draft.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Return once a file or the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, place: int) -> Iterator[int]:
    """Hold the lock of one place of a file; yield the file's descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, _lock_of(place))
        yield file
    finally:
        os.close(file)


def is_locked(path: Path, place: int) -> bool:
    """Return True if any thread of any process holds the lock of a place."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_of(place))
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(file)
    return False


def locked_by(file: int, timeout_s: float) -> bool:
    """Lock an open file until it is closed or its process dies; False if another process holds it for `timeout_s`.

    True on a file system without locks, which may be shared with other hosts: what it guards is only tidier with the
    lock.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return True
        else:
            return True


def _lock_of(place: int) -> bytes:
    return struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
