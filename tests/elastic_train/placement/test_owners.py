"""Owners: every grain that may be owned has one owner among its holders, and ownership is even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.placement.domains import Path
from elastic_train.placement.grains import GRAIN, Listed, lay_out
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.recut import owned_of
from elastic_train.placement.seating import Seating
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import blocks, models

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
