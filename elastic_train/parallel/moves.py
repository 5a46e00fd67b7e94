"""Carry out a plan's transfers: one exchange of the runs that a rank sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from elastic_train.parallel.group import Group
from elastic_train.placement.holdings import Run
from elastic_train.placement.seating import Move


class Messages(NamedTuple):
    """Contiguous tensors to send and to receive, as pairs of a rank and a tensor."""

    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]


def messages_of(moves: Iterable[Move], rank: int, tensors: Callable[[Move], Iterable[Tensor]]) -> Messages:
    """Return the messages of a rank's moves; both ranks of a move must list its tensors in the same order."""
    sends, receives = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
    for one in moves:
        if one.giver == rank:
            sends += [(one.taker, tensor) for tensor in tensors(one)]
        else:
            receives += [(one.giver, tensor) for tensor in tensors(one)]
    return Messages(sends, receives)


def move(
    group: Group, moves: Iterable[Move], source: Callable[[Run], Tensor], target: Callable[[Run], Tensor] | None = None
) -> None:
    """Copy runs of this rank from its memory to the takers' memory, by default the same; collective over the group.

    Moves of a rank to itself are copied first.
    """
    into, others = target or source, list[Move]()
    for one in moves:
        if one.giver != one.taker:
            others.append(one)
            continue
        for run in one.runs:
            into(run).copy_(source(run))
    sends, receives = messages_of(
        others, group.rank, lambda one: map(source if one.giver == group.rank else into, one.runs)
    )
    if sends or receives:
        group.exchange(sends, receives)
