"""Plan the transfers by which the ranks of a new world come to hold the grains of their seats.

Every rank computes the same plan from what each rank has and wants. A rank keeps a grain it has; every other one it
needs is sent by one of its holders. Loads are as even as possible: the sum of squares of the amounts sent is minimal,
up to rounding to whole grains, and so is the largest amount.

One holder of each grain is its *owner*: it finishes the gradient's sum and writes the grain to commits. Ownership is as
even as whole grains allow. With copies, a rank owns about its share of one copy, and the only cost of copies is sending
owned grains to the other holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s

_PASSES = 32
"""Limit for the passes that balance the loads; each reduces the sum of squares, and few are needed."""
_NONE: Int64s = np.empty(0, dtype=np.int64)


class Transfer(NamedTuple):
    """Grains, ascending, that one rank sends to another."""

    giver: int
    taker: int
    grains: Int64s


class Recut(NamedTuple):
    """The plan: transfers by giver and taker, and the numbers of the grains that no rank holds, ascending.

    If any grain is lost, there are no transfers: the state must come from a commit.
    """

    transfers: tuple[Transfer, ...] = ()
    lost: Int64s = _NONE


class _Kind(NamedTuple):
    """Grains with the same holders and the same takers, which want but do not hold them."""

    grains: Int64s
    holders: tuple[int, ...]
    takers: tuple[int, ...]


def plan_recut(have: Sequence[Int64s], wants: Sequence[Int64s], spans: Int64s) -> Recut:
    """Plan the transfers that turn `have` into `wants`: grains by rank, ascending.

    `spans` has the elements of every grain, shape (grains,). A grain is lost if a rank wants it and none has it.
    """
    kinds = _kinds(have, wants, spans.size)
    lost = [kind.grains for kind in kinds if not kind.holders]
    if lost:
        return Recut(lost=np.sort(np.concatenate(lost)))
    wanted = [(kind, taker) for kind in kinds for taker in kind.takers]
    given = _even_out([kind.holders for kind, _ in wanted], [int(spans[kind.grains].sum()) for kind, _ in wanted])
    parts: dict[tuple[int, int], list[Int64s]] = {}
    for (kind, taker), shares in zip(wanted, given, strict=True):
        for giver, part in _deal(kind.grains, spans, shares):
            parts.setdefault((giver, taker), []).append(part)
    transfers = (Transfer(*pair, np.sort(np.concatenate(part))) for pair, part in sorted(parts.items()))
    return Recut(tuple(transfers))


def owned_of(holdings: Sequence[Int64s], spans: Int64s, owners: Sequence[int] | None = None) -> list[Int64s]:
    """Return the numbers of the grains that each rank owns, by rank, ascending.

    `holdings` are by rank; `spans` has the elements of every grain, shape (grains,). With `owners`, only these ranks
    own grains. Raises LookupError if a grain has no holder among them.
    """
    may = range(len(holdings)) if owners is None else owners
    have = [grains if rank in may else _NONE for rank, grains in enumerate(holdings)]
    # An imaginary rank that wants everything is served by the holders as evenly as possible.
    wants = [_NONE] * len(holdings) + [np.arange(spans.size, dtype=np.int64)]
    plan = plan_recut([*have, _NONE], wants, spans)
    if plan.lost.size:
        raise LookupError(f"{plan.lost.size} of {spans.size} grains have no holder among the ranks {list(may)}")
    owned = [_NONE] * len(holdings)
    for transfer in plan.transfers:
        owned[transfer.giver] = transfer.grains
    return owned


def _kinds(has: Sequence[Int64s], wants: Sequence[Int64s], num_grains: int) -> list[_Kind]:
    """Return the grains that some rank wants but does not hold, grouped by holders and wanting ranks."""
    moves, holder = np.zeros(num_grains, dtype=np.bool_), np.full(num_grains, -1)
    for rank, (own, wanted) in enumerate(zip(has, wants, strict=True)):
        holder[own] = rank
        moves[wanted[holder[wanted] != rank]] = True
    number, labels = np.cumsum(moves) - 1, np.zeros(np.count_nonzero(moves), dtype=np.int64)
    sets: list[list[int]] = [[]]  # by label: the sets that contain the grains with this label
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
    """Distribute every amount, in elements, over its holders so that their totals are as even as possible.

    Fills one amount at a time like water on top of the others, until a pass changes nothing. This is block coordinate
    descent on the sum of squared totals, which is strictly convex in each block, so it ends at the minimum (Bertsekas:
    Nonlinear Programming, 2nd edition, section 2.7).
    """
    given: list[dict[int, int]] = [{} for _ in amounts]
    totals = dict.fromkeys((rank for ranks in holders for rank in ranks), 0)
    changed, poured, now = dict.fromkeys(totals, 0), [-1] * len(amounts), 0
    for _ in range(_PASSES):
        began = now
        for number, (ranks, amount) in enumerate(zip(holders, amounts, strict=True)):
            if max([changed[rank] for rank in ranks]) <= poured[number]:
                continue  # the result would be the same
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
    """Distribute an amount so that the lowest totals rise to one level; the remainder goes to the first ranks.

    `totals` has pairs of a rank's total and the rank, ascending.
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
    """Cut grains into one run per rank, as close to their shares in elements as whole grains allow."""
    if len(shares) == 1:
        return [(rank, grains) for rank in shares]
    middles = np.cumsum(spans[grains]) - spans[grains] / 2
    edges = np.searchsorted(middles, np.cumsum(list(shares.values()))[:-1])
    parts = zip(shares, np.split(grains, edges), strict=True)
    return [(rank, part) for rank, part in parts if part.size]
