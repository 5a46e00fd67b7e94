"""Resharding through faults: no applied step is lost while a copy survives, at any point; joiners get shards.

Ranks in memory; a rank that dies leaves its groups, and its peers learn of it at their next exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from elastic_train.errors import PeerLostError
from elastic_train.job.resharding import (
    PeerState,
    gather_peer_states,
    leave_out_unfinished,
    reshard,
    roll_forward,
    take_state,
)
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.placement.seats import seats_of
from tests.elastic_train.job.faults import Fault, step_with
from tests.elastic_train.job.sharded.shard_jobs import (
    Offloads,
    Shards,
    build,
    compute,
    fingerprint,
    meet,
    replicated,
    shards_of,
    train,
)
from tests.memory_machine import in_memory, rank_here

STEPS = 4
MUON = {"name": "muon"}


@dataclass(frozen=True)
class World:
    """The members of a world, by rank, and the fault that ends it (None for the last world)."""

    members: Sequence[int]
    fault: Fault | None = None
    breaks_at: int | None = None
    """The member that leaves as soon as it has its shards, before the others know that it has them."""


LEAVING: dict[int, Leave] = {}
"""The members that are about to leave."""


def reach(point: str) -> None:
    """Leave the world if this member is about to."""
    if (leave := LEAVING.get(rank_here())) is not None:
        leave(point)


class Leave:
    """Ends a rank's world at the last moment before its shards are taken."""

    def __init__(self) -> None:
        self._num_reached = 0

    def __call__(self, point: str) -> None:
        self._num_reached += 1
        if self._num_reached == 2:
            raise PeerLostError("the world has changed")


def member(
    who: int,
    num: int,
    worlds: Sequence[World],
    copies: int,
    shards_of_what: Shards,
    offload: Offloads = "none",
    recipe: Mapping[str, Any] | None = None,
) -> list[list[object]]:
    """Live through this member's worlds; return its observations."""
    torch.set_num_threads(1)
    state, seen = build(shards_of_what, copies, offload=offload, recipe=recipe), list[list[object]]()
    shards = state.shards
    for term, world in enumerate(worlds, start=1):
        if who not in world.members:
            continue
        group = meet(f"world-{term}", world.members.index(who), len(world.members))
        brought = gather_peer_states(group, state, shards, ("", str(who)))
        brought = roll_forward(group, state, shards, brought)
        if world.breaks_at is not None:
            if world.breaks_at == who:
                LEAVING[who] = Leave()
            with pytest.raises(PeerLostError):
                take_state(group, state, shards, brought)
            group.abandon()
            LEAVING.pop(who, None)
            continue
        before, memory = group.num_bytes, memory_of(state)
        lost = take_state(group, state, shards, brought).lost
        held = sum(moment.nbytes for one in shards.share.runs for moment in one.moments.values())
        got_all = group.num_bytes - before >= held
        kept_all = memory <= memory_of(state)
        shards.trained_in = term
        seen.append([term, state.step, fingerprint(group, state), int(lost.size), got_all, kept_all])
        if lost.size:
            break
        train(group, state, world.fault.step if world.fault else STEPS, term)
        if world.fault is not None:
            step_with(world.fault, who, group, state, term, partial(compute, group, state))
            group.abandon()
        else:
            seen.append([term, state.step, fingerprint(group, state), 0, 0, 0])
            group.barrier()
    return seen


def memory_of(state: AppliedState) -> set[int]:
    """Return the addresses of this member's moments."""
    return {moment.data_ptr() for one in shards_of(state).runs for moment in one.moments.values()}


