"""No small world deadlocks: stages, chunks, experts, tensor and context parallelism, groups, shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.lanes import Assignment
from elastic_train.core.mesh import Cell
from elastic_train.placement.seats import Seat, lanes_by_owner
from elastic_train.program.schedules import Action, Close, Exchange, Kind, Open, Pass, Pipeline, step_program
from tests.elastic_train.program import liveness
from tests.elastic_train.program.liveness import Event, Post, Shards, StuckError, World, check, check_in_turn

GROUPS = [((0,),), ((0, 1),), ((0,), (1,)), ((0, 2), (1,)), ((0,), (1, 2, 3))]
CELLS = [
    *(Cell(stage=stages, tensor=tensor) for stages in (1, 2, 3, 4) for tensor in (1, 2)),
    *(Cell(stage=stages, context=2) for stages in (1, 2)),
    *(Cell(stage=stages, expert=expert) for stages in (1, 2, 3) for expert in (2, 3)),
]
MOST_RANKS = 12
SHARDS: list[Shards] = ["none", "gradients", "parameters"]


def lanes_of(cell: Cell, groups: tuple[tuple[int, ...], ...], num_lanes: int, shards: Shards) -> Assignment:
    num_replicas = sum(map(len, groups))
    if shards == "none":
        return cell.assigned(num_replicas, num_lanes)
    seats: dict[int, Seat] = {}
    for group, replicas in enumerate(groups):
        for slot, (replica, part) in enumerate(itertools.product(replicas, range(cell.context))):
            size, at = len(replicas) * cell.context, replica * cell.context + part
            seats[at] = Seat(group, slot, size, len(seats), None, 0, ())
    return lanes_by_owner([seats[at] for at in range(len(seats))], num_lanes, cell.context, cell.expert)


def worlds(kind: Kind, num_chunks: int) -> Iterator[World]:
    for cell, groups, shards in itertools.product(CELLS, GROUPS, SHARDS):
        if (num_chunks > 1 and cell.stage == 1) or sum(map(len, groups)) * cell.size > MOST_RANKS:
            continue
        num_owners = sum(map(len, groups)) * cell.expert
        for num_lanes in (num_owners, 2 * num_owners + 1):
            lanes = lanes_of(cell, groups, num_lanes, shards)
            yield World(cell, lanes, groups, kind, num_chunks, shards, num_blocks=1)


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_nobody_waits_for_ever(kind: Kind, num_chunks: int) -> None:
    count = 0
    for world in worlds(kind, num_chunks):
        try:
            check(world.events())
        except StuckError as error:
            raise AssertionError(f"{world}: {error}") from error
        count += 1
    assert count > 200


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_nor_do_devices_that_run_one_exchange_at_a_time(kind: Kind, num_chunks: int) -> None:
    """As NCCL may: communicators take a device's multiprocessors from one another."""
    for world in worlds(kind, num_chunks):
        try:
            check_in_turn(replace(world, is_after=world.cell.size > 1).events())
        except StuckError as error:
            raise AssertionError(f"{world}: {error}") from error


def test_experts_whole_gradients_cannot_be_exchanged_during_passes_of_such_devices() -> None:
    """A rank's last lane is in another turn than its peers', so it begins exchanges in another order."""
    cell = Cell(expert=2)
    world = World(cell, lanes_of(cell, ((0,),), 5, "none"), ((0,),), num_blocks=1)
    check(world.events())
    check_in_turn(replace(world, is_after=True).events())
    with pytest.raises(StuckError, match="tokens"):
        check_in_turn(world.events())


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_nor_does_anybody_with_other_numbers_of_blocks(num_blocks: int) -> None:
    for groups, shards, num_lanes in itertools.product(GROUPS, SHARDS, (4, 5, 9)):
        lanes = lanes_of(Cell(), groups, num_lanes, shards)
        check(World(Cell(), lanes, groups, "1f1b", 1, shards, num_blocks).events())


