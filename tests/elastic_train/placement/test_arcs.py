"""Arcs: members share the circle evenly, a change moves little, and every grain has one owner among its holders."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.placement.arcs import Arc, Path, arcs_of, kept_part, length, overlap
from elastic_train.placement.grains import GRAIN, Listed, lay_out
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seating import Seating, owned_of
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import blocks, models


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int | None], int]:
    """Draw a group that has lost and gained members, and the number of its bases."""
    num_base = draw(st.integers(1, 12))
    bases: list[int | None] = sorted(draw(st.sets(st.integers(0, num_base - 1))))  # type: ignore[assignment]
    extra = draw(st.integers(0 if bases else 1, 12))
    return [*bases, *[None] * extra], num_base


def check_shares(found: list[tuple[Arc, ...]]) -> None:
    """Check that members' arcs tile the circle in equal shares; those of one member are disjoint and ascend."""
    assert all(length(arcs) == Fraction(1, len(found)) for arcs in found)
    assert all(a[1] < b[0] for arcs in found for a, b in itertools.pairwise(arcs))
    everything = sorted(arc for arcs in found for arc in arcs)
    assert [lo for lo, _ in everything] == [0, *(hi for _, hi in everything[:-1])] and everything[-1][1] == 1


@given(groups())
def test_members_share_the_circle_evenly(group: tuple[list[int | None], int]) -> None:
    """This holds for any free bases and any number of members without one."""
    bases, num_base = group
    found = arcs_of(bases, num_base)
    check_shares(found)
    assert kept_part(bases, num_base) <= sum(
        overlap(arcs, [(Fraction(base, num_base), Fraction(base + 1, num_base))])
        for base, arcs in zip(bases, found, strict=True)
        if base is not None
    )


@pytest.mark.parametrize("size", range(2, 10))
def test_the_first_loss_moves_what_was_lost_and_nothing_else(size: int) -> None:
    """The lost share goes in equal parts to all remaining members."""
    before = arcs_of(range(size), size)
    for lost in range(size):
        bases = [base for base in range(size) if base != lost]
        for base, arcs in zip(bases, arcs_of(bases, size), strict=True):
            assert length(arcs) - overlap(arcs, before[base]) == Fraction(1, size * (size - 1))


@pytest.mark.parametrize("size", range(1, 10))
def test_a_new_member_gets_its_share_and_nothing_else_moves(size: int) -> None:
    """Every member gives up an equal part; if the new member leaves again, each gets its part back."""
    before, after = arcs_of(range(size), size), arcs_of([*range(size), None], size)
    for base in range(size):
        assert overlap(after[base], before[base]) == length(after[base])


@given(groups(), st.data())
def test_a_change_moves_what_it_must_and_a_part_of_the_line(
    group: tuple[list[int | None], int], data: st.DataObject
) -> None:
    """After a loss, the others get at most the lost share plus as much as the line had."""
    bases, num_base = group
    if len(bases) == 1:
        return
    before = arcs_of(bases, num_base)
    lost = data.draw(st.integers(0, len(bases) - 1))
    left = [base for member, base in enumerate(bases) if member != lost]
    old = [arcs for member, arcs in enumerate(before) if member != lost]
    moved = sum(length(b) - overlap(a, b) for a, b in zip(old, arcs_of(left, num_base), strict=True))
    assert moved <= Fraction(1, len(bases)) + (1 - kept_part(bases, num_base))


def test_two_members_of_one_base_are_refused() -> None:
    with pytest.raises(AssertionError, match="two members of one base"):
        arcs_of([0, 0], 2)


worlds = st.tuples(st.integers(1, 12), st.integers(1, 4))


@given(models(), worlds)
def test_every_grain_has_one_owner_who_holds_it(listed: list[Listed], world: tuple[int, int]) -> None:
    layout, (num_ranks, copies) = lay_out(listed), world
    holdings = all_held(circle_of(layout), seats_of([()] * num_ranks, copies))
    owned = owned_of(holdings, layout.span)
    assert sorted(np.concatenate(owned).tolist()) == list(range(layout.num_grains))
    for grains, held in zip(owned, holdings, strict=True):
        assert set(grains.tolist()) <= set(held.tolist())


@given(st.integers(1, 6), st.integers(4, 20), worlds)
def test_ranks_own_an_even_share(num_blocks: int, grains: int, world: tuple[int, int]) -> None:
    """The share is even in work and in a step's volume, which follows it; copies do not increase it."""
    layout, (num_ranks, copies) = blocks(num_blocks, grains), world
    holdings = all_held(circle_of(layout), seats_of([()] * num_ranks, copies))
    loads = [int(layout.span[owned].sum()) for owned in owned_of(holdings, layout.span)]
    # Each holder's part of what each set of holders shares is cut at whole grains, at both ends.
    assert max(loads) <= int(layout.span.sum()) / num_ranks + 2 * (copies + 1) * GRAIN


def test_owners_are_chosen_among_those_that_may_be() -> None:
    layout = blocks(2, 5)
    holdings = all_held(circle_of(layout), seats_of([()] * 4, 2))
    owned = owned_of(holdings, layout.span, [0, 1])
    assert [grains.size for grains in owned[2:]] == [0, 0]
    with pytest.raises(LookupError, match="have no holder among the ranks \\[0, 2\\]"):
        owned_of(holdings, layout.span, [0, 2])


@pytest.mark.heavy
@given(models(), worlds, st.data())
def test_what_ranks_give_one_another_makes_everybody_whole(
    listed: list[Listed], world: tuple[int, int], data: st.DataObject
) -> None:
    """A rank's owned and received grains are all trained grains that it holds; its group's ranks hold everything."""
    layout, (num_ranks, copies) = lay_out(listed), world
    paths: list[Path] = [("", str(data.draw(st.integers(0, 3)))) for _ in range(num_ranks)]
    circle, seats = circle_of(layout), seats_of(paths, copies)
    seatings = [Seating(layout, circle, seats, rank) for rank in range(num_ranks)]
    owned, given_to = seatings[0].owned_runs(), [seating.deliveries() for seating in seatings]
    for rank, seating in enumerate(seatings):
        taken = [one for one in seating.deliveries() if one.taker == rank]
        assert sorted(taken) == sorted(
            one for other, moves in enumerate(given_to) for one in moves if one[:2] == (other, rank)
        )
        got = sum(run.hi - run.lo for one in taken for run in one.runs)
        got += sum(run.hi - run.lo for run in owned[rank])
        assert got == int(layout.span[seating.trained[rank]].sum())
        whole = np.concatenate([seating.trained[other] for other in (rank, *seating.neighbours())])
        assert sorted(whole.tolist()) == layout.trained.tolist()


def test_a_ranks_first_neighbour_is_the_one_to_its_right() -> None:
    """So the ranks of a group do not all exchange with one of them first."""
    layout, seats = blocks(1, 4), seats_of([("", str(number)) for number in range(4)], 1)
    for rank, seat in enumerate(seats):
        neighbours = Seating(layout, circle_of(layout), seats, rank).neighbours()
        assert [seats[other].slot for other in neighbours] == [(seat.slot + step) % 4 for step in (1, 2, 3)]
