"""Peer states are judged over all shard groups, including those with nothing to hold or to train."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from elastic_train.core.mesh import Cell
from elastic_train.job.resharding.peer_states import PeerState, leave_out_unfinished
from elastic_train.job.resharding.pending_step import _all_left
from elastic_train.job.resharding.reshard import _plan_of
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
