"""Sharded cells have the bits of replicated cells, through faults; a shard comes from its shard group.

Ranks in memory; a rank that dies leaves its groups, and its peers learn of it at their next exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

from elastic_train.checkpoint.format.weights_digest import weights_digest
from elastic_train.core.mesh import Cell
from elastic_train.parallel.leaves import Wire
from elastic_train.placement.grains import GRAIN
from tests.elastic_train.job.cells.cell_jobs import (
    CELL,
    SIZE,
    Shards,
    build,
    compute,
    elements_held,
    elements_of_gradients,
    enter,
    fingerprint,
    meet,
    train,
)
from tests.elastic_train.job.faults import Fault, step_with
from tests.memory_machine import in_memory

pytestmark = pytest.mark.slow
STEPS = 4
"""Enough for a fault with moments, a second fault, and a step after it."""
KINDS: Sequence[Shards] = ("optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class World:
    """The members of a world, cell by cell, and the fault that ends it (None for the last world, which trains until a
    step)."""

    members: Sequence[int]
    fault: Fault | None = None
    until: int = STEPS


def member(
    who: int, num: int, worlds: Sequence[World], copies: int, shards: Shards, wire: Wire, cell: Cell
) -> list[list[object]]:
    """Live through this member's worlds; return its observations at their beginnings and at the end."""
    torch.set_num_threads(1)
    state, seen = build(shards, copies, wire, cell), list[list[object]]()
    for term, world in enumerate(worlds, start=1):
        if who not in world.members:
            continue
        ranks = meet(f"world-{term}", world.members.index(who), len(world.members), cell)
        before = (
            {}
            if shards == "parameters"
            else {name: one.detach().clone() for name, one in state.model.named_parameters()}
        )
        if num_lost := enter(ranks, state, who, term):
            is_as_before = all(state.model.get_parameter(name).equal(one) for name, one in before.items())
            seen.append([term, state.step, "as before" if is_as_before else "changed", num_lost])
            break
        seen.append([term, state.step, fingerprint(ranks, state), 0])
        train(ranks, state, world.fault.step if world.fault else world.until, term)
        if world.fault is not None:
            step_with(world.fault, who, ranks.world, state, term, partial(compute, ranks, state))
            ranks.world.abandon()
        else:
            seen.append([term, state.step, fingerprint(ranks, state), 0])
            if shards != "none":
                num_weights = sum(one.numel() for one in state.model.parameters())
                seen.append([elements_held(state), num_weights, elements_of_gradients(state)])
            state.shards.make_whole(ranks.column)
            if ranks.world.rank == 0:
                assert weights_digest(state.model, state.layout.dims) == seen[-1 - (shards != "none")][2], (
                    "as a task is given it in the end"
                )
            ranks.world.barrier()
    return seen


def live_through(
    worlds: Sequence[World],
    copies: int = 2,
    shards: Shards = "optimizer",
    wire: Wire = "exact",
    cell: Cell = CELL,
) -> dict[int, list[list[object]]]:
    """Return what each surviving member saw: [term, step, weights, shards lost] at every beginning and the end, then
    the elements that it holds of moments, of weights, and of the gradients that it keeps."""
    num = 1 + max(who for world in worlds for who in world.members)
    seen = in_memory(member, num, worlds, copies, shards, wire, cell)
    return {who: rows for who, rows in enumerate(seen) if rows is not None}


@pytest.fixture(scope="module")
def expected() -> list[object]:
    """The weights after every step of one cell whose ranks hold all of their parts."""
    return alone(CELL)


@cache
def alone(cell: Cell) -> list[object]:
    """Return the weights after every step of one cell whose ranks hold all of their parts."""
    members = range(cell.size)
    worlds = [World(members, Fault(step, "computing", dying=[])) for step in range(STEPS)]
    seen = live_through([*worlds, World(members)], shards="none", cell=cell)
    return [row[2] for row in seen[0][1:]]


