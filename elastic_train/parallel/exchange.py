"""Exchanges between ranks: of partial sums, to finish the tree of lanes, and of the runs that a plan moves.

If every rank holds the whole gradient, it is finished everywhere: by halving and doubling, or in chunks. Both give the
tree's sum and differ only in which rank adds which elements. The volume is that of a ring, or (k + 1) / 2 times it for
k subtrees per rank. If ranks hold shards, each rank sends every owner its sums of the owner's grains: the first half of
an all-reduce, (W - 1) / W of the elements. Each owner then sends the result to the other holders, (copies - 1) / W.
Elements that a rank does not hold stay unfinished there. Alternatively, sums are added in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from elastic_train.core.lanes import Part, merge_plan
from elastic_train.parallel.group import Group
from elastic_train.parallel.point_to_point import PointToPoint
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Move, others_of
from elastic_train.system.huge_pages import on_huge_pages


class Scratch:
    """Receive buffers kept from step to step: fresh pages would cost more than the additions."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def split(self, sizes: Sequence[int], like: Tensor) -> Sequence[Tensor]:
        """Return one flat tensor of each size, of `like`'s dtype and device; valid until the next call."""
        kind, total = (like.dtype, like.device), sum(sizes)
        if kind not in self._kept or self._kept[kind].numel() < total:
            self._kept[kind] = on_huge_pages(torch.empty(total, dtype=like.dtype, device=like.device))
        return self._kept[kind][:total].split_with_sizes(list(sizes))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the kept buffers."""
        yield from self._kept.values()


class Subtrees(NamedTuple):
    """Elements [lo, hi) of flat vector `number`; each rank has the sums of the subtrees in `layout`.

    `mine` has this rank's sums, as buffers for all flat vectors; one of them is `flat`.
    """

    flat: Tensor
    number: int
    lo: int
    hi: int
    mine: Mapping[Part, Sequence[Tensor]]
    layout: Sequence[Sequence[Part]]
    num_leaves: int


def exchange(elements: Subtrees, group: PointToPoint, scratch: Scratch) -> None:
    """Finish the tree over all ranks' subtrees and leave the whole sum in the flat vector.

    NCCL would deadlock on receives posted at the start, and gains nothing: both ways have a ring's volume.
    """
    flat, layout = elements.flat[elements.lo : elements.hi], elements.layout
    if group.size == 2 and isinstance(group, Group) and is_balanced(layout):
        group.all_reduce(flat)  # one addition per element, which commutes: any order gives the same sum
    elif group.size & (group.size - 1) == 0 and is_balanced(layout) and not group.is_on_device(flat):
        halve_and_double(flat, group, scratch)
    else:
        finish_in_chunks(elements, group, scratch)


def is_balanced(layout: Sequence[Sequence[Part]]) -> bool:
    """Return True if every rank holds exactly one subtree, all of one level, in order."""
    level = layout[0][0].level
    return all(list(parts) == [Part(level, rank)] for rank, parts in enumerate(layout))


def halve_and_double(flat: Tensor, group: PointToPoint, scratch: Scratch) -> None:
    """Reduce by recursive halving and gather by recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.5).

    Partners meet in the tree's order, siblings first, so the sum is the tree's; the volume is a ring's. All receives
    are posted at the start: a slice that was sent is received again only in the mirrored round of the doubling.
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
    """Return (partner, kept, given) of each round of a recursive halving; kept and given are half-open slices."""
    turns, lo, hi = [], 0, length
    for turn in range(size.bit_length() - 1):
        partner, middle = rank ^ (1 << turn), (lo + hi) // 2
        keep, give = ((lo, middle), (middle, hi)) if rank < partner else ((middle, hi), (lo, middle))
        turns.append((partner, keep, give))
        lo, hi = keep
    return turns


