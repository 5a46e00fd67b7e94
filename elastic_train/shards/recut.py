"""Recut: who sends which grains to whom, so that the ranks of a new world come to hold what their seats ask for.

Every rank computes the same plan from the same facts: what each rank holds, and at which step. Only what is held at the
furthest step counts. A rank that has a grain there keeps it; for every other grain that it needs, one of the ranks that
have it sends it. Loads are as even as they can be: the sum of the squares of what ranks send is smallest, to within
rounding to whole grains, which also makes the largest load smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_train.core.arrays import Int64s

Reached = tuple[int, int]
"""A step, and the term that applied it: ranks that reached the same hold the same bits of whatever they both hold."""

Table = npt.NDArray[np.bool_]
"""Which rank has which grain; shape (ranks, grains)."""

_PASSES = 32
"""Bound on the passes that even the loads out; each brings the sum of squares down, and few are needed."""


def _none() -> Int64s:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Holder:
    """What a rank brings into a world: the numbers of the grains that it holds, ascending, and how far they are."""

    reached: Reached = (0, 0)
    grains: Int64s = field(default_factory=_none)


class Transfer(NamedTuple):
    """One rank sends grains to another; their numbers ascend."""

    giver: int
    taker: int
    grains: Int64s


@dataclass(frozen=True, slots=True)
class Recut:
    """The plan: transfers by giver and taker, and the numbers of the grains that no rank holds, ascending.

    Where any grain is lost there is nothing to transfer: the state has to come from a commit.
    """

    reached: Reached
    transfers: tuple[Transfer, ...] = ()
    lost: Int64s = field(default_factory=_none)


def plan_recut(had: Sequence[Holder], wants: Sequence[Int64s], spans: Int64s) -> Recut:
    """Plan how every rank comes to hold what it wants, by rank, from what ranks had; both are by rank.

    `spans` has the elements of every grain, shape (grains,). A rank without a state brings an empty `Holder`. A grain
    counts as lost if somebody wants it and nobody holds it at the furthest step of those who hold anything.
    """
    furthest = max((holder.reached for holder in had if holder.grains.size), default=(0, 0))
    has = _table([holder.grains if holder.reached == furthest else holder.grains[:0] for holder in had], spans.size)
    needs = _table(wants, spans.size)
    lost = np.flatnonzero(needs.any(axis=0) & ~has.any(axis=0))
    if lost.size:
        return Recut(furthest, lost=lost)
    classes = _classes(has, needs & ~has)
    given = _even_out([holders for _, holders, _ in classes], [int(spans[grains].sum()) for _, _, grains in classes])
    parts: dict[tuple[int, int], list[Int64s]] = {}
    for (taker, _, grains), shares in zip(classes, given, strict=True):
        for giver, part in _deal(grains, spans, shares):
            parts.setdefault((giver, taker), []).append(part)
    return Recut(
        furthest, tuple(Transfer(*pair, np.sort(np.concatenate(part))) for pair, part in sorted(parts.items()))
    )


def _table(grains: Sequence[Int64s], num_grains: int) -> Table:
    """Return which rank has which grain; shape (ranks, grains)."""
    table = np.zeros((len(grains), num_grains), dtype=np.bool_)
    for rank, numbers in enumerate(grains):
        table[rank, numbers] = True
    return table


def _classes(has: Table, lacks: Table) -> list[tuple[int, tuple[int, ...], Int64s]]:
    """Return what every taker lacks, by the ranks that hold it: (taker, holders, grains), each class once."""
    columns = np.flatnonzero(lacks.any(axis=0))
    has, lacks = has[:, columns], lacks[:, columns]
    kinds = _kinds(has)
    found = []
    for taker, row in enumerate(lacks):
        missing = np.flatnonzero(row)
        for kind in np.unique(kinds[missing]):
            grains = missing[kinds[missing] == kind]
            found.append((taker, tuple(np.flatnonzero(has[:, grains[0]]).tolist()), columns[grains]))
    return found


def _kinds(has: Table) -> Int64s:
    """Number the grains so that those that the same ranks hold have one number; shape (grains,)."""
    kinds = np.zeros(has.shape[1], dtype=np.int64)
    for lo in range(0, len(has), 32):
        some = has[lo : lo + 32].astype(np.int64)
        word = np.bitwise_or.reduce(some << np.arange(len(some))[:, None], axis=0)
        kinds = np.unique(kinds << 32 | word, return_inverse=True)[1].reshape(-1)
    return kinds


def _even_out(holders: Sequence[tuple[int, ...]], amounts: Sequence[int]) -> list[dict[int, int]]:
    """Share every amount out to its holders so that their totals are as even as they can be; in elements.

    Fills one amount at a time as water would on top of all others, until a pass changes nothing. That descends on the
    sum of the squared totals block by block, which for a convex sum over independent blocks ends at its minimum
    (Tseng: Convergence of a block coordinate descent method, 2001).
    """
    given: list[dict[int, int]] = [{} for _ in amounts]
    totals: dict[int, int] = {}
    for _ in range(_PASSES):
        before = [dict(shares) for shares in given]
        for number, (ranks, amount) in enumerate(zip(holders, amounts, strict=True)):
            for rank, share in given[number].items():
                totals[rank] -= share
            given[number] = _pour(amount, {rank: totals.get(rank, 0) for rank in ranks})
            for rank, share in given[number].items():
                totals[rank] = totals.get(rank, 0) + share
        if given == before:
            break
    return given


def _pour(amount: int, totals: dict[int, int]) -> dict[int, int]:
    """Share an amount out so that the lowest totals rise to one level; what does not divide goes to the first ranks."""
    ranks = sorted(totals, key=lambda rank: (totals[rank], rank))
    below = 0
    for count, rank in enumerate(ranks, start=1):
        below += totals[rank]
        level, rest = divmod(amount + below, count)
        if count == len(ranks) or level < totals[ranks[count]]:
            break
    shares = {rank: level - totals[rank] + (place < rest) for place, rank in enumerate(ranks[:count])}
    return {rank: share for rank, share in shares.items() if share}


def _deal(grains: Int64s, spans: Int64s, shares: dict[int, int]) -> list[tuple[int, Int64s]]:
    """Cut grains into one run per rank, as near to their shares in elements as whole grains allow."""
    middles = np.cumsum(spans[grains]) - spans[grains] / 2
    edges = np.searchsorted(middles, np.cumsum(list(shares.values()))[:-1])
    parts = zip(shares, np.split(grains, edges), strict=True)
    return [(rank, part) for rank, part in parts if part.size]
