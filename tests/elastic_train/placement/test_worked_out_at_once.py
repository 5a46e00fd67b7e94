"""Vectorised results for many grains and ranks equal the results for each grain and rank (`oracle`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.arrays import Int64s
from elastic_train.placement.arcs import Path, are_apart
from elastic_train.placement.grains import Listed, lay_out
from elastic_train.placement.holdings import column_of, grains_in, grains_side_by_side, runs_of
from elastic_train.placement.seating import Seating, plan_recut
from elastic_train.placement.seats import Seat, seats_of_holders
from tests.elastic_train.placement import oracle
from tests.elastic_train.placement.laws import models

MODELS = models(has_atoms=True)


def as_lists(by_rank: Sequence[np.ndarray]) -> list[list[int]]:
    return [grains.tolist() for grains in by_rank]


@pytest.mark.heavy
@given(MODELS, st.integers(1, 9), st.integers(1, 3), st.data())
def test_worlds_that_follow_one_another(listed: list[Listed], size: int, copies: int, data: st.DataObject) -> None:
    """Ranks are lost, join, hold nothing, or retain arcs; a fault may follow another during resharding."""
    column = column_of(lay_out(listed))
    layout, circle = column
    had: list[Seat | None] = [None] * size
    for _ in range(3):
        paths: list[Path] = [(f"node{data.draw(st.integers(0, 3))}", str(rank)) for rank in range(len(had))]
        may_hold = [True, *(data.draw(st.integers(0, 5)) > 0 for _ in had[1:])]
        seats = seats_of_holders(paths, copies, had, may_hold)
        rank = data.draw(st.integers(0, len(seats) - 1))
        retained = data.draw(st.integers(0, len(seats) - 1))
        arcs = [() if seat is None else seat.arcs for seat in had]
        arcs[rank] += arcs[retained]
        brought = [np.array(oracle.grains_in(circle, some), dtype=np.int64) for some in arcs]
        for some, grains in zip(arcs, brought, strict=True):
            assert grains_in(circle, some).tolist() == grains.tolist()
        check_seating(Seating(layout, circle, seats, rank), brought)
        # Experts: two ranks have each seat.
        twice = [seat for seat in seats for _ in range(2)]
        check_seating(Seating(layout, circle, twice, 2 * rank), [grains for grains in brought for _ in range(2)])
        staying = [number for number in range(len(seats)) if data.draw(st.integers(0, 3)) or len(seats) == 1]
        left = [arcs for number, arcs in enumerate(seat.arcs for seat in seats) if number in staying]
        missing = layout.num_grains - len(oracle.grains_in(circle, [arc for arcs in left for arc in arcs]))
        assert column.missing(left) == missing
        leaving = [number not in staying for number in range(len(seats))]
        assert Seating(layout, circle, seats, rank).are_sole_holders(leaving) == (missing > 0)
        mixed = [
            seats[number] if data.draw(st.integers(0, 4)) or number >= len(had) else had[number] for number in staying
        ]
        had = [*mixed, *[None] * data.draw(st.integers(0, 2))] or [None]


def check_seating(seating: Seating, brought: Sequence[Int64s]) -> None:
    """Check everything that a rank computes from its seating and from the peers' states."""
    layout, circle, seats, rank, span = seating.layout, seating.circle, seating.seats, seating.rank, seating.layout.span
    held = [oracle.grains_in(circle, seat.arcs) for seat in seats]
    assert as_lists(seating.holdings) == held
    trained = [oracle.trained_of(layout, grains) for grains in held]
    assert as_lists(seating.trained) == trained
    lost, transfers = oracle.plan(brought, seating.holdings, span)
    plan = plan_recut(brought, seating.holdings, span)
    assert plan.lost.tolist() == lost
    assert {(giver, taker): grains.tolist() for giver, taker, grains in plan.transfers} == transfers
    assert [transfer[:2] for transfer in plan.transfers] == sorted(transfers)
    sections = oracle.section_of(circle, seats[rank].num_base)
    for (_, taker), grains in transfers.items():
        if taker == rank:
            assert seating.runs_at(rank, np.array(grains)) == oracle.runs_of(layout, grains, sections)
    spoken_for = oracle.owned_of(seating.holdings, span)
    assert as_lists(seating.all_owned) == spoken_for
    owned = [oracle.trained_of(layout, grains) for grains in spoken_for]
    assert as_lists(seating.owned) == owned
    assert seating.owned_runs() == [oracle.runs_of(layout, grains) for grains in owned]
    shared = [[grain for grain in owned[rank] if grain in grains] for grains in trained]
    taken = [[grain for grain in grains if grain in trained[rank]] for grains in owned]
    shared[rank], taken[rank] = [], []
    others = [(rank + turn) % len(seats) for turn in range(1, len(seats))]
    given = [(rank, other, oracle.runs_of(layout, shared[other])) for other in others if shared[other]]
    received = [(other, rank, oracle.runs_of(layout, taken[other])) for other in others[::-1] if taken[other]]
    assert seating.deliveries() == [*given, *received]
    summed = list(trained)
    for ranks in ([rank for rank, seat in enumerate(seats) if seat.group == group] for group in range(len(seats))):
        if len({seats[rank].slot for rank in ranks}) < len(ranks):
            by_member = oracle.owned_of([seating.holdings[rank] for rank in ranks], span)
            for member, grains in zip(ranks, by_member, strict=True):
                summed[member] = oracle.trained_of(layout, grains)
    assert as_lists(seating.summed) == summed
    both = [(to, [grain for grain in summed[to] if grain in summed[rank]]) for to in others]
    both = [(to, grains) for to, grains in both if grains and seats[to].group != seats[rank].group]
    sends = [(rank, to, oracle.runs_of(layout, grains)) for to, grains in both]
    assert seating.subtrees() == [*sends, *((to, rank, runs) for _, to, runs in sends[::-1])]
    runs = runs_of(layout, seating.trained[rank], seating.sections_of(rank))
    assert runs == oracle.runs_of(layout, trained[rank], sections)
    side_by_side = oracle.side_by_side(layout, trained[rank], runs)
    assert grains_side_by_side(layout, seating.trained[rank], runs) == side_by_side


cuts = st.sets(st.integers(1, 11), max_size=5).map(sorted)
domains = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")).map(tuple)


@given(st.lists(cuts, min_size=1, max_size=3), st.data())
def test_copies_are_apart_where_no_two_share_a_domain_for_nothing(lines: list[list[int]], data: st.DataObject) -> None:
    """Groups with any cuts of the circle; ranks in any domains."""
    groups, arcs = list[list[int]](), list[list[tuple[Fraction, Fraction]]]()
    for cut in lines:
        ends = [Fraction(end, 12) for end in (0, *cut, 12)]
        groups.append([len(arcs) + number for number in range(len(ends) - 1)])
        arcs += [[pair] for pair in itertools.pairwise(ends)]
    paths: list[Path] = [data.draw(domains) for _ in arcs]
    assert are_apart(groups, arcs, paths) == oracle.are_apart(groups, arcs, paths)
