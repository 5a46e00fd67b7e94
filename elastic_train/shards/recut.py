"""Recut: who sends which grains to whom, so that the ranks of a new world come to hold what their seats ask for.

Every rank computes the same plan from the same facts: what each rank holds, and at which step. Only what is held at the
furthest step counts. A rank that has a grain there keeps it; for every other grain that it needs, one of the ranks that
have it sends it. Loads are as even as they can be: the sum of the squares of what ranks send is smallest, to within
rounding to whole grains, which also makes the largest load smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_train.core.arrays import Int64s

Reached = tuple[int, int]
"""A step, and the term that applied it: ranks that reached the same hold the same bits of whatever they both hold."""

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


class _Kind(NamedTuple):
    """Grains that the same ranks hold and the same ranks want; `takers` want them and do not hold them."""

    grains: Int64s
    holders: tuple[int, ...]
    takers: tuple[int, ...]


def plan_recut(had: Sequence[Holder], wants: Sequence[Int64s], spans: Int64s) -> Recut:
    """Plan how every rank comes to hold what it wants, by rank, from what ranks had; both are by rank.

    `spans` has the elements of every grain, shape (grains,). A rank without a state brings an empty `Holder`. A grain
    counts as lost if somebody wants it and nobody holds it at the furthest step of those who hold anything.
    """
    furthest = max((holder.reached for holder in had if holder.grains.size), default=(0, 0))
    has = [holder.grains if holder.reached == furthest else _none() for holder in had]
    kinds = list(_kinds(has, wants, spans.size))
    lost = [kind.grains for kind in kinds if kind.takers and not kind.holders]
    if lost:
        return Recut(furthest, lost=np.sort(np.concatenate(lost)))
    wanted = [(kind, taker) for kind in kinds for taker in kind.takers]
    given = _even_out([kind.holders for kind, _ in wanted], [int(spans[kind.grains].sum()) for kind, _ in wanted])
    parts: dict[tuple[int, int], list[Int64s]] = {}
    for (kind, taker), shares in zip(wanted, given, strict=True):
        for giver, part in _deal(kind.grains, spans, shares):
            parts.setdefault((giver, taker), []).append(part)
    transfers = (Transfer(*pair, np.sort(np.concatenate(part))) for pair, part in sorted(parts.items()))
    return Recut(furthest, tuple(transfers))


def _kinds(has: Sequence[Int64s], wants: Sequence[Int64s], num_grains: int) -> Iterator[_Kind]:
    """Yield the grains that somebody holds or wants, by the ranks that do."""
    labels, count = _refine([*has, *wants], num_grains)
    order = np.argsort(labels, kind="stable")
    edges = np.searchsorted(labels[order], np.arange(count + 1))
    holding, wanting = _table(has, labels, count), _table(wants, labels, count)
    for label in range(count):
        holders = np.flatnonzero(holding[:, label]).tolist()
        takers = np.flatnonzero(wanting[:, label] & ~holding[:, label]).tolist()
        yield _Kind(order[edges[label] : edges[label + 1]], tuple(holders), tuple(takers))


def _refine(sets: Sequence[Int64s], num_grains: int) -> tuple[Int64s, int]:
    """Label the grains so that two have one label if and only if they are in the same sets; and count the labels."""
    labels, count = np.zeros(num_grains, dtype=np.int64), 1
    for numbers in sets:
        again, num_inside = _renumbered(labels[numbers], count)
        labels[numbers] = count + again
        count += num_inside
    return _renumbered(labels, count)


def _renumbered(labels: Int64s, below: int) -> tuple[Int64s, int]:
    """Return labels, all of them below a number, as their places among those that are used; and count these."""
    is_used = np.zeros(below, dtype=np.int64)
    is_used[labels] = 1
    places = np.cumsum(is_used)
    return places[labels] - 1, int(places[-1])


def _table(sets: Sequence[Int64s], labels: Int64s, count: int) -> npt.NDArray[np.bool_]:
    """Return which set has the grains of which label; shape (sets, labels)."""
    table = np.zeros((len(sets), count), dtype=np.bool_)
    for number, grains in enumerate(sets):
        table[number, labels[grains]] = True
    return table


def _even_out(holders: Sequence[tuple[int, ...]], amounts: Sequence[int]) -> list[dict[int, int]]:
    """Share every amount out to its holders so that their totals are as even as they can be; in elements.

    Fills one amount at a time as water would on top of all others, until a pass changes nothing. That descends on the
    sum of the squared totals block by block, which is strictly convex in each block, and so ends at its minimum
    (Bertsekas: Nonlinear Programming, 2nd edition, section 2.7).
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
