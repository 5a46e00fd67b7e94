"""Huge pages: large fresh memory is on them where the system has them, and any tensor may be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.system import huge_pages
from elastic_train.system.huge_pages import LEAST_BYTES, on_huge_pages

SMAPS = Path("/proc/self/smaps")


def is_asked_for(address: int) -> bool:
    """Return True if the kernel was asked for huge pages at an address, granted or not."""
    lo = hi = 0
    for line in SMAPS.read_text().splitlines():
        first, *flags = line.split()
        if "-" in first:
            lo, hi = (int(end, 16) for end in first.split("-"))
        elif first == "VmFlags:" and lo <= address < hi:
            return "hg" in flags
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.heavy
@pytest.mark.skipif(not SMAPS.exists(), reason="no list of this process's memory here")
def test_the_kernel_is_asked_for_huge_pages_for_large_memory() -> None:
    large, other = (torch.empty(64 << 20, dtype=torch.uint8) for _ in range(2))
    assert int(on_huge_pages(large).fill_(1)[-1]) == 1
    assert is_asked_for(large.data_ptr() + (32 << 20))
    assert not is_asked_for(other.data_ptr() + (32 << 20))


def test_small_or_empty_memory_and_views_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *given: asked.append(given))
    for tensor in (torch.empty(0), torch.ones(LEAST_BYTES // 4 - 1), torch.empty(LEAST_BYTES, device="meta")):
        assert on_huge_pages(tensor) is tensor
    assert asked == []
    on_huge_pages(torch.empty(LEAST_BYTES // 4)[3:])
    ((start, length, _),) = asked
    assert start % 4096 == 0 and length % 4096 == 0 and LEAST_BYTES - 8192 <= length <= LEAST_BYTES
