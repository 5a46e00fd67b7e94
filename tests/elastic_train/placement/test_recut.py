"""Recut: survivors keep their grains and get missing ones from a live holder; grains without a holder are named."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.arrays import Int64s
from elastic_train.placement.arcs import Path
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seating import Recut, Seating, Transfer, plan_recut
from elastic_train.placement.seats import Seat, seats_of
from tests.elastic_train.placement.laws import blocks, check_apart, check_balance, check_partition, check_recut

LAYOUT = blocks(2, 36)
CIRCLE = circle_of(LAYOUT)
NOTHING = np.empty(0, dtype=np.int64)


def plan_of(had: list[Int64s], wants: list[Int64s]) -> Recut:
    plan = plan_recut(had, wants, LAYOUT.span)
    check_recut(had, wants, plan)
    return plan


def num_received(plan: Recut, rank: int) -> int:
    return sum(transfer.grains.size for transfer in plan.transfers if transfer.taker == rank)


def num_given(plan: Recut, rank: int) -> int:
    return sum(transfer.grains.size for transfer in plan.transfers if transfer.giver == rank)


grains = st.sets(st.integers(0, LAYOUT.num_grains - 1)).map(lambda some: np.array(sorted(some), dtype=np.int64))


@given(st.lists(st.tuples(grains, grains), min_size=1, max_size=7))
def test_any_holdings_are_recut_to_any_others(world: list[tuple[Int64s, Int64s]]) -> None:
    """Each grain comes once, from a rank that has it; and every rank computes the same plan."""
    had, wants = [own for own, _ in world], [want for _, want in world]
    plan, again = plan_of(had, wants), plan_recut(had, wants, LAYOUT.span)
    assert [(t.giver, t.taker, t.grains.tolist()) for t in plan.transfers] == [
        (t.giver, t.taker, t.grains.tolist()) for t in again.transfers
    ]


@given(st.lists(st.tuples(grains, grains), min_size=1, max_size=6))
def test_the_largest_load_is_the_smallest_possible_to_within_a_grain_for_each_taker(
    world: list[tuple[Int64s, Int64s]],
) -> None:
    """No set of senders could be relieved: compared with the bound of every set of ranks that are sole holders."""
    had, wants = [own for own, _ in world], [want for _, want in world]
    plan = plan_recut(had, wants, LAYOUT.span)
    if plan.lost.size or not plan.transfers:
        return
    has = [set(own.tolist()) for own in had]
    missing = [grain for rank, want in enumerate(wants) for grain in want.tolist() if grain not in has[rank]]
    owners = [frozenset(rank for rank, own in enumerate(has) if grain in own) for grain in missing]
    least = max(
        sum(owner <= set(some) for owner in owners) / len(some)
        for count in range(1, len(had) + 1)
        for some in itertools.combinations(range(len(had)), count)
    )
    assert max(num_given(plan, rank) for rank in range(len(had))) <= least + len(had)


def test_without_any_holder_all_is_lost() -> None:
    wants = [np.arange(LAYOUT.num_grains)]
    plan = plan_recut([wants[0][:0]], wants, LAYOUT.span)
    assert plan.transfers == () and plan.lost.tolist() == wants[0].tolist()


@pytest.mark.heavy
@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_single_and_double_loss(width: int) -> None:
    """Worlds of 1 to 9 ranks on nodes of 1 to 3: every rank, and every two at once.

    While fewer nodes are lost at once than there are copies (and at least as many nodes), no grain is lost.
    """
    for size, copies in itertools.product(range(1, 10), (1, 2, 3)):
        lose_one_and_two(size, copies, width)


def lose_one_and_two(size: int, copies: int, width: int) -> None:
    paths: list[Path] = [(f"node{rank // width}",) for rank in range(size)]
    before = seats_of(paths, copies)
    holdings = all_held(CIRCLE, before)
    check_partition(before, holdings, LAYOUT.num_grains, copies)
    check_balance(CIRCLE, LAYOUT, before, holdings)
    check_apart(paths, holdings, LAYOUT.num_grains)
    for lost in (*itertools.combinations(range(size), 1), *itertools.combinations(range(size), 2)):
        stay = [rank for rank in range(size) if rank not in lost]
        if not stay:
            continue
        seats = seats_of([paths[rank] for rank in stay], copies, [before[rank] for rank in stay])
        wants = all_held(CIRCLE, seats)
        plan = plan_of([holdings[rank] for rank in stay], wants)
        nodes = {paths[rank] for rank in lost}
        if len(nodes) < copies <= len(set(paths)):
            assert not plan.lost.size
        # A survivor that is a step behind has nothing of the furthest one, and gets its entire holding.
        behind = [holdings[rank] if rank != stay[0] else NOTHING for rank in stay]
        late = plan_of(behind, wants)
        if not late.lost.size and len(stay) > 1:
            assert num_received(late, 0) == wants[0].size


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_rank_that_replaces_a_lost_one_gets_its_holding_and_nothing_else_moves(copies: int) -> None:
    for size, lost in ((num, lost) for num in range(4, 10) for lost in range(num)):
        before = seats_of([()] * size, copies)
        holdings = all_held(CIRCLE, before)
        stay = [rank for rank in range(size) if rank != lost]
        seats = seats_of([()] * size, copies, [before[rank] for rank in stay] + [None])
        had = [holdings[rank] for rank in stay] + [NOTHING]
        plan = plan_of(had, all_held(CIRCLE, seats))
        if copies == 1:
            assert plan.lost.tolist() == holdings[lost].tolist()
        else:
            assert {transfer.taker for transfer in plan.transfers} == {size - 1}
            assert num_received(plan, size - 1) == holdings[lost].size


@given(st.integers(2, 12), st.integers(1, 3))
def test_a_joiner_gets_its_share_from_all_that_hold_it(size: int, copies: int) -> None:
    """A world that grows loses nothing, whatever `copies` is."""
    before = seats_of([()] * size, copies)
    had = all_held(CIRCLE, before)
    seats = seats_of([()] * (size + 1), copies, [*before, None])
    plan = plan_of([*had, NOTHING], all_held(CIRCLE, seats))
    assert not plan.lost.size and num_received(plan, size) == all_held(CIRCLE, seats)[size].size


def test_of_many_ranks_each_is_told_apart() -> None:
    """There are more ranks than a machine word has bits."""
    had = [np.array([rank]) for rank in range(72)]
    plan = plan_of(had, [np.array([(rank + 1) % 72]) for rank in range(72)])
    expected = [Transfer((rank + 1) % 72, rank, np.array([(rank + 1) % 72])) for rank in range(72)]
    assert sorted((t.giver, t.taker, t.grains.tolist()) for t in plan.transfers) == sorted(
        (giver, taker, some.tolist()) for giver, taker, some in expected
    )


@pytest.mark.heavy
@pytest.mark.parametrize("copies", [2, 3])
def test_every_two_losses_one_after_the_other(copies: int) -> None:
    """The second loss is in the world after the first; two copies suffice for both."""
    for size, first in ((num, first) for num in range(3, 10) for first in range(num)):
        before = seats_of([()] * size, copies)
        had, wants = recut_without(first, before, all_held(CIRCLE, before), copies)
        for second in range(size - 1):
            recut_without(second, had, wants, copies)


def recut_without(lost: int, seats: list[Seat], holdings: list[Int64s], copies: int) -> tuple[list[Seat], list[Int64s]]:
    """Lose one rank and check the recut; return the survivors' seats and holdings."""
    stay = [rank for rank in range(len(seats)) if rank != lost]
    after = seats_of([()] * len(stay), copies, [seats[rank] for rank in stay])
    wants = all_held(CIRCLE, after)
    plan = plan_of([holdings[rank] for rank in stay], wants)
    assert not plan.lost.size
    check_partition(after, wants, LAYOUT.num_grains, copies)
    check_balance(CIRCLE, LAYOUT, after, wants)
    check_apart([()] * len(stay), wants, LAYOUT.num_grains)
    return after, wants


