"""Dealing lanes: every lane is computed once, and whoever adds, adds the one tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.lanes import Part, owned_lanes, parts_of, root_of
from elastic_train.shards.deal import Counter, deal_lanes, group_lanes
from elastic_train.shards.seats import seats_of

worlds = st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 70))


@given(worlds)
def test_every_lane_is_computed_by_one_rank(world: tuple[int, int, int]) -> None:
    """Over all groups, turns and slots; a group's lanes are those that its ranks would own one by one."""
    num_ranks, copies, num_lanes = world
    seats = seats_of([("long",)] * (num_ranks // 2) + [()] * (num_ranks - num_ranks // 2), copies)
    lanes = []
    for seat in seats:
        turns = deal_lanes(seat, num_ranks, num_lanes)
        assert [lane for turn in turns for lane in turn] == list(group_lanes(seat, num_ranks, num_lanes))
        lanes += [turn[seat.slot] for turn in turns if seat.slot < len(turn)]
    assert sorted(lanes) == list(range(num_lanes))


def test_a_small_group_has_no_more_turns_than_a_large_one() -> None:
    """Seven ranks beside one, 16 lanes: two turns for each of them, not two and eight."""
    seats = seats_of([("long",)] * 7 + [("short",)], 2)
    assert {len(deal_lanes(seat, 8, 16)) for seat in seats} == {2}


@given(st.integers(1, 130), st.data())
def test_the_counter_adds_the_tree_from_any_runs_of_subtrees(num_lanes: int, data: st.DataObject) -> None:
    """Leaves one by one, or the sums of ranks that own neighbouring lanes: one sum of all lanes is left."""
    num_ranks = data.draw(st.integers(1, num_lanes))
    counter: Counter[int] = Counter(num_lanes, lambda left, right: left + right)
    for rank in range(num_ranks):
        for part in parts_of(owned_lanes(rank, num_ranks, num_lanes), num_lanes):
            counter.push(part, min(num_lanes, (part.index + 1) << part.level) - part.lo)
            assert len(counter.parts) <= 1 + (num_lanes - 1).bit_length()
    assert counter.parts == {root_of(num_lanes): num_lanes}


def test_a_lane_out_of_order_is_refused() -> None:
    counter: Counter[int] = Counter(4, int.__add__)
    counter.push(Part(0, 2), 1)
    with pytest.raises(AssertionError, match="comes after"):
        counter.push(Part(0, 1), 1)
