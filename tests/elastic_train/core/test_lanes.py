"""Lanes: every lane has one owner in every world, and every world adds the same tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.lanes import Part, lane_seed, merge_plan, owned_lanes, parts_of, root_of, settle

worlds = st.integers(1, 130).flatmap(lambda lanes: st.tuples(st.integers(1, lanes), st.just(lanes)))
ODD_WORLDS = [(w, n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 31, 33, 64) for w in range(1, n + 1)]

Tree = int | tuple["Tree", "Tree"]


@given(worlds)
def test_lanes_are_cut_into_slices_that_differ_by_one(world: tuple[int, int]) -> None:
    """Slices are in order, touch, cover all lanes, and none is empty while ranks are no more than lanes."""
    world_size, num_lanes = world
    slices = [owned_lanes(rank, world_size, num_lanes) for rank in range(world_size)]
    assert [lane for part in slices for lane in part] == list(range(num_lanes))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def sum_tree(world_size: int, num_lanes: int) -> Tree:
    """Add the lanes symbolically, rank by rank and then by the plan, as a world does; children are ordered."""
    values: dict[Part, Tree] = {}
    for rank in range(world_size):
        for part in parts_of(owned_lanes(rank, world_size, num_lanes), num_lanes):
            assert part not in values
            values[part] = local_sum(part, num_lanes)
    for left, right, total in merge_plan(values, num_lanes):
        values[total] = (values.pop(left), values.pop(right))
    assert list(values) == [root_of(num_lanes)]
    return values[root_of(num_lanes)]


def local_sum(part: Part, num_lanes: int) -> Tree:
    """Return the tree below a node, from its definition: a node without a right child passes its left child up."""
    if part.level == 0:
        return part.lo
    left, right = Part(part.level - 1, 2 * part.index), Part(part.level - 1, 2 * part.index + 1)
    if right.is_empty(num_lanes):
        return local_sum(left, num_lanes)
    return local_sum(left, num_lanes), local_sum(right, num_lanes)


def test_every_world_adds_the_same_tree() -> None:
    """The tree depends on the number of lanes alone."""
    trees = {world: sum_tree(*world) for world in ODD_WORLDS}
    assert trees == {world: local_sum(root_of(world[1]), world[1]) for world in ODD_WORLDS}


@given(worlds)
def test_any_world_adds_the_same_tree(world: tuple[int, int]) -> None:
    """The same at randomly drawn sizes."""
    assert sum_tree(*world) == local_sum(root_of(world[1]), world[1])


@given(worlds)
def test_a_rank_has_few_parts(world: tuple[int, int]) -> None:
    """The largest whole subtrees of a run of lanes are at most 2 log2 L, in order, and hold just its lanes."""
    world_size, num_lanes = world
    for rank in range(world_size):
        lanes = owned_lanes(rank, world_size, num_lanes)
        parts = parts_of(lanes, num_lanes)
        assert len(parts) <= max(1, 2 * (num_lanes - 1).bit_length())
        ends = [min((part.index + 1) << part.level, num_lanes) for part in parts]
        assert [part.lo for part in parts] == [lanes.start, *ends[:-1]]
        assert ends[-1] == lanes.stop


def test_a_lone_part_passes_up_through_empty_siblings() -> None:
    """With 5 lanes, lane 4 is the whole right half."""
    assert settle(Part(0, 4), 5) == Part(2, 1)
    assert root_of(5) == Part(3, 0)
    assert root_of(1) == Part(0, 0)


def test_a_missing_part_is_refused() -> None:
    """A plan over parts that do not make up all lanes fails loudly."""
    with pytest.raises(AssertionError, match="do not make up 4 lanes"):
        merge_plan([Part(1, 0), Part(0, 2)], 4)


def test_golden_lane_seeds() -> None:
    """A lane's random numbers are as they were frozen."""
    assert [lane_seed(*place) for place in ((0, 0, 0), (1, 2, 3), (1, 3, 2))] == [
        2448589691182667386,
        8176297652223440920,
        9029921714288726306,
    ]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 500))
def test_lane_seeds_fit_torch_and_differ(seed: int, step: int, lane: int) -> None:
    """Seeds are in [0, 2^63), and neighbouring lanes and steps have others."""
    found = {lane_seed(seed, step, lane), lane_seed(seed, step + 1, lane), lane_seed(seed, step, lane + 1)}
    assert len(found) == 3
    assert all(0 <= value < 2**63 for value in found)
