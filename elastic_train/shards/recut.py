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
    kinds = _kinds(has, wants, spans.size)
    lost = [kind.grains for kind in kinds if not kind.holders]
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


def _kinds(has: Sequence[Int64s], wants: Sequence[Int64s], num_grains: int) -> list[_Kind]:
    """Return the grains that somebody wants and does not hold, by the ranks that hold and that want them."""
    moves, holder = np.zeros(num_grains, dtype=np.bool_), np.full(num_grains, -1)
    for rank, (own, wanted) in enumerate(zip(has, wants, strict=True)):
        holder[own] = rank
        moves[wanted[holder[wanted] != rank]] = True
    moving, number = np.flatnonzero(moves), np.cumsum(moves) - 1
    sets = [number[grains[moves[grains]]] for grains in (*has, *wants)]
    labels, count = _refine(sets, moving.size)
    holding, wanting = _table(sets[: len(has)], labels, count), _table(sets[len(has) :], labels, count)
    by_label = moving[np.argsort(labels, kind="stable")]
    parts = np.split(by_label, np.cumsum(np.bincount(labels, minlength=count))[:-1])
    return list(map(_Kind, parts, _marked(holding), _marked(wanting & ~holding)))


def _marked(table: npt.NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Return the sets that have each label, ascending."""
    labels, sets = np.nonzero(table.T)
    return [tuple(some.tolist()) for some in np.split(sets, np.searchsorted(labels, np.arange(1, table.shape[1])))]


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
    totals = dict.fromkeys((rank for ranks in holders for rank in ranks), 0)
    changed, poured, now = dict.fromkeys(totals, 0), [-1] * len(amounts), 0
    for _ in range(_PASSES):
        began = now
        for number, (ranks, amount) in enumerate(zip(holders, amounts, strict=True)):
            if max(map(changed.__getitem__, ranks)) <= poured[number]:
                continue  # it would come to the same
            old = given[number]
            new = given[number] = _pour(amount, sorted([(totals[rank] - old.get(rank, 0), rank) for rank in ranks]))
            poured[number] = now = now + (new != old)
            for rank in ranks:
                if more := new.get(rank, 0) - old.get(rank, 0):
                    totals[rank] += more
                    changed[rank] = now
        if now == began:
            break
    return given


def _pour(amount: int, totals: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Share an amount out so that the lowest totals rise to one level; what does not divide goes to the first ranks.

    `totals` are those of ranks, ascending, and the ranks.
    """
    below = 0
    for count, (total, _) in enumerate(totals, start=1):
        below += total
        level, rest = divmod(amount + below, count)
        if count == len(totals) or level < totals[count][0]:
            break
    shares = ((rank, level - total + (place < rest)) for place, (total, rank) in enumerate(totals[:count]))
    return {rank: share for rank, share in shares if share}


def _deal(grains: Int64s, spans: Int64s, shares: dict[int, int]) -> list[tuple[int, Int64s]]:
    """Cut grains into one run per rank, as near to their shares in elements as whole grains allow."""
    if len(shares) == 1:
        return [(rank, grains) for rank in shares]
    middles = np.cumsum(spans[grains]) - spans[grains] / 2
    edges = np.searchsorted(middles, np.cumsum(list(shares.values()))[:-1])
    parts = zip(shares, np.split(grains, edges), strict=True)
    return [(rank, part) for rank, part in parts if part.size]