def test_a_model_without_tensors_has_nothing_to_recut() -> None:
    plan = plan_recut([NOTHING], [NOTHING], np.empty(0, dtype=np.int64))
    assert plan.transfers == () and not plan.lost.size


def test_a_fault_while_seats_are_taken_is_recut_from_what_everybody_holds() -> None:
    """Rank 0 has its new seat and holdings, the others have their old ones, when another rank is lost."""
    first = seats_of([()] * 6, 2)
    second = seats_of([()] * 5, 2, first[1:])
    mixed = [second[0], *first[2:5]]
    held_now = [all_held(CIRCLE, second)[0], *all_held(CIRCLE, first)[2:5]]
    after = seats_of([()] * 4, 2, list(mixed))
    wants = all_held(CIRCLE, after)
    check_partition(after, wants, LAYOUT.num_grains, 2)
    plan = plan_of(held_now, wants)
    assert not plan.lost.size


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 63))
def test_those_that_leave_take_something_along_where_the_others_do_not_hold_it(
    size: int, copies: int, who: int
) -> None:
    """Therefore nothing is lost if fewer ranks leave than there are copies."""
    seats = seats_of([(f"node{rank}",) for rank in range(size)], copies)
    leaving = [bool(who >> rank & 1) for rank in range(size)]
    holdings = all_held(CIRCLE, seats)
    kept = {grain for rank, grains in enumerate(holdings) if not leaving[rank] for grain in grains.tolist()}
    takes = Seating(LAYOUT, CIRCLE, seats, 0).are_sole_holders(leaving)
    assert takes == (len(kept) < LAYOUT.num_grains)
    assert not takes or sum(leaving) >= min(copies, size)
