"""Locks between the threads of all processes of a node: bytes of a file, released when their holder dies.

Open-file-description locks (Linux) belong to one opening of the file, so threads exclude each other, too, and one file
serves for many locks.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process


@contextmanager
def locked(path: Path, place: int) -> Iterator[int]:
    """Hold the lock of one place of a file; yields the file's descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, _lock_of(place))
        yield file
    finally:
        os.close(file)


def is_locked(path: Path, place: int) -> bool:
    """Return whether any thread of any process holds the lock of a place."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_of(place))
    except (BlockingIOError, PermissionError):
        return True
    finally:
        os.close(file)
    return False


def _lock_of(place: int) -> bytes:
    return struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
