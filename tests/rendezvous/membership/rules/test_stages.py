"""Cells with stages on several nodes: complete, each stage within one node, with as few members as possible moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rendezvous.membership.records import Member, View
from rendezvous.membership.rules import decisions, standing
from rendezvous.membership.rules.admission import Policy, admitted
from rendezvous.membership.rules.cells import Arrangement, CellShape, arrange, is_a_part_left_behind
from rendezvous.membership.rules.decisions import Seal, Wait
from rendezvous.membership.rules.stages import allot
from rendezvous.membership.worlds import Seat, World
from tests.rendezvous.membership.rules.test_cells import worker, world

PIPELINE = CellShape(num_stages=2, stage_size=1)
CELLS = Policy(1, 4, 0.0, max_members=8, cell=PIPELINE)
Change = tuple[CellShape, list[Member], World | None]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """Draw a shape, a world of complete cells, and the members after some members or nodes have left and others joined.

    Some of the remaining members have a new id.
    """
    shape = CellShape(draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    nodes = "abcdef"[: draw(st.integers(1, 6))]
    first = [worker(f"{draw(st.sampled_from(nodes))}{number}") for number in range(draw(st.integers(0, 18)))]
    before = arrange(first, shape, None).members
    gone = draw(st.sets(st.sampled_from(nodes), max_size=2))
    survivors = [member for member in first if member.node not in gone and draw(st.integers(0, 5))]
    ranks = {member.id: rank for rank, member in enumerate(before)}
    survivors = [
        replace(member, id=f"{member.id}x", rank=ranks.get(member.id, -1), rank_in=1)
        if draw(st.integers(0, 9)) == 9 and before
        else member
        for member in survivors
    ]
    newcomers = [worker(f"{draw(st.sampled_from('abcdefgh'))}n{number}") for number in range(draw(st.integers(0, 6)))]
    return shape, [*survivors, *newcomers], world(1, *(member.id for member in before)) if before else None


def groups_in(found: Arrangement, shape: CellShape) -> Iterator[tuple[int, tuple[Member, ...]]]:
    """Yield each group of each cell, and its stage."""
    for cell in found.cells:
        for stage in range(shape.num_stages):
            yield stage, cell[stage * shape.stage_size : (stage + 1) * shape.stage_size]


def had_by(members: Sequence[Member], shape: CellShape, last: World | None) -> dict[str, int]:
    """Return the places that members had."""
    ranks = {member.id: None if last is None else last.rank_of(member.id) for member in members}
    ranks |= {member.id: member.rank for member in members if member.rank >= 0}
    return {name: rank % shape.size for name, rank in ranks.items() if rank is not None}


def kept_in(found: Arrangement, had: dict[str, int]) -> list[int]:
    """Return the places that are kept, once for each member that keeps it."""
    seated = ((place, member) for cell in found.cells for place, member in enumerate(cell))
    return [place for place, member in seated if had.get(member.id) == place]


@given(changes())
def test_cells_are_whole_and_each_stage_is_on_one_node(change: Change) -> None:
    """Every member is in one place of one cell or on standby, and there are as many cells as possible."""
    shape, members, last = change
    found = arrange(members, shape, last)
    assert Counter([*found.members, *found.spares]) == Counter(members)
    assert all(len(cell) == shape.size for cell in found.cells)
    assert all(len({member.node for member in group}) == 1 for _, group in groups_in(found, shape))
    rooms = Counter(member.node for member in members)
    assert len(found.cells) == sum(number // shape.stage_size for number in rooms.values()) // shape.num_stages
    order = [members.index(cell[0]) for cell in found.cells]
    assert order == sorted(order)


@pytest.mark.heavy
@settings(max_examples=300)
@given(changes())
def test_no_arrangement_of_as_many_cells_moves_fewer_members(change: Change) -> None:
    """Compared with all ways to assign nodes' room to stages; parts that only one node may hold come first."""
    shape, members, last = change
    found, had = arrange(members, shape, last), had_by(members, shape, last)
    nodes_with = {place: {one.node for one in members if had.get(one.id) == place} for place in range(shape.size)}
    kept = kept_in(found, had)
    sole = {place for place in kept if len(nodes_with[place]) == 1}
    assert (len(sole), len(kept)) == most_kept(members, shape, had, len(found.cells))


