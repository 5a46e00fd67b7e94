"""The gradient sum: along one fixed tree of lanes, so that no bit depends on the world; or fast, so that they may.

Gradients live in one flat buffer per dtype, and every parameter's `.grad` is a view of it. A leaf starts from zeros,
so no negative zero survives, and the backward pass of a lane's right sibling into the same buffer *is* their sum. The
larger subtrees of a rank are kept by a binary counter of at most log2 L more buffers.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from elastic_train.core.lanes import (
    Part,
    lane_additions,
    merge_plan,
    owned_lanes,
    parts_of,
    settle,
)
from elastic_train.parallel.group import Group


class GradientSum(Protocol):
    """From the lanes' backward passes to one mean gradient, the same on every rank."""

    def begin(self, lanes: range) -> None:
        """Start a step: forget the last one's gradients."""

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Return the context in which one lane's backward pass runs; lanes come in ascending order."""

    def finish(self, divisor: float) -> None:
        """Leave (sum over all lanes) / divisor in every parameter's `.grad`."""


def make_gradient_sum(
    kind: Literal["canonical", "fast"], parameters: Sequence[nn.Parameter], group: Group, num_lanes: int
) -> GradientSum:
    """Bind the parameters' gradients to buffers and return the sum that the configuration asks for."""
    flats = bind_gradients(parameters)
    return CanonicalSum(flats, group, num_lanes) if kind == "canonical" else FastSum(flats, group)


def bind_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Make every gradient a view of one zeroed flat buffer per (dtype, device); return the buffers."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    flats = []
    for (dtype, device), members in kinds.items():
        flat = torch.zeros(sum(member.numel() for member in members), dtype=dtype, device=device)
        place = 0
        for member in members:
            member.grad = flat[place : place + member.numel()].view_as(member)
            place += member.numel()
        flats.append(flat)
    return flats


class Scratch:
    """Memory for what arrives, kept from step to step: fresh pages would cost more than the additions."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def split(self, sizes: Sequence[int], like: Tensor) -> Sequence[Tensor]:
        """Return one flat tensor of each size, of `like`'s dtype and device; valid until the next call."""
        kind, total = (like.dtype, like.device), sum(sizes)
        if kind not in self._kept or self._kept[kind].numel() < total:
            self._kept[kind] = torch.empty(total, dtype=like.dtype, device=like.device)
        return torch.split(self._kept[kind][:total], list(sizes))


class CanonicalSum:
    """The sum along the tree."""

    def __init__(self, flats: list[Tensor], group: Group, num_lanes: int) -> None:
        self._flats, self._group, self._num_lanes = flats, group, num_lanes
        self._layout = [parts_of(owned_lanes(rank, group.size, num_lanes), num_lanes) for rank in range(group.size)]
        self._open: Part | None = None  # the subtree whose sum the flat buffers hold
        self._stack: list[tuple[Part, list[Tensor]]] = []
        self._free: list[list[Tensor]] = []
        self._scratch = Scratch()

    def begin(self, lanes: range) -> None:
        assert lanes == owned_lanes(self._group.rank, self._group.size, self._num_lanes), f"{lanes} are not this rank's"
        self._free += [buffers for _, buffers in self._stack]
        self._stack.clear()
        self._open = None
        self._zero()

    @contextlib.contextmanager
    def lane(self, lane: int) -> Iterator[None]:
        leaf = Part(0, lane)
        if self._open is not None and self._open != leaf.sibling:
            self._push()
        yield
        self._open = leaf.parent if self._open is not None else leaf
        self._open = settle(self._open, self._num_lanes)

    def finish(self, divisor: float) -> None:
        self._merge_stack()
        mine = [*self._stack, (self._open, self._flats)]
        for number, flat in enumerate(self._flats):
            parts = {part: buffers[number] for part, buffers in mine if part is not None}
            assert sorted(parts) == sorted(self._layout[self._group.rank]), "not all of this rank's lanes were run"
            if self._group.size > 1:
                exchange(flat, parts, self._layout, self._group, self._num_lanes, self._scratch)
            flat.div_(divisor)

    def _push(self) -> None:
        """Put the open subtree aside and start a new leaf from zeros."""
        self._merge_stack()
        assert self._open is not None, "nothing to put aside"
        buffers = self._free.pop() if self._free else [torch.empty_like(flat) for flat in self._flats]
        for buffer, flat in zip(buffers, self._flats, strict=True):
            buffer.copy_(flat)
        self._stack.append((self._open, buffers))
        self._open = None
        self._zero()

    def _merge_stack(self) -> None:
        """Add the subtrees put aside to the open one while they are its left siblings."""
        while self._stack and self._open is not None and self._stack[-1][0] == self._open.sibling:
            _, buffers = self._stack.pop()
            for flat, buffer in zip(self._flats, buffers, strict=True):
                flat.add_(buffer)
            self._free.append(buffers)
            self._open = settle(self._open.parent, self._num_lanes)

    def _zero(self) -> None:
        for flat in self._flats:
            flat.zero_()


