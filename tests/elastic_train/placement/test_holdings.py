"""Holdings: every group holds everything once, in equal shares, in any world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.placement.arcs import overlap
from elastic_train.placement.grains import GRAIN, Listed, lay_out
from elastic_train.placement.holdings import all_held, circle_of, grains_in, num_elements, runs_of, sections_of
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import blocks, check_atoms, check_balance, check_partition, check_runs, models

worlds = st.tuples(st.integers(1, 40), st.integers(1, 4))


@given(models(), worlds)
def test_every_group_holds_every_grain_once_in_equal_parts(listed: list[Listed], world: tuple[int, int]) -> None:
    """Any number of ranks and copies; tensors of any size, with possibly fewer grains than ranks."""
    layout, (num_ranks, copies) = lay_out(listed), world
    circle, seats = circle_of(layout), seats_of([()] * num_ranks, copies)
    holdings = all_held(circle, seats)
    check_partition(seats, holdings, layout.num_grains, copies)
    check_balance(circle, layout, seats, holdings)


@given(models(has_atoms=True), worlds, st.integers(1, 9))
def test_a_tensor_that_an_optimizer_updates_as_a_whole_is_held_as_a_whole(
    listed: list[Listed], world: tuple[int, int], num_sections: int
) -> None:
    """Every group holds everything once, in shares as equal as the largest such tensor permits."""
    layout, (num_ranks, copies) = lay_out(listed), world
    circle, seats = circle_of(layout), seats_of([()] * num_ranks, copies)
    holdings = all_held(circle, seats)
    check_partition(seats, holdings, layout.num_grains, copies)
    check_balance(circle, layout, seats, holdings)
    check_atoms(layout, holdings, sections_of(circle, num_sections))


@given(models(), st.integers(1, 30))
def test_a_seat_has_one_run_of_each_flat_vector_at_most(listed: list[Listed], size: int) -> None:
    """One kernel then updates it, and one message carries it."""
    layout = lay_out(listed)
    circle = circle_of(layout)
    for seat in seats_of([()] * size, 1):
        grains = grains_in(circle, seat.arcs)
        runs = runs_of(layout, grains)
        check_runs(layout, grains, runs)
        assert len({run.flat for run in runs}) == len(runs)
        assert sum(run.hi - run.lo for run in runs) == num_elements(layout, grains)


@given(models(), st.integers(2, 12), st.integers(1, 3), st.data())
def test_who_keeps_a_base_keeps_the_runs_that_it_had_of_it(
    listed: list[Listed], num_ranks: int, copies: int, data: st.DataObject
) -> None:
    """A group that keeps its bases but has fewer members splits only the arcs that are taken over."""
    layout = lay_out(listed)
    circle = circle_of(layout)
    paths = [("", str(rank)) for rank in range(num_ranks)]
    seats = seats_of(paths, copies)
    lost = data.draw(st.sampled_from(range(num_ranks)))
    left = [rank for rank in range(num_ranks) if rank != lost]
    after = seats_of([paths[rank] for rank in left], copies, [seats[rank] for rank in left])
    for rank, seat in zip(left, after, strict=True):
        before = seats[rank]
        if (seat.group, seat.base, seat.num_base) == (before.group, before.base, before.num_base):
            sections = sections_of(circle, seat.num_base)
            kept, now = grains_in(circle, before.arcs), grains_in(circle, seat.arcs)
            runs = runs_of(layout, now, sections)
            assert set(runs_of(layout, kept, sections)) <= set(runs)
            assert sum(run.hi - run.lo for run in runs) == num_elements(layout, now)


@given(models(), st.integers(1, 30))
def test_every_flat_vector_is_held_in_nearly_equal_parts(listed: list[Listed], size: int) -> None:
    """Each share differs from the even one by at most 2 + (its part of the whole) * (flat vectors) grains."""
    layout = lay_out(listed)
    circle = circle_of(layout)
    for seat in seats_of([()] * size, 1):
        grains = grains_in(circle, seat.arcs)
        for number, flat in enumerate(layout.flats):
            if flat.numel:
                share = int(layout.span[grains[layout.flat_of[grains] == number]].sum())
                bound = 2 + flat.numel / circle.length * len(layout.flats)
                assert abs(share - flat.numel / size) <= bound * GRAIN


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 70))
@settings(max_examples=50)
def test_equal_blocks_are_held_in_equal_parts_each_and_in_all(num_blocks: int, grains: int, size: int) -> None:
    """Neither one block nor all blocks together differ by more than one grain between two slots."""
    layout = blocks(num_blocks, grains)
    circle = circle_of(layout)
    counts = np.array(
        [
            np.bincount(layout.flat_of[grains], minlength=num_blocks)
            for grains in all_held(circle, seats_of([()] * size, 1))
        ]
    )
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(axis=1)) <= 1


@pytest.mark.parametrize("sizes", [(3, 4), (4, 5), (7, 8), (2, 5)])
def test_seats_whose_arcs_share_nothing_share_no_grain_whatever_their_groups_sizes(sizes: tuple[int, int]) -> None:
    """An arc's grains depend on its ends alone."""
    circle = circle_of(blocks(5, 23))
    for one in seats_of([()] * sizes[0], 1):
        for other in seats_of([()] * sizes[1], 1):
            both = np.intersect1d(grains_in(circle, one.arcs), grains_in(circle, other.arcs))
            assert both.size == 0 or overlap(one.arcs, other.arcs)
