"""Peer states are judged over all shard groups, including those with nothing to hold or to train."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.core.mesh import Cell, Mesh
from elastic_train.job.peer_states import PeerState, _all_left, leave_out_unfinished
from elastic_train.job.plan_facts import redundancy_of
from elastic_train.job.reshard import _plan_of
from elastic_train.job.state_shards import Place
from elastic_train.placement.grains import Layout
from elastic_train.placement.holdings import column_of
from elastic_train.placement.seating import Seating
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import blocks

NOTHING = column_of(Layout((), ()))
TWO: Any = SimpleNamespace(parts=SimpleNamespace(columns=[NOTHING, NOTHING]), cell=Cell(stage=2))


def test_a_pending_step_is_dropped_unless_each_column_has_somebody_who_holds_it() -> None:
    """A stage that is entirely frozen reaches the step of the others, or nobody reaches it."""
    retained = PeerState(Place(5, 1), None, (), trained_in=1)
    pending = PeerState(Place(5, 1), None, (), pending=2, trained_in=2)
    assert _all_left(TWO, [retained, pending], [0, 1], 2) == []
    assert _all_left(TWO, [pending, pending], [0, 1], 2) == [0, 1]


@pytest.mark.parametrize(
    ("size", "cell", "held", "copies", "cost"),
    [
        (3, Cell(), "whole", 3, None),
        (1, Cell(), "optimizer", 1, "the optimizer's state is held once: "),
        (3, Cell(), "state", 2, "the state is held 2 times: "),
        (2, Cell(tensor=2), "optimizer", 1, "2 ranks make one cell, the only holder of the state: "),
        (4, Cell(tensor=2), "whole", 2, "2 cells of 2 ranks: a fault that leaves each part "),
        (4, Cell(tensor=2), "state", 1, "2 cells of 2 ranks, over which the state of each place is held once: "),
        (8, Cell(tensor=2, context=2), "state", 2, "2 cells of 4 ranks, over which the state of each part is held 2 "),
        (4, Cell(context=2), "state", 2, "2 cells of 2 ranks, over which the state is held 2 times: "),
        (4, Cell(context=2), "whole", 4, "2 cells of 2 ranks, which compute each row together: "),
        (4, Cell(tensor=2, context=2), "whole", 2, "4 ranks make one cell, and 2 hold each part of the state: "),
    ],
)
def test_a_world_says_what_a_fault_costs(size: int, cell: Cell, held: str, copies: int, cost: str | None) -> None:
    table: Any = SimpleNamespace(is_whole=held == "whole", shares_weights=held == "state", num_copies=copies)
    said = redundancy_of(Mesh(0, size, cell), table)
    assert said == cost if cost is None else (said or "").startswith(cost)


def test_a_column_without_anybody_at_a_step_has_lost_it() -> None:
    """A newcomer starts at step 0, so it holds no copy of a stage without parameters either."""
    new, old = PeerState(Place(0, 0), None, ()), PeerState(Place(7, 1), None, ())
    kept, num_lost = leave_out_unfinished(TWO, [new, old])
    assert num_lost == 1 and [one.place for one in kept] == [Place(0, 0), Place(0, 0)]
    assert leave_out_unfinished(TWO, [old, old]) == ([old, old], 0)


def test_grains_of_another_step_are_lost() -> None:
    """A rank that was frozen may even have applied, in an older term, a step that others recomputed."""
    column, seats, furthest = column_of(blocks(2, 36)), seats_of([("a",), ("b",)], 1), Place(7, 2)
    share: Any = SimpleNamespace(circle=column.circle, layout=column.layout)
    seating = Seating(*column, seats, 0)
    here, there = (PeerState(furthest, seat, ()) for seat in seats)
    assert not _plan_of([here, there], share, furthest, seating).lost.size
    for place in (Place(6, 1), Place(7, 1), Place(0, 0)):
        lost = _plan_of([here, replace(there, place=place)], share, furthest, seating).lost
        assert lost.tolist() == seating.holdings[1].tolist()