def most_kept(members: Sequence[Member], shape: CellShape, had: dict[str, int], num_cells: int) -> tuple[int, int]:
    """Return how many places that only one node knows can be kept, and how many members' places with them."""
    nodes = sorted({member.node for member in members})
    counts = {node: Counter(had[m.id] for m in members if m.node == node and m.id in had) for node in nodes}
    with_place = Counter(place for count in counts.values() for place in count)
    best = {(0,) * shape.num_stages: (0, 0)}
    for node in nodes:
        room, now = sum(member.node == node for member in members) // shape.stage_size, dict(best)
        for loads, (sole, kept) in best.items():
            for row in rows_of(room, shape.num_stages):
                total = tuple(load + number for load, number in zip(loads, row, strict=True))
                if max(total) > num_cells:
                    continue
                places = [(place, row[place // shape.stage_size]) for place in range(shape.size)]
                more = sum(min(number, counts[node][place]) for place, number in places)
                alone = sum(
                    number > 0 and counts[node][place] > 0 and with_place[place] == 1 for place, number in places
                )
                now[total] = max(now.get(total, (0, 0)), (sole + alone, kept + more))
        best = now
    return max(best.values())


def rows_of(room: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to assign some of a node's room to stages."""
    if num_stages == 0:
        yield ()
        return
    for number in range(room + 1):
        for rest in rows_of(room - number, num_stages - 1):
            yield (number, *rest)


@given(changes())
def test_who_is_in_a_place_for_the_first_time_is_new_unless_there_are_too_few(change: Change) -> None:
    """A member moves only if its node has no new member for the place."""
    shape, members, last = change
    found, had = arrange(members, shape, last), had_by(members, shape, last)
    spare_newcomers = {member.node for member in found.spares if member.id not in had}
    for cell in found.cells:
        for place, member in enumerate(cell):
            assert had.get(member.id, place) == place or member.node not in spare_newcomers


@pytest.mark.heavy
@given(changes())
def test_an_arrangement_stands_until_somebody_comes_or_goes(change: Change) -> None:
    """Given the world that was made of it, the result is the same; waiting members change nothing."""
    shape, members, last = change
    found = arrange(members, shape, last)
    if found.cells:
        assert arrange(members, shape, world(2, *(member.id for member in found.members))) == found


@given(changes(), st.integers(1, 3))
def test_a_world_with_no_room_for_more_cells_is_left_alone(change: Change, most: int) -> None:
    shape, members, last = change
    found = arrange(members, shape, last, most)
    assert len(found.cells) <= most
    if found.cells:
        sealed = world(2, *(member.id for member in found.members))
        grown = [*members, *(worker(f"zn{number}") for number in range(2 * shape.size))]
        assert arrange(grown, shape, sealed, len(found.cells)).cells == found.cells


@given(changes())
def test_stages_of_a_node_go_together(change: Change) -> None:
    """Between two stages, as many cells stay in a node as it has groups of both."""
    shape, members, last = change
    found = arrange(members, shape, last)
    per_stage = [Counter[str]() for _ in range(shape.num_stages)]
    for stage, group in groups_in(found, shape):
        per_stage[stage][group[0].node] += 1
    for stage, (before, after) in enumerate(pairwise(per_stage)):
        places = stage * shape.stage_size, (stage + 1) * shape.stage_size
        assert sum(cell[places[0]].node == cell[places[1]].node for cell in found.cells) == (before & after).total()


def test_nodes_of_one_worker_make_cells_in_the_order_in_which_they_came() -> None:
    found = arrange([worker(name) for name in ("a0", "b0", "c0", "d0", "e0")], PIPELINE, None)
    assert [[member.id for member in cell] for cell in found.cells] == [["a0", "b0"], ["c0", "d0"]]
    assert [member.id for member in found.spares] == ["e0"]


def test_a_node_fills_its_room_with_a_neighbour_of_its_own_stage() -> None:
    """Its group of stage 2 can then hand over to stage 3 without leaving the node, though stage 0 lacks a group."""
    keeps = [[[], [], [1], []], [[], [1], [], []], [[], [], [], []]]
    assert allot([2, 1, 1], keeps, num_stages=4, num_each=1) == [[0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0]]


def test_a_node_fills_its_room_with_the_stage_after_its_first() -> None:
    """The second node has a group of stage 0, and it would be the turn of stage 2."""
    keeps: list[list[list[int]]] = [[[], [], []], [[1], [], []], [[], [], []]]
    assert allot([2, 2, 2], keeps, num_stages=3, num_each=2) == [[1, 1, 0], [1, 1, 0], [0, 0, 2]]


def test_a_node_makes_room_for_another_if_both_together_keep_more() -> None:
    """The first node would keep the most members with stage 0, but the second has members of that stage only."""
    assert allot([1, 1], [[[3], [2]], [[2], []]], num_stages=2, num_each=1) == [[0, 1], [1, 0]]


def test_a_part_that_only_one_node_has_is_kept_though_others_have_more_members() -> None:
    """Each of three nodes has room for a group, and only `x` has place 5; all other places are on two nodes.

    With `x` in the first stage and `z` in the second, five members would keep their places instead of four.
    """
    last = world(1, *"abcdefghijkl")
    names = {"x": "abcf", "y": "ghijk", "z": "de"}
    members = [replace(worker(name, last), node=node) for node, left in names.items() for name in left]
    (cell,) = arrange([*members, replace(worker("n"), node="z")], CellShape(2, 3), last).cells
    assert [member.node for member in cell] == [*"yyyxxx"] and cell[5].id == "f"


def test_cells_that_fit_into_nodes_are_in_nodes() -> None:
    four = [worker(f"{node}{number}") for number in range(4) for node in "ab"]
    found = arrange(four, CellShape(2, 2), None)
    assert [{member.node for member in cell} for cell in found.cells] == [{"a"}, {"b"}]


def test_nodes_of_different_numbers_of_workers_make_up_cells() -> None:
    """Three, two and one groups of two workers each: three cells of two stages; the odd worker is on standby."""
    names = [*(f"a{n}" for n in range(6)), *(f"b{n}" for n in range(5)), "c0", "c1"]
    found = arrange([worker(name) for name in names], CellShape(2, 2), None)
    assert len(found.cells) == 3 and [member.id for member in found.spares] == ["b4"]


def test_a_lost_node_is_made_up_for_by_one_of_a_cell_that_is_given_up() -> None:
    """Two cells lose a node each, at different stages: the rest forms one cell, nobody moves, and no part is lost."""
    left = [worker("b0"), worker("c0")]
    found = arrange(left, PIPELINE, world(1, "a0", "b0", "c0", "d0"))
    assert [[member.id for member in cell] for cell in found.cells] == [["c0", "b0"]]


def test_a_spare_node_takes_the_place_of_a_lost_one() -> None:
    two = replace(CELLS, max_nodes=5)
    last = world(1, "a0", "b0", "c0", "d0")
    left = [*(worker(name, last) for name in ("a0", "c0", "d0")), worker("e0")]
    found = decisions.decide(View(9, tuple(left), last), "a0", two, 0.0)
    assert isinstance(found, Seal) and found.seats == tuple(Seat(name, 1) for name in ("a0", "d0", "c0", "e0"))


def test_a_node_without_a_cell_waits_and_its_world_goes_on() -> None:
    """Of three nodes two make a cell; the third is on standby until a fourth joins."""
    last = world(1, "a0", "b0", "c0", "d0")
    left = [worker(name, last) for name in ("a0", "c0", "d0")]
    assert decisions.decide(View(9, tuple(left), last), "a0", CELLS, 0.0) == Seal(
        2, (Seat("a0", 1), Seat("d0", 1)), "lost"
    )
    assert decisions.decide(View(9, tuple(left), last), "c0", CELLS, 0.0) == Wait("room")
    one = world(2, "a0", "d0")
    assert standing.num_waiting(View(10, tuple(left), one), "a0", one, CELLS) == 0
    joined = View(11, (*left, worker("e0")), one)
    assert standing.num_waiting(joined, "a0", one, CELLS) == 2


def test_a_part_that_one_node_alone_holds_is_waited_for() -> None:
    """Two nodes of two workers have lost one each, and have room for one group each: of different stages."""
    shape, last = CellShape(2, 2), world(1, *"abcd")
    held = [replace(worker(name, last), node=node) for name, node in (("a", "x"), ("d", "x"), ("c", "y"))]
    newcomer = replace(worker("n"), node="y")
    found = arrange([*held, newcomer], shape, last)
    assert is_a_part_left_behind(found.members, held, shape, last), "x has room for one of two parts that it alone has"
    policy = Policy(1, 2, 0.0, cell=shape)
    view = View(9, (*held, replace(newcomer, after=1)), last)
    assert decisions.decide(view, found.members[0].id, policy, 1.0) == Wait("holder", 29.0)


def test_a_node_is_not_spared_if_no_cell_is_left_without_it() -> None:
    """Two nodes that make one cell; or three, one of them on standby."""
    last = world(1, "a0", "b0")
    both = (worker("a0"), worker("b0"))
    assert standing.node_to_spare(View(9, both, last), last, 1, CELLS) is None
    assert standing.node_to_spare(View(9, (*both, worker("c0")), last), last, 1, CELLS) == "b"


@pytest.mark.parametrize(("most", "expected"), [(4, "abcd"), (3, "ab"), (5, "abcd")])
def test_no_more_nodes_are_admitted_than_may_be(most: int, expected: str) -> None:
    five = tuple(worker(f"{node}0") for node in "abcde")
    found = admitted(five, Policy(1, most, cell=PIPELINE), None)
    assert "".join(member.node for member in found) == expected


@pytest.mark.parametrize("nodes", ["abab", "aabb"])
def test_stages_of_the_newest_world_come_before_those_of_an_older_one(nodes: str) -> None:
    """There is room for one cell, and each node has a member of each world."""
    last = world(5, f"{nodes[0]}0", f"{nodes[3]}1")
    new = [worker(seat.member, last) for seat in last.seats]
    old = [replace(worker(f"{nodes[1 + number]}{number + 2}"), rank=1 - number, rank_in=3) for number in range(2)]
    policy = Policy(1, 4, 0.0, max_members=2, cell=PIPELINE)
    for members in ((*old, *new), (*new, *old)):
        assert set(admitted(members, policy, last)) == set(new)