@given(
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]),
    st.integers(2, 6),
    st.sampled_from([*GROUPS, ((0, 1, 2, 3, 4),), ((0, 1), (2, 3, 4))]),
    st.integers(5, 20),
    st.sampled_from(SHARDS),
)
def test_nor_does_anybody_in_a_long_pipeline(
    kind: tuple[Kind, int], num_stages: int, groups: tuple[tuple[int, ...], ...], num_lanes: int, shards: Shards
) -> None:
    """Some cells have a lane less than others, in some of which all ranks of a place meet for each lane."""
    cell = Cell(stage=num_stages)
    check(World(cell, lanes_of(cell, groups, num_lanes, shards), groups, *kind, shards, num_blocks=1).events())


SWAPPED = [
    World(Cell(stage=2), lanes_of(Cell(stage=2), ((0,), (1,)), 6, "gradients"), ((0,), (1,)), "1f1b", 1, "gradients"),
    World(Cell(), lanes_of(Cell(), ((0, 1),), 5, "parameters"), ((0, 1),), "1f1b", 1, "parameters", 3),
    World(Cell(stage=2, expert=2), lanes_of(Cell(stage=2, expert=2), ((0,),), 5, "none"), ((0,),), "interleaved", 2),
]


@pytest.mark.parametrize("world", SWAPPED)
def test_a_rank_that_swaps_two_exchanges_is_found(world: World) -> None:
    """The check can fail: of two exchanges with the same peer the second begins before the first."""
    count, events = 0, world.events()
    for rank, mine in enumerate(events):
        posts = [number for number, event in enumerate(mine) if isinstance(event, Post) and event.messages]
        for one, other in itertools.pairwise(posts):
            if ends_of(mine[one]).isdisjoint(ends_of(mine[other])):
                continue
            swapped = list(mine)
            swapped[one], swapped[other] = mine[other], mine[one]
            with pytest.raises(StuckError):
                check([*events[:rank], swapped, *events[rank + 1 :]])
            count += 1
    assert count >= 10


def ends_of(event: Event) -> set[tuple[str, int, bool]]:
    assert isinstance(event, Post)
    return {(one.links, one.peer, one.is_sent) for one in event.messages}


@pytest.mark.heavy
@pytest.mark.parametrize("world", SWAPPED)
def test_a_rank_that_swaps_two_actions_of_its_program_is_found(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Wherever the second action needs the first; other adjacent actions may be swapped."""
    num_found = 0
    for rank in range(world.size):
        mesh = world.mesh(rank)
        program, num_lanes = program_of(world, mesh.coordinates.stage), len(world.lanes[mesh.owner])
        for at, pair in enumerate(itertools.pairwise(program)):
            programs = [
                [*program[:at], *reversed(pair), *program[at + 2 :]]
                if other == rank
                else program_of(world, world.mesh(other).coordinates.stage)
                for other in range(world.size)
            ]
            monkeypatch.setattr(liveness, "step_program", mock.Mock(side_effect=programs))
            assert is_stuck(world) == needs(*pair, num_lanes), pair
            num_found += needs(*pair, num_lanes)
    assert num_found >= 20


def needs(first: Action, second: Action, num_lanes: int) -> bool:
    """Return True if an action of a rank with `num_lanes` lanes needs the one before it."""
    match first, second:
        case Pass(), Exchange():
            return first == second.sends and first.number < num_lanes
        case Exchange(), Pass():
            return second in first.takes and second.number < num_lanes
        case Close(), Open():
            return True  # one leaf at a time
        case (Exchange(), _) | (_, Exchange()) | (Close(), _) | (Pass(), Open()):
            return False
    return (first.number, first.chunk) == (second.number, second.chunk)


def program_of(world: World, stage: int) -> Sequence[Action]:
    pipeline = Pipeline(world.kind, world.cell.stage, max(map(len, world.lanes)), world.num_chunks)
    return step_program(pipeline, stage, has_experts=world.cell.expert > 1)


def is_stuck(world: World) -> bool:
    try:
        check(world.events())
    except StuckError:
        return True
    return False