@pytest.mark.parametrize("shards", KINDS)
@pytest.mark.parametrize(("num_cells", "copies"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_a_rank_holds_its_share_of_its_places_moments(
    expected: list[object], num_cells: int, copies: int, shards: Shards
) -> None:
    """The weights equal those of replicated cells, for any number of cells and copies."""
    seen = live_through([World(range(num_cells * SIZE), until=2)], copies, shards)
    assert {row[1][2] for row in seen.values()} == {expected[1]}
    held, weights = (sum(int(str(row[2][column])) for row in seen.values()) for column in (0, 1))
    num_copies = min(copies, num_cells)
    assert held == pytest.approx(2 * num_copies * weights / num_cells, rel=0.01), "two moments of each weight"
    most = max(int(str(row[2][0])) for row in seen.values())
    of_a_copy = held / (num_copies * SIZE)
    assert most < of_a_copy / (num_cells // num_copies) + 2 * GRAIN, "as evenly as groups and grains allow"
    gradients = sum(int(str(row[2][2])) for row in seen.values())
    assert gradients == pytest.approx(weights if shards == "optimizer" else held / 2, rel=0.01)


def test_leaves_that_are_rounded_on_their_way_have_the_same_bits_in_any_number_of_cells(expected: list[object]) -> None:
    found = set()
    for num_cells in (1, 3):
        worlds = [World(range(num_cells * SIZE))]
        seen = live_through(worlds, 1, "gradients", "bf16")
        found |= {row[1][2] for row in seen.values()}
    assert len(found) == 1 and found != {expected[-1]}


@pytest.mark.parametrize(
    ("shards", "fault", "kept"),
    [
        ("optimizer", Fault(1, "computing", dying=[5]), 1),
        ("gradients", Fault(1, "summed", dying=[5]), 2),
        ("parameters", Fault(1, "summed", dying=[0]), 2),
        ("parameters", Fault(1, "summed", dying=[5], unable=[0]), 1),
        ("gradients", Fault(1, "applied", dying=[5], missing=[0, 1, 2, 3, 4]), 2),
        ("parameters", Fault(1, "applied", dying=[2], missing=[0, 5]), 2),
        ("optimizer", Fault(1, "applied", dying=[3], missing=[]), 2),
    ],
    ids=["computing", "summed", "summed-by-0", "one-cannot", "all-left-missed-it", "two-missed-it", "all-applied-it"],
)
def test_a_lost_rank_costs_no_applied_step(expected: list[object], shards: Shards, fault: Fault, kept: int) -> None:
    """Three cells lose a rank and continue as two; its cell mate becomes a standby until a newcomer joins.

    `test_resharding` has each fault with each kind of shards, where a cell is a rank.
    """
    [dead] = fault.dying
    mate = dead ^ 1
    left = [who for who in range(3 * SIZE) if who not in (dead, mate)]
    pair = [mate, 6] if mate % SIZE == 0 else [6, mate]
    worlds = [World(range(6), fault), World(left, Fault(STEPS - 1, "summed", dying=[])), World([*left, *pair])]
    seen = live_through(worlds, shards=shards)
    for who in left:
        rows = seen[who][:-1]
        assert [row[1:3] for row in rows[1:]] == [[kept, expected[kept - 1]], *2 * [[STEPS, expected[-1]]]]
        assert not any(row[3] for row in rows)
    for who in pair:
        assert seen[who][-2][:3] == [3, STEPS, expected[-1]]


@pytest.mark.parametrize("shards", KINDS)
def test_a_rank_that_comes_to_another_place_gets_its_part(expected: list[object], shards: Shards) -> None:
    """Its old shards are useless there, and at the beginning it has the weights of neither place."""
    worlds = [
        World([0, 1, 2, 3], Fault(1, "applied", dying=[2])),
        World([0, 1, 4, 3], Fault(2, "computing", dying=[4])),
    ]
    seen = live_through([*worlds, World([0, 1, 3, 5])], shards=shards)
    assert [row[:4] for row in seen[3][:-1]][1:] == [
        [2, 2, expected[1], 0],
        [3, 2, expected[1], 0],
        [3, STEPS, expected[-1], 0],
    ]
    assert {seen[who][-2][2] for who in (0, 1, 3, 5)} == {expected[-1]}


@pytest.mark.parametrize("shards", KINDS)
def test_ranks_of_two_cells_that_make_one_compute_the_same_lanes(expected: list[object], shards: Shards) -> None:
    """They held different shards, and both take the one that moves least; so do newcomers that form a third cell."""
    worlds = [World(range(6), Fault(1, "summed", dying=[2, 5])), World([0, 1, 4, 3], Fault(2, "applied", dying=[1]))]
    seen = live_through([*worlds, World([0, 3, 4, 6, 7, 8])], shards=shards)
    for who in (0, 3, 4):
        assert [row[1:] for row in seen[who][1:-1]] == [[step, expected[step - 1], 0] for step in (2, 3, STEPS)]


@pytest.mark.parametrize("dying", [[4], [0, 2]])
def test_what_no_rank_of_a_column_holds_any_more_is_said_to_be_lost(dying: Sequence[int]) -> None:
    """One rank holds the only copy; nothing has changed when it is lost."""
    gone = {one for dead in dying for one in (dead, dead ^ 1)}
    left = [who for who in range(3 * SIZE) if who not in gone]
    seen = live_through([World(range(6), Fault(1, "computing", dying=dying)), World(left)], copies=1)
    for who in left:
        assert seen[who][1][1:3] == [1, "as before"] and int(str(seen[who][1][3])) > 0


TOKENS = Cell(context=2)
"""Two context-parallel ranks, which hold the same part."""


@pytest.fixture(scope="module")
def of_tokens() -> list[object]:
    """The weights after every step of one cell of two ranks that hold everything."""
    return alone(TOKENS)


@pytest.mark.parametrize(("num_cells", "copies"), [(1, 1), (2, 2), (3, 1)])
def test_ranks_with_parts_of_rows_hold_shares_of_one_part(of_tokens: list[object], num_cells: int, copies: int) -> None:
    """Even in one cell each rank holds half of its moments."""
    seen = live_through([World(range(num_cells * 2))], copies, cell=TOKENS)
    assert {row[1][2] for row in seen.values()} == {of_tokens[-1]}
    weights = int(str(seen[0][2][1]))
    held = [int(str(row[2][0])) for row in seen.values()]
    assert sum(held) == pytest.approx(2 * copies * weights, rel=0.01), "two moments of each weight"
    assert max(held) < copies * weights / num_cells + 2 * GRAIN


def test_parts_of_tensor_ranks_are_shared_by_those_with_other_tokens() -> None:
    cell = Cell(tensor=2, context=2)
    expected = alone(cell)
    seen = live_through([World(range(4))], 1, cell=cell)
    assert {row[1][2] for row in seen.values()} == {expected[-1]}
    assert all(int(str(row[2][0])) < int(str(row[2][1])) + 2 * GRAIN for row in seen.values()), "half of two moments"


@pytest.mark.parametrize(
    ("worlds", "kept"),
    [
        ([World([0, 1], Fault(1, "summed", dying=[1])), World([2, 0])], 2),
        ([World(range(4), Fault(1, "applied", dying=[3], missing=[0, 2])), World([0, 1])], 2),
        ([World(range(4), Fault(1, "computing", dying=[1, 2])), World([0, 3, 4, 5])], 1),
    ],
    ids=["one cell loses a rank", "a cell is given up", "a cell of two others"],
)
def test_a_lost_rank_with_parts_of_rows_costs_no_applied_step(
    of_tokens: list[object], worlds: list[World], kept: int
) -> None:
    """With two cells, copies are in different cells; a rank that gets other tokens next keeps its shard."""
    seen = live_through(worlds, cell=TOKENS)
    for who in worlds[1].members:
        assert [row[1:] for row in seen[who][-3:-1]] == [[kept, of_tokens[kept - 1], 0], [STEPS, of_tokens[-1], 0]]


def test_what_one_rank_of_a_cell_held_alone_is_said_to_be_lost() -> None:
    worlds = [World([0, 1], Fault(1, "computing", dying=[1])), World([0, 2])]
    seen = live_through(worlds, copies=1, cell=TOKENS)
    assert seen[0][1][1:3] == [1, "as before"] and int(str(seen[0][1][3])) > 0


@pytest.mark.parametrize("shards", ["none", "optimizer", "gradients", "parameters"])
def test_ranks_that_change_places_before_the_first_step_bring_no_seat(expected: list[object], shards: Shards) -> None:
    """The shards of the world that broke belonged to other places."""
    worlds = [World(range(4), Fault(0, "computing", dying=[2, 3])), World([1, 0])]
    seen = live_through(worlds, copies=1, shards=shards)
    ends = [next(row for row in reversed(seen[who]) if len(row) == 4) for who in (0, 1)]
    assert [row[1:] for row in ends] == [[STEPS, expected[-1], 0]] * 2


@pytest.mark.parametrize("shards", ["none", "optimizer", "gradients", "parameters"])
def test_a_part_that_is_lost_before_the_first_step_begins_anew(shards: Shards) -> None:
    """One of two tensor ranks already has its shards; a newcomer has all of the other part's initial weights."""
    worlds = [World([0, 1], Fault(0, "computing", dying=[1])), World([0, 2])]
    seen = live_through(worlds, copies=1, shards=shards, cell=CELL)
    ends = [[row for row in seen[who] if len(row) == 4][-1] for who in (0, 2)]
    assert ends[0] == ends[1] and ends[0][1] == STEPS
