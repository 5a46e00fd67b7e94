"""Move a process's memory into huge pages: a fork then copies a few page tables, not ninety thousand entries.

Forking a process that has imported the trainer takes 25 ms of a core (exit included), and every worker is a fork of a
fork; with huge pages it takes 10 ms. Moving the memory takes 0.7 s once, which pays off for a process with hundreds of
forks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_COLLAPSE = 25
"""MADV_COLLAPSE, from Linux 6.1; an older kernel rejects it, which is harmless."""
_SIZE = 1 << 21


def use_huge_pages() -> None:
    """Move the memory that this process has written into huge pages where the kernel can."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for lo, hi in _own_memory():
        advise(lo, hi - lo, _COLLAPSE)


def _own_memory() -> Iterator[tuple[int, int]]:
    """Yield the huge-page-aligned ranges of private, writable, anonymous mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *name = line.split()
        lo, hi = (int(address, 16) for address in place.split("-"))
        lo, hi = -(-lo // _SIZE) * _SIZE, hi // _SIZE * _SIZE
        if access == "rw-p" and name in ([], ["[heap]"]) and lo < hi:
            yield lo, hi
