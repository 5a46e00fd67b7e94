"""Check memory by writing a pattern and its complement and reading both back.

All words differ, so that misaddressed words are detected as well. It takes a small share of free memory, for a moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.wording import size

MOST_BYTES, SHARE = 64 << 20, 0.05
PIECE = 1 << 19
"""Words filled or compared at a time."""
_ODD = 0x5851F42D4C957F2D
_REMEDY = "take this machine out of use, and have its memory examined; the kernel's log may name the module (EDAC, Xid)"
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def examine_memory(
    device: torch.device, num_bytes: int, budget_s: float, between: Callable[[Tensor], object] = lambda words: None
) -> Iterator[Finding]:
    """Yield whether this many bytes of a device keep what is written to them.

    Checks less if filling takes longer than the budget. `between` is called with filled pieces: a hook for tests.
    """
    where = "memory" if device.type == "cpu" else f"memory of {device}"
    if num_bytes < 8 * PIECE:
        yield warn("memory", f"too little of the {where} is free to examine a part of it", "free some")
        return
    block = torch.arange(PIECE, device=device) * _ODD
    words = torch.empty(num_bytes // 8 // PIECE * PIECE, dtype=torch.int64, device=device).view(-1, PIECE)
    for turn in (0, -1):
        words = words[: _filled(words, block, turn, budget_s)]
        between(words)
        for number, piece in enumerate(words):
            if not torch.equal(torch.bitwise_xor(piece, turn ^ number), block):
                yield fail("memory", f"the {where} of this machine {_lost(piece, block, turn ^ number)}", _REMEDY)
                return
    yield ok("memory", f"{size(8 * words.numel())} of the {where} keep what is written")


def _filled(words: Tensor, block: Tensor, turn: int, budget_s: float) -> int:
    """Fill pieces with the pattern or its complement until time is over; return their number, at least one."""
    deadline = time.monotonic() + budget_s
    for number, piece in enumerate(words):
        torch.bitwise_xor(block, turn ^ number, out=piece)
        if time.monotonic() > deadline:
            return number + 1
    return len(words)


def _lost(piece: Tensor, block: Tensor, mask: int) -> str:
    """Return how many words of a piece changed, with the first one's expected and actual value."""
    expected = torch.bitwise_xor(block, mask)
    changed = (piece != expected).nonzero().flatten()
    first = int(changed[0])
    was, became = (int(one[first]) & (1 << 64) - 1 for one in (expected, piece))
    return (
        f"does not keep what is written: of {len(piece)} words {len(changed)} changed, 0x{was:016x} to 0x{became:016x}"
    )


def room(device: torch.device, num_sharing: int) -> int:
    """Return how many bytes to check if `num_sharing` processes do it at once."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_bytes()
    return min(MOST_BYTES, int(SHARE * free)) // (1 if device.type == "cuda" else num_sharing)


def _free_bytes() -> int:
    """Return the free bytes of the system within this process's control group; 0 if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if most == "max" else max(0, min(free, int(most) - int(used)))
    except (OSError, ValueError):
        return free
