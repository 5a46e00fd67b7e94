"""The disk's own rate, for `benchmarks.checkpoint`: write a state's bytes as durably as a commit does.

There are two ways, and the faster one counts as the disk's rate: past the page cache (the disk alone), and through it,
as `dd conv=fsync` does (the disk idles while bytes are copied). Both end like a commit: the bytes and their name, two
small files, and another name become durable one after the other.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

CHUNK_BYTES = 8 << 20
WAYS = ("direct", "cached")


def write_bare(folder: Path, num_bytes: int, way: str) -> float:
    """Write `num_bytes` to a file in the given way; return the seconds until it is durable, and remove it."""
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
    _sync(folder)  # so that the disk's handling of freed space is not measured
    return seconds


def _write(path: Path, chunk: memoryview, num_bytes: int, flags: int) -> None:
    """Write a file and sync it with its folder; a direct write is rounded up to whole pages."""
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
    """Evict a folder's files, which are on the disk, from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
