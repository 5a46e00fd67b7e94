"""What a sharded step sends: leaves to the holders within a group, and holders' sums between groups. Volumes.

A lane's leaf is cut along the holdings of its rank's group, and each holder adds the chunks that reach it (see `deal`).
That is a reduce-scatter: of n elements, a rank sends all but its own share, (S - 1) / S of n in a group of S ranks.
When all lanes are in, the holders of a grain in different groups send one another their sums, and each finishes the
same tree. Nobody sends a state around to be safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.lanes import Part, parts_of
from elastic_train.shards.deal import deal_lanes, group_lanes
from elastic_train.shards.seats import Seat


class Chunk(NamedTuple):
    """Grains that one rank sends to another, their numbers ascending."""

    to: int
    grains: Int64s


def leaf_chunks(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Chunk]:
    """Return what a rank sends of each leaf: to every other holder of its group, that one's grains.

    It begins with its right neighbour, so that no receiver is flooded by all at once.
    """
    mine = seats[rank]
    others = [other for other, seat in enumerate(seats) if seat.group == mine.group and other != rank]
    others.sort(key=lambda other: (seats[other].slot - mine.slot) % mine.size)
    return [Chunk(other, holdings[other]) for other in others if holdings[other].size]


def sum_chunks(rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s]) -> list[Chunk]:
    """Return what a rank sends of each of its sums: to holders in other groups, the grains that both hold."""
    chunks: list[Chunk] = []
    if not holdings[rank].size:
        return chunks
    for distance in range(1, len(seats)):
        other = (rank + distance) % len(seats)
        if seats[other].group != seats[rank].group:
            both = np.intersect1d(holdings[rank], holdings[other], assume_unique=True)
            chunks += [Chunk(other, both)] if both.size else []
    return chunks


def group_sums(seat: Seat, num_ranks: int, num_lanes: int) -> tuple[Part, ...]:
    """Return the subtrees whose sums each holder of a group has when all of the group's lanes are in."""
    return parts_of(group_lanes(seat, num_ranks, num_lanes), num_lanes)


def num_sent(
    rank: int, seats: Sequence[Seat], holdings: Sequence[Int64s], spans: Int64s, num_lanes: int
) -> tuple[int, int]:
    """Return the elements that a rank sends in a step: of the leaves of its lanes, and of its holdings' sums.

    `spans` has the elements of every grain, shape (grains,). With k lanes, a group of S ranks and n elements that is
    about k * n * (S - 1) / S, and n / S * (groups - 1) for each of its group's sums.
    """
    seat = seats[rank]
    num_turns = sum(seat.slot < len(lanes) for lanes in deal_lanes(seat, len(seats), num_lanes))
    leaf = sum(int(spans[chunk.grains].sum()) for chunk in leaf_chunks(rank, seats, holdings))
    sums = sum(int(spans[chunk.grains].sum()) for chunk in sum_chunks(rank, seats, holdings))
    return num_turns * leaf, len(group_sums(seat, len(seats), num_lanes)) * sums
