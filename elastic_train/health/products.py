"""Matrix products with known bits: integers so small that no sum is rounded.

So every processor, whatever its summation order, must return the bits of the integer product; one that does not
computes wrongly. Single cores or GPU units may fail, mostly for some operands only: so the product is repeated with
permuted rows and columns, on one core after another.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_train.health.result import Examination, Finding, fail, ok
from elastic_train.system.wording import counted, first_line

SIDE, DEPTH = 128, 256
MOST = {torch.float64: 1 << 22, torch.float32: 255, torch.bfloat16: 1, torch.float16: 1}
"""Largest operand by type. DEPTH products of two such operands sum to an exact value of the type, or of the shorter
type that a device may use instead (TF32, bfloat16); so do all partial sums, which a device may round as well."""
TILES = 16
"""Copies of the product in each dimension on an accelerator, so that every unit has work."""
ROUNDS = 4
"""Least repetitions of each product per core."""
SEED = 0x5EED


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