class FastSum:
    """All lanes into one buffer, then all_reduce: coverage stays exact, rounding varies with the world."""

    def __init__(self, flats: list[Tensor], group: Group) -> None:
        self._flats, self._group = flats, group

    def begin(self, lanes: range) -> None:
        for flat in self._flats:
            flat.zero_()

    def lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self, divisor: float) -> None:
        for flat in self._flats:
            self._group.all_reduce(flat)
            flat.div_(divisor)


def exchange(
    flat: Tensor,
    mine: Mapping[Part, Tensor],
    layout: Sequence[Sequence[Part]],
    group: Group,
    num_lanes: int,
    scratch: Scratch,
) -> None:
    """Finish the tree over all ranks' parts and leave the whole sum in `flat`, which holds one of `mine`.

    NCCL would deadlock on receives posted at the start, and has nothing to gain: both ways have a ring's volume.
    """
    if group.size == 2 and is_balanced(layout):
        group.all_reduce(flat)  # one addition for each element, and it commutes: there is no order to keep
    elif group.size & (group.size - 1) == 0 and is_balanced(layout) and not flat.is_cuda:
        halve_and_double(flat, group, scratch)
    else:
        finish_in_chunks(flat, mine, layout, group, num_lanes, scratch)


def is_balanced(layout: Sequence[Sequence[Part]]) -> bool:
    """Say whether every rank holds exactly one part, all of one level, in order."""
    level = layout[0][0].level
    return all(list(parts) == [Part(level, rank)] for rank, parts in enumerate(layout))


def halve_and_double(flat: Tensor, group: Group, scratch: Scratch) -> None:
    """Reduce by recursive halving and gather by recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.5).

    Partners meet in the tree's order, siblings first, so the sum is the tree's; the volume is a ring's. All receives
    are posted at the start. What is given away is received again, whole, only by the doubling's mirrored turn.
    """
    turns = halving_turns(group.rank, group.size, flat.numel())
    arriving = scratch.split([hi - lo for _, (lo, hi), _ in turns], flat)
    halving = [group.receive(turn[0], part) for turn, part in zip(turns, arriving, strict=True)]
    doubling = [group.receive(partner, flat[lo:hi]) for partner, _, (lo, hi) in reversed(turns)]
    sends = []
    for (partner, (keep_lo, keep_hi), (lo, hi)), part, receipt in zip(turns, arriving, halving, strict=True):
        sends.append(group.send(partner, flat[lo:hi]))
        group.wait([receipt])
        flat[keep_lo:keep_hi].add_(part)
    for (partner, (keep_lo, keep_hi), _), receipt in zip(reversed(turns), doubling, strict=True):
        sends.append(group.send(partner, flat[keep_lo:keep_hi]))
        group.wait([receipt])
    group.wait(sends)


