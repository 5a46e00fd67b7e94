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
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import mix64_array
from elastic_train.placement.holdings import equal_ones, holders_of, signs_of

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


def plan_recut(have: Sequence[Int64s], wants: Sequence[Int64s], spans: Int64s) -> Recut:
    """Plan the transfers that turn `have` into `wants`: grains by rank, ascending.

    `spans` has the elements of every grain, shape (grains,). A grain is lost if a rank wants it and none has it.
    """
    wanted = _wanted(have, wants, spans.size)
    lost = [one.grains for one in wanted if not one.holders]
    if lost or not wanted:
        return Recut(lost=np.unique(np.concatenate([_NONE, *lost])))
    return Recut(_transfers(wanted, spans))


def owned_of(holdings: Sequence[Int64s], spans: Int64s, owners: Sequence[int] | None = None) -> list[Int64s]:
    """Return the numbers of the grains that each rank owns, by rank, ascending.

    `holdings` are by rank; `spans` has the elements of every grain, shape (grains,). With `owners`, only these ranks
    own grains. Raises LookupError if a grain has no holder among them.
    """
    may = set(range(len(holdings)) if owners is None else owners)
    have = [grains if rank in may else _NONE for rank, grains in enumerate(holdings)]
    # An imaginary rank that wants everything is served by the holders as evenly as possible.
    wants = [_NONE] * len(holdings) + [np.arange(spans.size, dtype=np.int64)]
    plan = plan_recut([*have, _NONE], wants, spans)
    if plan.lost.size:
        raise LookupError(f"{plan.lost.size} of {spans.size} grains have no holder among the ranks {sorted(may)}")
    owned = [_NONE] * len(holdings)
    for transfer in plan.transfers:
        owned[transfer.giver] = transfer.grains
    return owned


class _Wanted(NamedTuple):
    """Grains, ascending, that a rank wants and does not hold, of equal holders."""

    grains: Int64s
    holders: list[int]
    taker: int


def _wanted(have: Sequence[Int64s], wants: Sequence[Int64s], num_grains: int) -> list[_Wanted]:
    """Return what every rank wants and does not hold; grains with the same holders and takers are planned as one.

    The order is by last taker, the last taker before it, and so on, then by holders likewise.
    """
    held, wanted = signs_of(have, num_grains), signs_of(wants, num_grains)
    moving = np.flatnonzero((held != wanted) & (wanted != 0))
    kinds = equal_ones(moving, mix64_array(held[moving]) ^ wanted[moving])
    firsts = [int(grains[0]) for grains in kinds]
    holders, takers = (holders_of(firsts, by_rank, num_grains) for by_rank in (have, wants))
    order = sorted(range(len(kinds)), key=lambda kind: (takers[kind][::-1], holders[kind][::-1]))
    return [
        _Wanted(kinds[kind], holders[kind], taker)
        for kind in order
        for taker in takers[kind]
        if taker not in holders[kind]
    ]


def _transfers(wanted: Sequence[_Wanted], spans: Int64s) -> tuple[Transfer, ...]:
    """Return the transfers of wanted grains, which are cut into one run per holder, as even as whole grains allow."""
    grains = np.concatenate([one.grains for one in wanted])
    totals = np.cumsum(spans[grains])
    ends = totals[np.cumsum([one.grains.size for one in wanted]) - 1].tolist()
    shares = _even_out([one.holders for one in wanted], [hi - lo for lo, hi in pairwise([0, *ends])])
    pairs = [(giver, one.taker) for one, share in zip(wanted, shares, strict=True) for giver in share]
    given = np.cumsum([amount for share in shares for amount in share.values()])
    cuts = np.searchsorted(2 * totals - spans[grains], 2 * given)  # by the grains' middles
    numbers = {pair: number for number, pair in enumerate(sorted(set(pairs)))}
    of_grain = np.repeat([numbers[pair] for pair in pairs], np.diff(cuts, prepend=0))
    ordered, ends = grains[np.lexsort((grains, of_grain))], np.cumsum(np.bincount(of_grain, minlength=len(numbers)))
    parts = zip(numbers, pairwise([0, *ends.tolist()]), strict=True)
    return tuple(Transfer(*pair, ordered[lo:hi]) for pair, (lo, hi) in parts if lo < hi)


def _even_out(holders: Sequence[Sequence[int]], amounts: Sequence[int]) -> list[dict[int, int]]:
    """Distribute every amount, in elements, over its holders so that their totals are as even as possible.

    Fills one amount at a time like water on top of the others, until a pass changes nothing. This is block coordinate
    descent on the sum of squared totals, which is strictly convex in each block, so it ends at the minimum (Bertsekas:
    Nonlinear Programming, 2nd edition, section 2.7).
    """
    given: list[dict[int, int]] = [{} for _ in amounts]
    totals = dict.fromkeys((rank for ranks in holders for rank in ranks), 0)
    for _ in range(_PASSES):
        is_even = True
        for number, (ranks, amount) in enumerate(zip(holders, amounts, strict=True)):
            old = given[number]
            if len(old) == len(ranks) == 1:
                continue
            others = sorted([(totals[rank] - old.get(rank, 0), rank) for rank in ranks])
            given[number] = new = _pour(amount, others)
            if new != old:
                is_even = False
                for total, rank in others:
                    totals[rank] = total + new.get(rank, 0)
        if is_even:
            break
    return given


def _pour(amount: int, totals: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Distribute an amount so that the lowest totals rise to one level; the remainder goes to the first ranks.

    `totals` has pairs of a rank's total and the rank, ascending.
    """
    if len(totals) == 2:  # most often
        (lowest, first), (other, second) = totals
        share = (amount + lowest - other) // 2
        return {first: amount - share, second: share} if share > 0 else {first: amount}
    below = 0
    for count, (total, _) in enumerate(totals, 1):
        below += total
        level, rest = divmod(amount + below, count)
        if count == len(totals) or level < totals[count][0]:
            break
    shares = {rank: level - total + (place < rest) for place, (total, rank) in enumerate(totals[:count])}
    return {rank: share for rank, share in shares.items() if share}
