"""Plan transfers of grains between ranks, and the roles that follow from the seats: holders, owners and exchanges.

Every rank computes the same plan from what each rank has and wants, or from the layout and all ranks' seats. A rank
keeps a grain it has; every other one it needs is sent by one of its holders. Loads are as even as possible: the sum of
squares of the amounts sent is minimal, up to rounding to whole grains, and so is the largest amount.

One holder of each grain is its *owner*: it finishes the gradient's sum and writes the grain to commits. Ownership is as
even as whole grains allow. With copies, a rank owns about its share of one copy, and the only cost of copies is sending
owned grains to the other holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import mix64_array
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import (
    Circle,
    Column,
    Run,
    all_held,
    equal_ones,
    holders_of,
    runs_of,
    runs_of_each,
    sections_of,
    shared_with,
    signs_of,
)
from elastic_train.placement.seats import Seat

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


class Move(NamedTuple):
    """A transfer as runs of flat vectors; each run is contiguous in the memory of both ranks."""

    giver: int
    taker: int
    runs: Sequence[Run]


def by_flats(moves: Iterable[Move], parts: Sequence[Collection[int]]) -> list[list[Move]]:
    """Return the moves within each of several disjoint sets of flat vectors, by number."""
    numbers = {flat: number for number, flats in enumerate(parts) for flat in flats}
    found: list[list[Move]] = [[] for _ in parts]
    for one in moves:
        runs: dict[int, list[Run]] = {}
        for run in one.runs:
            if run.flat in numbers:
                runs.setdefault(numbers[run.flat], []).append(run)
        for number, some in runs.items():
            found[number].append(one._replace(runs=some))
    return found


def others_of(rank: int, size: int) -> list[int]:
    """Return all other ranks, starting at the right neighbour, so that senders spread over receivers."""
    return [(rank + distance) % size for distance in range(1, size)]


class Seating:
    """The seats of all ranks of a world, by rank; this one is `rank`."""

    def __init__(self, layout: Layout, circle: Circle, seats: Sequence[Seat], rank: int) -> None:
        self.layout, self.circle, self.seats, self.rank = layout, circle, list(seats), rank
        self.holdings = all_held(circle, seats)
        self._sections, self._runs = dict[int, Int64s](), dict[int, tuple[Int64s, list[Run]]]()
        self._owned = dict[tuple[int, ...], list[Int64s]]()

    @property
    def seat(self) -> Seat:
        return self.seats[self.rank]

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold each grain, which is the number of groups."""
        return 1 + max(seat.group for seat in self.seats)

    @property
    def held(self) -> Int64s:
        """Numbers of the grains that this rank holds, ascending."""
        return self.holdings[self.rank]

    @cached_property
    def trained(self) -> list[Int64s]:
        """Grains that each rank holds and the optimizer updates, by rank."""
        return list(map(self.layout.trained_of, self.holdings))

    @cached_property
    def owned(self) -> list[Int64s]:
        """Trained grains whose sums each rank finishes, by rank."""
        return list(map(self.layout.trained_of, self.all_owned))

    @cached_property
    def summed(self) -> list[Int64s]:
        """Trained grains that each rank sums for its group, by rank; of several ranks with one slot, one sums.

        If no ranks of a group hold the same grains, these are all that a rank holds.
        """
        by_group: dict[int, list[int]] = {}
        for rank, seat in enumerate(self.seats):
            by_group.setdefault(seat.group, []).append(rank)
        found = list(self.trained)
        for ranks in by_group.values():
            if len({self.seats[rank].slot for rank in ranks}) < len(ranks):
                owned = owned_of([self.holdings[rank] for rank in ranks], self.layout.span)
                for rank, grains in zip(ranks, owned, strict=True):
                    found[rank] = self.layout.trained_of(grains)
        return found

    def are_sole_holders(self, ranks: Sequence[bool]) -> bool:
        """Return True if `ranks` (flags by rank) hold grains that no other rank does."""
        kept = (seat.arcs for seat, is_marked in zip(self.seats, ranks, strict=True) if not is_marked)
        return Column(self.layout, self.circle).missing(kept) > 0

    @property
    def all_owned(self) -> list[Int64s]:
        """Grains that each rank owns, by rank, including frozen ones."""
        return self.owned_by(range(len(self.seats)))

    def owned_by(self, owners: Sequence[int]) -> list[Int64s]:
        """Return the grains that each rank owns, by rank, if only `owners` own any; raise LookupError as `owned_of`."""
        if (key := tuple(owners)) not in self._owned:
            self._owned[key] = owned_of(self.holdings, self.layout.span, key)
        return self._owned[key]

    def owned_runs(self) -> list[list[Run]]:
        """Return the runs that each rank finishes, by rank."""
        return self.runs_of(self.owned)

    # What is moved within a step: from the only sender of each grain to those that want it.

    def deliveries(self) -> list[Move]:
        """Return this rank's moves of finished sums from their owners to the other holders."""
        return self.moves(self.owned, self.trained, others_of(self.rank, len(self.seats)))

    @cached_property
    def refreshes(self) -> list[Move]:
        """This rank's moves of trained weights within its group, so that each rank has all of them."""
        return self.gathers(self.trained)

    def gathers(self, have: Sequence[Int64s]) -> list[Move]:
        """Return this rank's moves by which each rank of its group gets everything that the group's ranks have."""
        return self.moves(have, self._everything(), self.neighbours())

    def shares(self) -> list[Move]:
        """Return this rank's moves, also to itself, of what ranks of its group hold, as cut in their memory."""
        return self.moves(self.holdings, self._everything(), [self.rank, *self.neighbours()], by_giver=True)

    def gathers_whole(self, num_ranks: int) -> list[Move]:
        """Return this rank's moves by which the first `num_ranks` ranks get all grains; each grain's owner sends it."""
        wants = [grains if rank < num_ranks else grains[:0] for rank, grains in enumerate(self._everything())]
        return self.moves(self.all_owned, wants, range(len(self.seats)), by_giver=True)

    def leaves(self) -> list[Move]:
        """Return this rank's moves of leaves within its group, also to itself, to the ranks that sum them."""
        return self.moves(self._everything(), self.summed, [self.rank, *self.neighbours()])

    def subtrees(self) -> list[Move]:
        """Return this rank's moves of its group's sums to the ranks of other groups that sum the same grains."""
        others = [
            other for other in others_of(self.rank, len(self.seats)) if self.seats[other].group != self.seat.group
        ]
        return self.moves(self.summed, self.summed, others)

    def means(self) -> list[Move]:
        """Return this rank's moves of its group's means from the ranks that sum them to those that hold them."""
        return self.moves(self.summed, self.trained, [self.rank, *self.neighbours()])

    def moves(
        self, have: Sequence[Int64s], wants: Sequence[Int64s], peers: Sequence[int], *, by_giver: bool = False
    ) -> list[Move]:
        """Return the moves between this rank and peers, which may include itself, of what one has and the other wants.

        Sends are in the order of the peers, and receives in the reverse order, so that senders spread over receivers.
        The cost does not grow with the square of the world. With `by_giver`, runs end where the giver's memory is cut.
        """
        rank, others = self.rank, [peer for peer in reversed(peers) if peer != self.rank]
        given = zip(peers, shared_with(have[rank], [wants[peer] for peer in peers]), strict=True)
        taken = zip(others, shared_with(wants[rank], [have[peer] for peer in others]), strict=True)
        transfers = [(rank, *one) for one in given] + [(giver, rank, grains) for giver, grains in taken]
        transfers = [one for one in transfers if one[2].size]
        if by_giver:
            return [Move(giver, taker, self.runs_at(giver, grains)) for giver, taker, grains in transfers]
        runs = self.runs_of([grains for *_, grains in transfers])
        return [Move(giver, taker, some) for (giver, taker, _), some in zip(transfers, runs, strict=True)]

    def runs_of(self, holdings: Sequence[Int64s]) -> list[list[Run]]:
        """Return the runs of each of several holdings; those of one object are worked out once."""
        new = [grains for grains in holdings if id(grains) not in self._runs]
        for grains, runs in zip(new, runs_of_each(self.layout, new), strict=True):
            self._runs[id(grains)] = grains, runs  # its number is not given to another object
        return [self._runs[id(grains)][1] for grains in holdings]

    def _everything(self) -> list[Int64s]:
        """Return all grains, for each rank."""
        return [np.arange(self.layout.num_grains)] * len(self.seats)

    def sections_of(self, rank: int) -> Int64s:
        """Return the sections of grains, by number, at whose ends a rank's memory is cut: its group's bases.

        So a rank that keeps its base while taking over other grains need not move the base's memory; and all ranks know
        how a rank's memory is cut.
        """
        num_base = self.seats[rank].num_base
        if num_base not in self._sections:
            self._sections[num_base] = sections_of(self.circle, num_base)
        return self._sections[num_base]

    def runs_at(self, rank: int, grains: Int64s) -> list[Run]:
        """Return the positions of grains in the memory of a rank that holds them; each run is contiguous there."""
        return runs_of(self.layout, grains, self.sections_of(rank))

    def neighbours(self) -> list[int]:
        """Return the other ranks of this rank's group, its right neighbour first."""
        others = [rank for rank, seat in enumerate(self.seats) if seat.group == self.seat.group and rank != self.rank]
        return sorted(others, key=lambda rank: (self.seats[rank].slot - self.seat.slot) % self.seat.size)