def live_through(
    worlds: Sequence[World],
    copies: int = 2,
    shards: Shards = "optimizer",
    offload: Offloads = "none",
    recipe: Mapping[str, Any] | None = None,
) -> dict[int, list[list[object]]]:
    """Return what each surviving member saw at every beginning: [term, step, weights, grains lost, ...].

    The last two tell whether it received as much as it holds, and whether its old shards are still in place.
    """
    num = 1 + max(who for world in worlds for who in world.members)
    with mock.patch.object(reshard, "reach", reach):
        seen = in_memory(member, num, worlds, copies, shards, offload, recipe)
    return {who: rows for who, rows in enumerate(seen) if rows is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kept"),
    [
        (Fault(1, "computing", dying=[3]), 1),
        (Fault(1, "summed", dying=[3]), 2),
        (Fault(1, "summed", dying=[0]), 2),
        (Fault(1, "summed", dying=[3], unable=[1]), 1),
        (Fault(1, "applied", dying=[3], missing=[0, 1, 2]), 2),
        (Fault(1, "applied", dying=[1], missing=[0]), 2),
        (Fault(1, "applied", dying=[2], missing=[]), 2),
    ],
    ids=["computing", "summed", "summed-by-0", "one-cannot", "all-left-missed-it", "one-missed-it", "all-applied-it"],
)
@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
def test_a_lost_rank_costs_no_applied_step(fault: Fault, kept: int, shards: Shards) -> None:
    """Four ranks lose one, and another at the next step; the last two have the weights of one that holds everything."""
    expected = replicated(STEPS)
    victim = next(who for who in (1, 2, 0) if who not in fault.dying)
    left = [who for who in range(4) if who not in fault.dying]
    last = [who for who in left if who != victim]
    seen = live_through(
        [World(range(4), fault), World(left, Fault(STEPS - 1, "summed", dying=[victim])), World(last)], shards=shards
    )
    assert set(seen) == set(last)
    for of_member in seen.values():
        assert [row[:4] for row in of_member] == [
            [1, 0, of_member[0][2], 0],
            [2, kept, expected[kept - 1], 0],
            *2 * [[3, STEPS, expected[-1], 0]],
        ]
        assert of_member[1][5], "what is kept is not copied when another's share comes beside it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "offload", "recipe"),
    [
        ("none", "optimizer", {}),
        ("gradients", "optimizer", {}),
        ("parameters", "all", {}),
        ("none", "optimizer", MUON),
        ("optimizer", "none", MUON),
        ("gradients", "none", MUON),
        ("parameters", "all", MUON),
    ],
)
def test_what_is_in_host_memory_or_whole_lives_through_faults_alike(
    shards: Shards, offload: Offloads, recipe: Mapping[str, Any]
) -> None:
    """There, too, a step is rolled forward, shards of lost ranks are taken over, and a joiner gets its own."""
    expected = replicated(STEPS, recipe)
    worlds = [
        World([0, 1, 2], Fault(1, "applied", dying=[1], missing=[0, 2])),
        World([0, 2], Fault(2, "summed", dying=[])),
        World([3, 2, 0]),
    ]
    seen = live_through(worlds, shards=shards, offload=offload, recipe=recipe)
    assert [row[:4] for row in seen[0]][1:] == [
        [2, 2, expected[1], 0],
        [3, 3, expected[2], 0],
        [3, STEPS, expected[-1], 0],
    ]
    assert seen[3][-1][:3] == [3, STEPS, expected[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
def test_joiners_take_their_shares_and_leavers_take_nothing_along(shards: Shards) -> None:
    """One rank, then three, then four of which two are new, then two."""
    expected = replicated(STEPS)
    worlds = [
        World([0], Fault(0, "applied", dying=[], missing=[])),
        World([0, 1, 2], Fault(2, "summed", dying=[])),
        World([2, 0, 3, 4], Fault(3, "computing", dying=[])),
        World([4, 3]),
    ]
    seen = live_through(worlds, shards=shards)
    for of_member in seen.values():
        for term, step, weights, lost, *_ in of_member:
            assert not lost and (step == 0 or weights == expected[int(str(step)) - 1]), f"term {term}, step {step}"
    assert seen[4][-1][:3] == [4, STEPS, expected[-1]]
    assert all(row[4] for row in (seen[3][0], seen[4][0])), "who joins gets what it holds from others"


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "dying", "is_lost"), [(1, [1], True), (2, [1, 3], True), (2, [0, 1], False)])
def test_what_no_rank_holds_any_more_is_said_to_be_lost(copies: int, dying: Sequence[int], is_lost: bool) -> None:
    """Ranks 0 and 1 together hold everything once, as do 2 and 3; if a grain is lost, nothing has changed."""
    expected = replicated(STEPS)
    left = [who for who in range(4) if who not in dying]
    seen = live_through([World(range(4), Fault(1, "computing", dying=dying)), World(left)], copies)
    for of_member in seen.values():
        assert of_member[1][1:3] == [1, expected[0]]
        assert bool(of_member[1][3]) is is_lost
        assert is_lost or of_member[-1][2] == expected[-1]


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["optimizer", "gradients", "parameters"])
def test_a_rank_may_be_lost_and_another_join_before_the_first_step(shards: Shards) -> None:
    """Sharded initial weights come from their holders; the newcomer's own do not count."""
    expected = replicated(STEPS)
    seen = live_through([World(range(4), Fault(0, "computing", dying=[3])), World([4, 0, 1, 2])], shards=shards)
    assert [[row[3] for row in rows] for rows in seen.values()] == [[0, 0, 0]] * 3 + [[0, 0]]
    assert {rows[-1][2] for rows in seen.values()} == {expected[-1]}


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
@pytest.mark.parametrize("breaks_at", [2, 0])
def test_a_world_that_breaks_while_seats_are_taken_loses_nothing(breaks_at: int, shards: Shards) -> None:
    """With one copy of each shard: a sender keeps a shard until its receiver is known to have it."""
    expected = replicated(STEPS)
    grown = World([0, 1, 2], breaks_at=breaks_at)
    seen = live_through(
        [World([0, 1], Fault(2, "computing", dying=[])), grown, grown, World([1, 0])], copies=1, shards=shards
    )
    for who in (0, 1):
        assert [row[:4] for row in seen[who]][1:] == [[4, 3, expected[2], 0], [4, STEPS, expected[-1], 0]]


def test_who_was_away_while_shares_were_lost_is_not_followed() -> None:
    """It is further than the others, but holds only part of the state at that step."""
    shards = build("optimizer", 1).shards
    half, rest = seats_of([("", "0"), ("", "1")], 1)
    behind = [PeerState(Place(7, 20), half, ("", "0")), PeerState(Place(7, 20), rest, ("", "1"))]
    away, newest = PeerState(Place(23, 17), half, ("", "2")), PeerState(Place(9, 21), half, ("", "3"))
    kept, num_lost = leave_out_unfinished(shards, [*behind, away])
    assert kept[:2] == behind and kept[2].place == Place(0, 0) and kept[2].seat is None and num_lost == 0
    kept, num_lost = leave_out_unfinished(shards, [behind[0], away])
    assert max(one.place for one in kept) == Place(0, 0) and num_lost > 0
    kept, num_lost = leave_out_unfinished(shards, [behind[0], PeerState(Place(6, 20), rest, ("", "1"), pending=20)])
    assert max(one.place for one in kept) == Place(7, 20) and num_lost == 0, "what is pending counts"
    kept, num_lost = leave_out_unfinished(shards, [*behind, newest])
    assert max(one.place for one in kept) == Place(7, 20) and num_lost > 0, "steps of the newest world are given up"
