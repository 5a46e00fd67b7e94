"""Huge pages: large fresh memory is on them where the system has them, and any tensor may be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.system import huge_pages
from elastic_train.system.huge_pages import LEAST_BYTES, on_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kilobytes() -> int:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("AnonHugePages:"))


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no transparent huge pages here")
def test_large_memory_is_made_of_huge_pages() -> None:
    before = huge_kilobytes()
    large = on_huge_pages(torch.empty(64 << 20, dtype=torch.uint8)).fill_(1)
    assert huge_kilobytes() - before > 48 << 10
    assert int(large[-1]) == 1


def test_small_or_empty_memory_and_views_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *given: asked.append(given))
    for tensor in (torch.empty(0), torch.ones(LEAST_BYTES // 4 - 1), torch.empty(LEAST_BYTES, device="meta")):
        assert on_huge_pages(tensor) is tensor
    assert asked == []
    on_huge_pages(torch.empty(LEAST_BYTES // 4)[3:])
    ((start, length, _),) = asked
    assert start % 4096 == 0 and length % 4096 == 0 and LEAST_BYTES - 8192 <= length <= LEAST_BYTES
