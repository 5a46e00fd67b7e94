"""The disk's own rate, for `benchmarks.checkpoint`: as many bytes as a state has, made durable as a commit is.

Two ways, of which the quicker is the disk's: past the page cache (the disk alone), and through it, as `dd conv=fsync`
writes (the disk idles while the bytes are copied). Both end as a commit must: the bytes and their name, two small
files, and another name are made durable one after the other.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

CHUNK_BYTES = 8 << 20
WAYS = ("direct", "cached")


def write_bare(folder: Path, num_bytes: int, way: str) -> float:
    """Write so many bytes to a file, in the way named; return the seconds until all is durable, and remove it."""
    chunk = mmap.mmap(-1, CHUNK_BYTES)  # aligned, as direct writes must be
    chunk.write(os.urandom(CHUNK_BYTES))
    place = folder / "bare"
    place.mkdir()
    started = time.perf_counter()
    _write(place / "bytes", memoryview(chunk), num_bytes, os.O_DIRECT if way == "direct" else 0)
    for name in ("metadata", "unfinished"):
        _write(place / name, memoryview(chunk), mmap.PAGESIZE, 0)
    (place / "record").hardlink_to(place / "unfinished")
    _sync(place)
    seconds = time.perf_counter() - started
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    _sync(folder)  # what the disk does about freed space is nobody else's time
    return seconds


def _write(path: Path, chunk: memoryview, num_bytes: int, flags: int) -> None:
    """Write a file and sync it with its folder; a direct one is rounded up to whole pages."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    for at in range(0, num_bytes, CHUNK_BYTES):
        os.write(file, chunk[: min(CHUNK_BYTES, -(-(num_bytes - at) // mmap.PAGESIZE) * mmap.PAGESIZE)])
    os.fsync(file)
    os.close(file)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def evict(folder: Path) -> None:
    """Take a folder's files, which are on the disk, out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
