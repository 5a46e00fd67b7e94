"""Examine processors and memory by work whose result is known.

Matrix products are of integers so small that no sum is rounded. So every processor, whatever its summation order, must
return the bits of the integer product; one that does not computes wrongly. Single cores or GPU units may fail, mostly
for some operands only: so the product is repeated with permuted rows and columns, on one core after another.

Memory is checked by writing a pattern and its complement and reading both back. All words differ, so that misaddressed
words are detected as well. It takes a small share of free memory, for a moment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elastic_train.health.result import Examination, Finding, fail, ok, warn
from elastic_train.system.wording import counted, first_line, size

SIDE, DEPTH = 128, 256
MOST = {torch.float64: 1 << 22, torch.float32: 255, torch.bfloat16: 1, torch.float16: 1}
"""Largest operand by type. DEPTH products of two such operands sum to an exact value of the type, or of the shorter
type that a device may use instead (TF32, bfloat16); so do all partial sums, which a device may round as well."""
TILES = 16
"""Copies of the product in each dimension on an accelerator, so that every unit has work."""
ROUNDS = 4
"""Least repetitions of each product per core."""
SEED = 0x5EED

MOST_BYTES, SHARE = 64 << 20, 0.05
PIECE = 1 << 19
"""Words filled or compared at a time."""
_ODD = 0x5851F42D4C957F2D
_REMEDY = "take this machine out of use, and have its memory examined; the kernel's log may name the module (EDAC, Xid)"
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Known:
    """Two matrices on a device, and their exact product."""

    left: Tensor
    right: Tensor
    product: Tensor

    def wrong(self, shift: int) -> str | None:
        """Multiply them with rows and columns rotated; return what is wrong with the product, None if nothing."""
        found = self.left.roll(shift, 0) @ self.right.roll(-shift, 1)
        expected = self.product.roll((shift, -shift), (0, 1))
        if torch.equal(found, expected):
            return None
        places = (found != expected).nonzero()
        row, column = places[0].tolist()
        return (
            f"{counted(len(places), 'element')} of {expected.numel()} of a product of whole numbers in "
            f"{str(expected.dtype).removeprefix('torch.')}, the first of which is {found[row, column].item():.17g} and "
            f"has to be {expected[row, column].item():.17g}"
        )


def examine_products(
    device: torch.device, dtypes: Sequence[torch.dtype], cores: Sequence[int] = (), budget_s: float = 0.0
) -> Iterator[Finding]:
    """Yield whether a device multiplies correctly, in each of these types, on each of these CPU cores.

    Every core is tested at least once; rounds continue until the budget is spent. With several compute threads, which
    would have to be bound to cores one by one, the system chooses.
    """
    known = [known_product(dtype, device, 1 if device.type == "cpu" else TILES) for dtype in dtypes]
    places = cores if device.type == "cpu" and torch.get_num_threads() == 1 else ()
    deadline, num_rounds = time.monotonic() + budget_s, 0
    while num_rounds == 0 or time.monotonic() < deadline:
        for core in places or (None,):
            with _bound_to(core):
                wrong = next((said for said in _repeated(known, num_rounds) if said is not None), None)
            if wrong is not None:
                where = device if core is None else f"core {core}"
                yield fail("products", f"{where} computes wrongly: {wrong}", _remedy(device))
                return
        num_rounds += 1
    where = f"{counted(len(places), 'core')}" if places else str(device)
    shown = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    yield ok("products", f"{num_rounds * ROUNDS} of each of {shown} on {where} have the bits that they must have")


def or_its_error(device: torch.device, check: str, examine: Examination) -> Iterator[Finding]:
    """Yield an examination's findings; an error of the device itself makes it unfit."""
    try:
        yield from examine()
    except torch.AcceleratorError as error:
        yield fail(check, f"{device} fails: {first_line(error)}", _remedy(device))


def own_cores(turn: int = 0, of: int = 1) -> list[int]:
    """Return the cores that this process may use; of `of` processes that share them, those of number `turn`."""
    return sorted(os.sched_getaffinity(0))[turn::of] or sorted(os.sched_getaffinity(0))[:1]


def known_product(dtype: torch.dtype, device: torch.device, tiles: int) -> Known:
    """Draw two matrices, and multiply them as integers on the CPU; a device's are `tiles` copies of each."""
    draw, most = torch.Generator().manual_seed(SEED), MOST[dtype]
    left = torch.randint(-most, most + 1, (SIDE, DEPTH), generator=draw)
    right = torch.randint(-most, most + 1, (DEPTH, SIDE), generator=draw)
    made = (left.repeat(tiles, 1), right.repeat(1, tiles), (left @ right).repeat(tiles, tiles))
    return Known(*(one.to(dtype).to(device) for one in made))


def _repeated(known: Sequence[Known], num_rounds: int) -> Iterator[str | None]:
    for shift in range(num_rounds * ROUNDS, (num_rounds + 1) * ROUNDS):
        yield from (one.wrong(shift) for one in known)


@contextlib.contextmanager
def _bound_to(core: int | None) -> Iterator[None]:
    """Bind this thread to a core within the context; ignored where that is not allowed."""
    before = os.sched_getaffinity(0)
    if core is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        if core is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)


def _remedy(device: torch.device) -> str:
    what = "this machine" if device.type == "cpu" else f"{device} of this machine"
    return f"take {what} out of use, and have it examined by its vendor's diagnosis"


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
    """Return the free bytes of the system within this process's control group; 0 if unknown.

    The pages of files count as used memory there, but are given back.
    """
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used_for_good = int(used) - int(counts.get("inactive_file", "0"))
        return free if most == "max" else max(0, min(free, int(most) - used_for_good))
    except (OSError, ValueError):
        return free
