"""Dealt lanes form the one tree; the exchange of chunks gives every holder its sum, at a reduce-scatter's volume."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.lanes import Counter, Part, owned_lanes, parts_of, root_of
from elastic_train.placement.arcs import Path
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seats import deal_lanes, group_lanes, lanes_by_owner, seats_of
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


worlds = st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 70))


@given(worlds)
def test_every_lane_is_computed_by_one_rank(world: tuple[int, int, int]) -> None:
    """The lanes cover all groups, turns and slots; a group's lanes are those that its ranks would own individually."""
    num_ranks, copies, num_lanes = world
    seats = seats_of([("long",)] * (num_ranks // 2) + [()] * (num_ranks - num_ranks // 2), copies)
    lanes = []
    for seat in seats:
        turns = deal_lanes(seat, num_ranks, num_lanes)
        assert [lane for turn in turns for lane in turn] == list(group_lanes(seat, num_ranks, num_lanes))
        lanes += [turn[seat.slot] for turn in turns if seat.slot < len(turn)]
    assert sorted(lanes) == list(range(num_lanes))


def test_a_small_group_has_no_more_turns_than_a_large_one() -> None:
    """A group of seven and a group of one, 16 lanes: two turns for each rank, not two and eight."""
    seats = seats_of([("long",)] * 7 + [("short",)], 2)
    assert {len(deal_lanes(seat, 8, 16)) for seat in seats} == {2}


@given(st.integers(1, 130), st.data())
def test_the_counter_adds_the_tree_from_any_runs_of_subtrees(num_lanes: int, data: st.DataObject) -> None:
    """Starting from single leaves, or from sums of ranks that own neighbouring lanes, one sum of all lanes remains."""
    num_ranks = data.draw(st.integers(1, num_lanes))
    counter: Counter[int] = Counter(num_lanes, lambda left, right: left + right)
    for rank in range(num_ranks):
        for part in parts_of(owned_lanes(rank, num_ranks, num_lanes), num_lanes):
            counter.push(part, min(num_lanes, (part.index + 1) << part.level) - part.lo)
            assert len(counter.parts) <= 1 + (num_lanes - 1).bit_length()
    assert counter.parts == {root_of(num_lanes): num_lanes}


@given(st.permutations(range(11)))
def test_leaves_in_any_order_make_the_same_sums(leaves: list[int]) -> None:
    """Each sum adds its right half to its left half."""
    counter: Counter[tuple[object, ...]] = Counter(11, lambda left, right: (left, right))
    for leaf in leaves:
        counter.push(Part(0, leaf), (leaf,))
    assert counter.parts == {root_of(11): _tree(0, 16, 11)}
    some: Counter[int] = Counter(11, int.__add__)
    for leaf in leaves[:5]:
        some.push(Part(0, leaf), 1)
    assert tuple(some.parts) == parts_of(tuple(sorted(leaves[:5])), 11)


def _tree(lo: int, hi: int, num: int) -> tuple[object, ...]:
    if hi - lo == 1:
        return (lo,)
    middle = (lo + hi) // 2
    return _tree(lo, middle, num) if middle >= num else (_tree(lo, middle, num), _tree(middle, hi, num))


def test_a_lane_that_comes_twice_is_refused() -> None:
    counter: Counter[int] = Counter(4, int.__add__)
    counter.push(Part(0, 2), 1)
    with pytest.raises(AssertionError, match="there already"):
        counter.push(Part(0, 2), 1)


@given(worlds, st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (1, 4)]))
def test_owners_in_cells_compute_every_lane_once(world: tuple[int, int, int], degrees: tuple[int, int]) -> None:
    """The lanes are dealt as evenly as possible; lanes that are dealt together follow the order of their turns."""
    (num_cells, copies, num_lanes), (context, expert) = world, degrees
    seats = seats_of([(str(rank // context),) for rank in range(num_cells * context)], copies)
    owned = lanes_by_owner(seats, num_lanes, context, expert)
    assert len(owned) == num_cells * expert
    assert sorted(lane for lanes in owned for lane in lanes) == list(range(num_lanes))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    if degrees == (1, 1):
        turns = [deal_lanes(seat, num_cells, num_lanes) for seat in seats]
        assert [[*lanes] for lanes in owned] == [
            [turn[seat.slot] for turn in of_group if seat.slot < len(turn)]
            for seat, of_group in zip(seats, turns, strict=True)
        ]
