"""Resharding of one copy: no shard is lost when a world breaks, and what was left unfinished is given up.

`whole_runs.test_lost_ranks` has lost ranks at all points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from elastic_train.errors import PeerLostError
from elastic_train.job import reshard
from elastic_train.job.peer_states import PeerState, gather_peer_states, leave_out_unfinished, roll_forward
from elastic_train.job.reshard import seats_at, take_state
from elastic_train.job.state_shards import Place
from elastic_train.placement.seats import seats_of
from tests.elastic_train.job.sharded.shard_jobs import Shards, build, fingerprint, meet, replicated, train
from tests.memory_machine import in_memory, rank_here

STEPS = 4


class World(NamedTuple):
    """The members of a world, by rank, and the step until which it trains."""

    members: Sequence[int]
    until: int = STEPS
    breaks_at: int | None = None
    """The member that leaves as soon as it has its shards, before the others know that it has them."""


def member(who: int, num: int, worlds: Sequence[World], shards: Shards, leaving: dict[int | None, int]) -> list[object]:
    """Live through this member's worlds; return step and weights at the beginning and end of each unbroken one."""
    torch.set_num_threads(1)
    state, seen = build(shards, copies=1), list[object]()
    for term, world in enumerate(worlds, start=1):
        if who not in world.members:
            continue
        group = meet(f"world-{term}", world.members.index(who), len(world.members))
        brought = gather_peer_states(group, state, ("", str(who)))
        brought = roll_forward(group, state, brought)
        if world.breaks_at is not None:
            if world.breaks_at == who:
                leaving[who] = 0
            with pytest.raises(PeerLostError):
                take_state(group, state, brought)
            group.abandon()
            leaving.pop(who, None)
            continue
        assert not take_state(group, state, brought).lost.size
        state.shards.trained_in = term
        seen.append((state.step, fingerprint(group, state)))
        train(group, state, world.until, term)
        seen.append((state.step, fingerprint(group, state)))
        group.barrier()
    return seen


@pytest.mark.heavy
@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
@pytest.mark.parametrize("breaks_at", [2, 0])
def test_a_world_that_breaks_while_seats_are_taken_loses_nothing(breaks_at: int, shards: Shards) -> None:
    """A sender keeps a shard until its receiver is known to have it; joiners and ranks that return get theirs."""
    leaving = dict[int | None, int]()
    """How often each leaving member has reached the handover."""

    def reach(point: str) -> None:
        if (who := rank_here()) not in leaving:
            return
        leaving[who] += 1
        if leaving[who] == 2:
            raise PeerLostError("the world has changed")

    grown = World([0, 1, 2], breaks_at=breaks_at)
    worlds = [World([0, 1], 2), grown, grown, World([1, 0], 3), World([2, 0, 1])]
    with mock.patch.object(reshard, "reach", reach):
        seen = in_memory(member, 3, worlds, shards, leaving)
    expected = [(step, weights) for step, weights in enumerate(replicated(STEPS), start=1)]
    for rows in (seen[0], seen[1]):
        assert rows is not None and rows[1:] == [expected[step - 1] for step in (2, 2, 3, 3, STEPS)]
    assert seen[2] == [expected[2], expected[-1]]


def test_who_was_away_while_shares_were_lost_is_not_followed() -> None:
    """It is further than the others, but holds only part of the state at that step."""
    table = build("optimizer", 1).shards.table
    half, rest = seats_of([("", "0"), ("", "1")], 1)
    behind = [PeerState(Place(7, 20), half, ("", "0")), PeerState(Place(7, 20), rest, ("", "1"))]
    away, newest = PeerState(Place(23, 17), half, ("", "2")), PeerState(Place(9, 21), half, ("", "3"))
    kept, num_lost = leave_out_unfinished(table, [*behind, away])
    assert kept[:2] == behind and kept[2].place == Place(0, 0) and kept[2].seat is None and num_lost == 0
    kept, num_lost = leave_out_unfinished(table, [behind[0], away])
    assert max(one.place for one in kept) == Place(0, 0) and num_lost > 0
    kept, num_lost = leave_out_unfinished(table, [behind[0], PeerState(Place(6, 20), rest, ("", "1"), pending=20)])
    assert max(one.place for one in kept) == Place(7, 20) and num_lost == 0, "what is pending counts"
    kept, num_lost = leave_out_unfinished(table, [*behind, newest])
    assert max(one.place for one in kept) == Place(7, 20) and num_lost > 0, "steps of the newest world are given up"


def test_who_holds_a_share_of_the_current_step_keeps_it() -> None:
    """In whatever order they are ranks now; a share of an earlier step counts as none."""
    before, now = seats_of([("", str(number)) for number in range(3)], 1), Place(7, 20)
    brought = [PeerState(now, before[number], ("", str(number))) for number in (2, 1)]
    found = seats_at([*brought, PeerState(Place(6, 20), before[2], ("", "3"))], 1, now)
    assert [seat.arcs for seat in found] == [before[number].arcs for number in (2, 1, 0)]