def finish_in_chunks(elements: Subtrees, group: PointToPoint, scratch: Scratch) -> None:
    """Finish the tree over 1/W of the elements on each rank, from all ranks' subtrees, and all-gather the result."""
    lo, size = elements.lo, elements.hi - elements.lo
    chunks = list(pairwise(lo + rank * size // group.size for rank in range(group.size + 1)))
    finish_owned(elements, [[Run(elements.number, *chunk)] for chunk in chunks], group, scratch)
    parts, others = [elements.flat[lo:hi] for lo, hi in chunks], others_of(group.rank, group.size)
    group.exchange(
        sends=[(rank, parts[group.rank]) for rank in others], receives=[(rank, parts[rank]) for rank in others[::-1]]
    )


def finish_owned(elements: Subtrees, owned: Sequence[Sequence[Run]], group: PointToPoint, scratch: Scratch) -> None:
    """Finish the tree, on every rank, over the runs that it owns, from all ranks' subtrees."""
    flat, layout, rank, others = elements.flat, elements.layout, group.rank, others_of(group.rank, group.size)
    mine = {part: buffers[elements.number] for part, buffers in elements.mine.items()}
    given, taken = (
        [Move(rank, one, owned[one]) for one in others],
        [Move(one, rank, owned[rank]) for one in others[::-1]],
    )
    theirs = [(part, run) for one in taken for part in layout[one.giver] for run in one.runs]
    arrived = dict(zip(theirs, scratch.split([run.hi - run.lo for _, run in theirs], flat), strict=True))

    def at(part: Part, run: Run) -> Tensor:
        return mine[part][run.lo : run.hi] if part in mine else arrived[part, run]

    group.exchange(*messages_of_sums([*given, *taken], rank, layout.__getitem__, at))
    for run in owned[rank]:
        whole = add_up({part: at(part, run) for parts in layout for part in parts}, elements.num_leaves)
        if whole.data_ptr() != flat[run.lo : run.hi].data_ptr():
            flat[run.lo : run.hi].copy_(whole)


def add_up(sums: dict[Part, Tensor], num_lanes: int) -> Tensor:
    """Add the sums of subtrees in the tree's order, in place; return the sum of the whole tree."""
    whole = next(iter(sums.values()))
    for left, right, parent in merge_plan(list(sums), num_lanes):
        whole = sums[parent] = sums.pop(left).add_(sums.pop(right))
    return whole


class Messages(NamedTuple):
    """Contiguous tensors to send and to receive, as pairs of a rank and a tensor."""

    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]


def messages_of(moves: Iterable[Move], rank: int, tensors: Callable[[Move], Iterable[Tensor]]) -> Messages:
    """Return the messages of a rank's moves; both ranks of a move must list its tensors in the same order.

    A rank sends itself nothing.
    """
    sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
    for one in moves:
        if one.taker != rank:
            sends += [(one.taker, tensor) for tensor in tensors(one)]
        elif one.giver != rank:
            receives += [(one.giver, tensor) for tensor in tensors(one)]
    return Messages(sends, receives)


def messages_of_sums(
    moves: Iterable[Move], rank: int, parts_of: Callable[[int], Sequence[Part]], at: Callable[[Part, Run], Tensor]
) -> Messages:
    """Return the messages by which each giver sends the sums of all of its subtrees; `at` returns their memory."""
    return messages_of(moves, rank, lambda one: (at(part, run) for part in parts_of(one.giver) for run in one.runs))


def move(
    group: Group, moves: Iterable[Move], source: Callable[[Run], Tensor], target: Callable[[Run], Tensor] | None = None
) -> None:
    """Copy runs of this rank from its memory to the takers' memory, by default the same; collective over the group.

    Moves of a rank to itself are copied first.
    """
    into, moves = target or source, list(moves)
    for run in (run for one in moves if one.giver == one.taker for run in one.runs):
        into(run).copy_(source(run))
    sends, receives = messages_of(
        moves, group.rank, lambda one: map(source if one.giver == group.rank else into, one.runs)
    )
    if sends or receives:
        group.exchange(sends, receives)


Reduction = Literal["canonical", "fast"]
Runs = Sequence[Run]


class Reduce(Protocol):
    """A way to reduce the ranks' sums."""

    @property
    def is_ordered(self) -> bool:
        """True if a rank's leaves are added along the tree; else all go into one buffer."""

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        """Finish the sum over some elements of a flat gradient."""

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        """Divide the reduced elements, and send them to their other holders."""


class Everywhere:
    """The sum along the tree, whole on every rank."""

    is_ordered = True

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        if ranks.size > 1:
            exchange(elements, ranks, scratch)

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        for flat in flats:
            flat.div_(divisor)


class InAnyOrder(Everywhere):
    """An all-reduce: the samples are exact, but rounding depends on the world."""

    is_ordered = False

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        assert isinstance(ranks, Group), "this sum never overlaps a pass"
        ranks.all_reduce(elements.flat)


@dataclass(frozen=True, slots=True)
class AtOwners:
    """The sum along the tree on the ranks that hold it; flat gradients are the layout's.

    `owned` has the runs that each rank owns, and `deliveries` this rank's moves of finished runs to the other holders.
    """

    owned: Sequence[Runs]
    deliveries: Sequence[Move]

    @property
    def is_ordered(self) -> bool:
        return True

    def reduce(self, elements: Subtrees, ranks: PointToPoint, scratch: Scratch) -> None:
        """Finish this rank's grains among the elements; other ranks finish theirs."""
        owned = [_within(elements, runs) for runs in self.owned]
        finish_owned(elements, owned, ranks, scratch)

    def divide(self, flats: Sequence[Tensor], divisor: float, ranks: Group) -> None:
        """Divide the grains that this rank has finished, send them to their other holders, and receive theirs."""

        def at(run: Run) -> Tensor:
            return flats[run.flat][run.lo : run.hi]

        for run in self.owned[ranks.rank]:
            at(run).div_(divisor)
        move(ranks, self.deliveries, at)


def _within(elements: Subtrees, runs: Runs) -> list[Run]:
    """Return the intersection of runs with some elements of a flat vector."""
    number, lo, hi = elements.number, elements.lo, elements.hi
    cuts = [Run(number, max(run.lo, lo), min(run.hi, hi)) for run in runs if run.flat == number]
    return [run for run in cuts if run.lo < run.hi]
