"""Recut: who sends which grains to whom, so that the ranks of a new world come to hold what their seats ask for.

Every rank computes the same plan from the same facts: what each rank holds, and at which step. Only what is held at the
furthest step counts. A rank that has a grain there keeps it; for every other grain that it needs, one of the ranks that
have it sends it. Loads are as even as they can be: the sum of the squares of what ranks send is smallest, to within
rounding to whole grains, which also makes the largest load smallest.

Of the holders of each grain one is its *owner*: it finishes the gradient's sum, and writes the grain in commits. What
ranks own is as even as whole grains allow: with copies, a rank owns about its holdings' part of one copy, and what
owners give to other holders is all that copies cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s

Progress = tuple[int, int]
"""A step, and the term that applied it: ranks that reached the same hold the same bits of whatever they both hold."""

_PASSES = 32
"""Bound on the passes that even the loads out; each brings the sum of squares down, and few are needed."""


_NONE: Int64s = np.empty(0, dtype=np.int64)


class Holder(NamedTuple):
    """What a rank brings into a world: the numbers of the grains that it holds, ascending, and how far they are."""

    reached: Progress = (0, 0)
    grains: Int64s = _NONE


class Transfer(NamedTuple):
    """One rank sends grains to another; their numbers ascend."""

    giver: int
    taker: int
    grains: Int64s


class Recut(NamedTuple):
    """The plan: transfers by giver and taker, and the numbers of the grains that no rank holds, ascending.

    Where any grain is lost there is nothing to transfer: the state has to come from a commit.
    """

    reached: Progress
    transfers: tuple[Transfer, ...] = ()
    lost: Int64s = _NONE


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
    has = [holder.grains if holder.reached == furthest else _NONE for holder in had]
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


def owned_of(holdings: Sequence[Int64s], spans: Int64s, owners: Sequence[int] | None = None) -> list[Int64s]:
    """Return the numbers of the grains that each rank owns, by rank, ascending.

    `holdings` are what ranks hold, by rank; `spans` has the elements of every grain, shape (grains,). With `owners`
    none but these ranks own anything. Raises LookupError if a grain has no holder that may own it.
    """
    may = range(len(holdings)) if owners is None else owners
    none = np.empty(0, dtype=np.int64)
    had = [Holder((0, 0), grains if rank in may else none) for rank, grains in enumerate(holdings)]
    # A rank that is not there, and wants everything, is served by the holders as evenly as they can.
    wants = [none] * len(holdings) + [np.arange(spans.size, dtype=np.int64)]
    plan = plan_recut([*had, Holder()], wants, spans)
    if plan.lost.size:
        raise LookupError(f"{plan.lost.size} of {spans.size} grains have no holder among the ranks {list(may)}")
    owned = [none] * len(holdings)
    for transfer in plan.transfers:
        owned[transfer.giver] = transfer.grains
    return owned


def _kinds(has: Sequence[Int64s], wants: Sequence[Int64s], num_grains: int) -> list[_Kind]:
    """Return the grains that somebody wants and does not hold, by the ranks that hold and that want them."""
    moves, holder = np.zeros(num_grains, dtype=np.bool_), np.full(num_grains, -1)
    for rank, (own, wanted) in enumerate(zip(has, wants, strict=True)):
        holder[own] = rank
        moves[wanted[holder[wanted] != rank]] = True
    number, labels = np.cumsum(moves) - 1, np.zeros(np.count_nonzero(moves), dtype=np.int64)
    sets: list[list[int]] = [[]]  # by label: the grains with it are in these, and in no others
    for place, grains in enumerate((*has, *wants)):
        inside = number[grains[moves[grains]]]
        if inside.size:
            is_split = np.zeros(len(sets), dtype=np.bool_)
            is_split[labels[inside]] = True
            labels[inside] = (np.cumsum(is_split) + len(sets) - 1)[labels[inside]]
            sets += [[*sets[label], place] for label in np.flatnonzero(is_split).tolist()]
    parts = np.split(np.flatnonzero(moves)[np.argsort(labels, kind="stable")], np.cumsum(np.bincount(labels)))
    return [_kind(grains, some, len(has)) for grains, some in zip(parts, sets, strict=False) if grains.size]


def _kind(grains: Int64s, sets: Sequence[int], num_ranks: int) -> _Kind:
    holders = tuple(number for number in sets if number < num_ranks)
    return _Kind(grains, holders, tuple(n - num_ranks for n in sets if n >= num_ranks and n - num_ranks not in holders))


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
            if max([changed[rank] for rank in ranks]) <= poured[number]:
                continue  # it would come to the same
            old = given[number]
            others = sorted([(totals[rank] - old.get(rank, 0), rank) for rank in ranks])
            new = given[number] = _pour(amount, others)
            poured[number] = now = now + (new != old)
            for total, rank in others:
                if (total := total + new.get(rank, 0)) != totals[rank]:
                    totals[rank], changed[rank] = total, now
        if now == began:
            break
    return given


def _pour(amount: int, totals: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Share an amount out so that the lowest totals rise to one level; what does not divide goes to the first ranks.

    `totals` are those of ranks, ascending, and the ranks.
    """
    shares: dict[int, int] = {}
    below = count = 0
    for total, _ in totals:
        below += total
        count += 1
        level, rest = divmod(amount + below, count)
        if count == len(totals) or level < totals[count][0]:
            break
    for total, rank in totals[:count]:
        if share := level - total + (rest > 0):
            shares[rank] = share
        rest -= 1
    return shares


def _deal(grains: Int64s, spans: Int64s, shares: dict[int, int]) -> list[tuple[int, Int64s]]:
    """Cut grains into one run per rank, as near to their shares in elements as whole grains allow."""
    if len(shares) == 1:
        return [(rank, grains) for rank in shares]
    middles = np.cumsum(spans[grains]) - spans[grains] / 2
    edges = np.searchsorted(middles, np.cumsum(list(shares.values()))[:-1])
    parts = zip(shares, np.split(grains, edges), strict=True)
    return [(rank, part) for rank, part in parts if part.size]
