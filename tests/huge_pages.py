"""A process's memory in huge pages, so that a fork of it copies a few page tables and not ninety thousand entries.

A fork of what has imported the trainer takes 25 ms of a core, its end included, and every worker is a fork of a fork.
In huge pages it takes 10 ms. To move the memory takes 0.7 s, once: worth it for a process with hundreds of forks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_COLLAPSE = 25
"""MADV_COLLAPSE, from Linux 6.1; an older kernel refuses it, and nothing changes."""
_SIZE = 1 << 21


def use_huge_pages() -> None:
    """Move what this process has written into huge pages, as far as the kernel can."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for lo, hi in _own_memory():
        advise(lo, hi - lo, _COLLAPSE)


def _own_memory() -> Iterator[tuple[int, int]]:
    """Yield the whole huge pages in the mappings that are private, writable and of no file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *name = line.split()
        lo, hi = (int(address, 16) for address in place.split("-"))
        lo, hi = -(-lo // _SIZE) * _SIZE, hi // _SIZE * _SIZE
        if access == "rw-p" and name in ([], ["[heap]"]) and lo < hi:
            yield lo, hi
