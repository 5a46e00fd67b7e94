"""The exchange of chunks: every holder ends with the one tree's sum, at a reduce-scatter's volume."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.lanes import parts_of
from elastic_train.placement.deal import deal_lanes, group_lanes
from elastic_train.placement.domains import Path
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import blocks, check_sums, num_sent, sums_of_step

LAYOUT = blocks(2, 6)
CIRCLE = circle_of(LAYOUT)
WORLDS = [
    (size, copies, lanes) for size in range(1, 8) for copies in (1, 2, 3) for lanes in (size, 8, 13) if lanes >= size
]


def test_every_world_adds_the_same_tree() -> None:
    """Every holder of every grain, in every group; no holder keeps more than 1 + log2 L sums."""
    for num_ranks, copies, num_lanes in WORLDS:
        seats = seats_of([()] * num_ranks, copies)
        holdings = all_held(CIRCLE, seats)
        check_sums(seats, holdings, num_lanes, sums_of_step(seats, holdings, num_lanes))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=40)
def test_uneven_groups_add_the_same_tree(racks: list[int], copies: int, more: int) -> None:
    paths: list[Path] = [(f"rack{number}",) for number, size in enumerate(racks) for _ in range(size)]
    seats = seats_of(paths, copies)
    holdings, num_lanes = all_held(CIRCLE, seats), len(paths) + more
    check_sums(seats, holdings, num_lanes, sums_of_step(seats, holdings, num_lanes))


@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 40))
def test_a_leaf_is_sent_at_a_reduce_scatters_volume(num_ranks: int, copies: int, more: int) -> None:
    """A rank sends all but its own share of every leaf: on average (S - 1) / S of it in a group of S."""
    seats = seats_of([()] * num_ranks, copies)
    holdings, num_lanes = all_held(CIRCLE, seats), num_ranks + more
    for rank, seat in enumerate(seats):
        own = int(LAYOUT.span[holdings[rank]].sum())
        lanes = sum(seat.slot < len(turn) for turn in deal_lanes(seat, num_ranks, num_lanes))
        leaves, sums = num_sent(rank, seats, holdings, LAYOUT.span, num_lanes)
        assert leaves == lanes * (CIRCLE.length - own)
        others = len({seat.group for seat in seats}) - 1
        assert sums == len(parts_of(group_lanes(seat, num_ranks, num_lanes), num_lanes)) * others * own
