"""The roles that follow from a world's seats: holders and owners of grains, and transfers within a step.

Every rank computes the same from the layout and all ranks' seats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import (
    Circle,
    Column,
    Run,
    all_held,
    runs_of,
    runs_of_each,
    sections_of,
    shared_with,
)
from elastic_train.placement.recut import owned_of
from elastic_train.placement.seats import Seat


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
        """Trained grains whose sums each rank finishes, by rank; see `recut`."""
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