def halving_turns(rank: int, size: int, length: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return (partner, kept, given) of each turn of a recursive halving; kept and given are half-open slices."""
    turns, lo, hi = [], 0, length
    for turn in range(size.bit_length() - 1):
        partner, middle = rank ^ (1 << turn), (lo + hi) // 2
        keep, give = ((lo, middle), (middle, hi)) if rank < partner else ((middle, hi), (lo, middle))
        turns.append((partner, keep, give))
        lo, hi = keep
    return turns


def finish_in_chunks(
    flat: Tensor,
    mine: Mapping[Part, Tensor],
    layout: Sequence[Sequence[Part]],
    group: Group,
    num_lanes: int,
    scratch: Scratch,
) -> None:
    """Let every rank finish the tree over its 1/W of the vector, from all ranks' parts of it, and gather."""
    bounds = [rank * flat.numel() // group.size for rank in range(group.size + 1)]
    lo, hi = bounds[group.rank], bounds[group.rank + 1]
    # Every rank begins with its right neighbour, so that no receiver is flooded by all at once.
    others = [(group.rank + distance) % group.size for distance in range(1, group.size)]
    chunk = {rank: slice(bounds[rank], bounds[rank + 1]) for rank in others}
    sums: dict[Part, Tensor] = {part: buffer[lo:hi] for part, buffer in mine.items()}
    theirs = [(rank, part) for rank in others[::-1] for part in layout[rank]]
    sums |= zip((part for _, part in theirs), scratch.split([hi - lo] * len(theirs), flat), strict=True)
    group.exchange(
        sends=[(rank, mine[part][chunk[rank]]) for rank in others for part in layout[group.rank]],
        receives=[(rank, sums[part]) for rank, part in theirs],
    )
    whole = next(iter(sums.values()))
    for left, right, parent in merge_plan(list(sums), num_lanes):
        whole = sums[parent] = sums.pop(left).add_(sums.pop(right))
    if whole.data_ptr() != flat[lo:hi].data_ptr():
        flat[lo:hi].copy_(whole)
    group.exchange(
        sends=[(rank, flat[lo:hi]) for rank in others], receives=[(rank, flat[chunk[rank]]) for rank in others[::-1]]
    )


def gather_lane_table(
    group: Group, num_lanes: int, rows: Mapping[int, Sequence[float | int]]
) -> list[Sequence[float | int]]:
    """Return every lane's row, by lane, from the rows of each rank's own lanes, in one collective.

    All rows have one length, below 64. A float travels as its bits, an integer modulo 2^64 as it is; each row's first
    word says which is which, so that one rank's 0 and another's 0.0 cannot be taken for each other.
    """
    words = [[_kinds(row), *(_to_word(value) for value in row)] for _, row in sorted(rows.items())]
    most = -(-num_lanes // group.size)
    mine = torch.zeros((most, len(words[0])), dtype=torch.int64)
    mine[: len(words)] = torch.tensor(words)
    return _read_table(group.all_gather(mine), num_lanes, group.size)


def _read_table(gathered: Tensor, num_lanes: int, size: int) -> list[Sequence[float | int]]:
    """Return the rows of all lanes, of which the first word has been taken for what it says."""
    table = gathered.cpu().numpy()
    columns = table.reshape(-1, table.shape[-1])[_places(num_lanes, size)].T.copy()
    (kinds, *integers), (_, *floats) = (columns.view(kind).tolist() for kind in (np.uint64, np.float64))
    by_kind = {
        kind: list(zip(*(floats[c] if kind >> c & 1 else integers[c] for c in range(len(floats))), strict=True))
        for kind in set(kinds)
    }
    return [by_kind[kind][lane] for lane, kind in enumerate(kinds)]


@lru_cache(64)
def _places(num_lanes: int, size: int) -> npt.NDArray[np.int64]:
    """Return where every lane's row is among the gathered ones, of which each rank has as many as the largest."""
    most = -(-num_lanes // size)
    owned = (owned_lanes(rank, size, num_lanes) for rank in range(size))
    return np.array([rank * most + place for rank, lanes in enumerate(owned) for place in range(len(lanes))])


def tree_sum(values: Sequence[float]) -> float:
    """Add the lanes' values along the tree."""
    sums = list(values)
    for left, right in lane_additions(len(sums)):
        sums[left] += sums[right]
    return sums[0]


def _kinds(row: Sequence[float | int]) -> int:
    """Return a word whose bit c says that column c is a float."""
    return sum(isinstance(value, float) << column for column, value in enumerate(row))


def _to_word(value: float | int) -> int:
    """Return a value's 64 bits as a signed integer."""
    packed = struct.pack("<d", value) if isinstance(value, float) else (value & (1 << 64) - 1).to_bytes(8, "little")
    return int.from_bytes(packed, "little", signed=True)
