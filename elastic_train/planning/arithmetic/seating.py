"""Groups, shares, lanes and microsteps of a layout's replicas, by the same pure functions as in training.

A share is exact if the model's cut into grains is known and the world is small; otherwise it is an even split, within
one grain of the exact share.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.core.lanes import owned_lanes
from elastic_train.placement.arcs import cut_groups
from elastic_train.placement.grains import Layout as Cut
from elastic_train.placement.holdings import all_held, circle_of, num_elements
from elastic_train.placement.seats import Seat, group_lanes, seats_of
from elastic_train.planning.arithmetic.catalogue import Cluster
from elastic_train.planning.arithmetic.layouts import Batch, Layout, place_elements
from elastic_train.planning.arithmetic.model import ModelFacts

MOST_EXACT = 16
"""Number of replicas up to which shares are computed as in training; larger worlds are split evenly to save time."""


@dataclass(frozen=True, slots=True)
class Seated:
    """The rank with the most state and work: one of `group_size` in one of `num_groups` groups, with `lanes` lanes.

    `held` and `held_trained` are elements of its share; `turns` is its group's number of microsteps; `put_aside` is the
    peak number of partial sums in addition to the open one; `parts` is the number of sums at the end.
    """

    num_groups: int
    group_size: int
    lanes: int
    turns: int
    held: float
    held_trained: float
    put_aside: int
    parts: int


def seat_of(model: ModelFacts, layout: Layout, batch: Batch, cluster: Cluster) -> Seated:
    """Return the seat of the rank with the largest share, among ranks that shard the same part of the model."""
    replicas, holders = layout.replicas(cluster.size), layout.summing(cluster.size)
    elements, trained = (place_elements(model, layout, trained=only) for only in (False, True))
    if layout.shards == "none":
        lanes = _most_lanes(replicas, batch.num_lanes)
        return Seated(1, holders, len(lanes), len(lanes), elements, trained, *_replicated(lanes, batch))
    if layout.shards == "optimizer":
        lanes = _most_lanes(replicas, batch.num_lanes)
        sums = _replicated(lanes, batch)
    else:
        lanes, sums = range(0), (0, 0)
    seats = group_seats(holders, layout.copies, cluster)
    seat = min(seats, key=lambda one: one.size)
    whole, own = shares(model.cut if layout.cell == 1 else None, seat.size, replicas, layout.copies, cluster)
    held_all, held_trained = (elements * whole, trained * own)
    if layout.shards != "optimizer":
        cells = group_seats(replicas, layout.copies, cluster)
        cell = min(cells, key=lambda one: one.size)
        runs = min(layout.context, seat.size)  # of leaves, by token position
        sums = _dealt(group_lanes(cell, replicas, batch.num_lanes), batch.num_lanes, runs)
        turns = [-(-len(group_lanes(one, replicas, batch.num_lanes)) // one.size) for one in (cell, *cells)]
        return Seated(len(seats), seat.size, turns[0], max(turns), held_all, held_trained, *sums)
    return Seated(len(seats), seat.size, len(lanes), len(lanes), held_all, held_trained, *sums)


def group_seats(replicas: int, copies: int, cluster: Cluster) -> list[Seat]:
    """Return the first seat of every group; groups are cut over the cluster's nodes as in a new world."""
    return _group_seats(replicas, min(copies, replicas), max(1, cluster.per_node * replicas // cluster.size))


@functools.lru_cache(256)
def _group_seats(replicas: int, num: int, per_node: int) -> list[Seat]:
    paths = [(f"node-{rank // per_node}",) for rank in range(replicas)]
    sizes = [len(group) for group in cut_groups(range(replicas), paths, num)]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        Seat(number, 0, size, first, 0, size, ())
        for number, (size, first) in enumerate(zip(sizes, firsts, strict=True))
    ]


def shares(cut: Cut | None, size: int, replicas: int, copies: int, cluster: Cluster) -> tuple[float, float]:
    """Return the largest fraction of all elements, and of the trained ones, that any rank holds."""
    if cut is None or replicas > MOST_EXACT:
        return 1 / size, 1 / size
    paths = [(f"node-{rank // cluster.per_node}",) for rank in range(replicas)]
    holdings = all_held(circle_of(cut), seats_of(paths, copies))
    whole = sum(flat.numel for flat in cut.flats)
    own = [num_elements(cut, cut.trained_of(grains)) for grains in holdings]
    return (
        max(num_elements(cut, one) for one in holdings) / max(1, whole),
        max(own) / max(1, num_elements(cut, cut.trained)),
    )


def _most_lanes(replicas: int, num_lanes: int) -> range:
    """Return the lanes of a replica with the most lanes and, among these, with the most sums at the end."""
    owned = (owned_lanes(rank, replicas, num_lanes) for rank in range(replicas))
    return max(owned, key=lambda lanes: (len(lanes), len(_subtrees(lanes, num_lanes))))


def _subtrees(lanes: range, num_lanes: int) -> list[int]:
    """Return the number of lanes of each part of consecutive lanes (`parts_of`), without a look at every lane."""
    sizes, lo, top = list[int](), lanes.start, 1 << (num_lanes - 1).bit_length()
    hi = lanes.stop if lanes.stop < num_lanes else top  # the last subtrees are clipped
    while lo < lanes.stop:
        size = min(lo & -lo or top, 1 << (hi - lo).bit_length() - 1)
        sizes.append(min(size, lanes.stop - lo))
        lo += size
    return sizes


def _replicated(lanes: range, batch: Batch) -> tuple[int, int]:
    """Return the peak number of whole gradients put aside, and the number of sums at the end."""
    sizes = _subtrees(lanes, batch.num_lanes)
    return most_put_aside(sizes), len(sizes)


def most_put_aside(sizes: Sequence[int]) -> int:
    """Return the peak number of partial sums, apart from the open one, in the binary counter of a run of lanes.

    Before a lane, a subtree has a sum for each bit of the number of lanes before it. A left sibling stays open.
    """
    return max(number + ((size + 1) // 2).bit_length() - 1 for number, size in enumerate(sizes))


def _dealt(lanes: range, num_lanes: int, runs: int) -> tuple[int, int]:
    """Return the same counts for a rank with sharded gradients: its counter's peak less one, which holds its gradient.

    It adds `runs` runs of leaves, each like that of `lanes`.
    """
    sizes = _subtrees(lanes, num_lanes)
    most = max((number + max(1, size.bit_length() - 1) for number, size in enumerate(sizes)), default=0)
    return max(0, runs * most - 1), runs * len(sizes)
