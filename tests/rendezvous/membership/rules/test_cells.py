"""Cells of members: complete, within one node, as many as possible, with as few members as possible moved."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rendezvous import MemoryStore
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import Member, View
from rendezvous.membership.rules import decisions, standing
from rendezvous.membership.rules.admission import Policy, admitted
from rendezvous.membership.rules.cells import Arrangement, CellShape, arrange, is_a_part_left_behind
from rendezvous.membership.rules.decisions import Seal, Wait
from rendezvous.membership.worlds import Seat, World
from tests.conftest import PATIENCE_S

CELLS = Policy(1, 4, 0.0, max_members=4, cell=CellShape(1, 2))


def worker(name: str, left: World | None = None, **fields: int) -> Member:
    """Return a worker named after its node; it has `left` a world, with its state if it had a rank there."""
    if left is not None:
        rank = left.rank_of(name)
        had = {} if rank is None else {"rank": rank, "rank_in": left.term}
        fields = {"after": left.term, **had, **fields}
    return Member(name, "host", "address", 1, **{"after": 0, **fields}, node=name[0], node_members=1)


def world(term: int, *names: str) -> World:
    return World(term, tuple(Seat(name, 1) for name in names), "start", "address", 1, 0.0)


def places_in(arrangement: Arrangement) -> dict[str, int]:
    return {member.id: place for cell in arrangement.cells for place, member in enumerate(cell)}


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, list[Member], World | None]:
    """Draw a cell's size, a world of complete cells, and the members after some have left and others joined."""
    size = draw(st.integers(1, 4))
    first = [worker(f"{draw(st.sampled_from('abc'))}{number}") for number in range(draw(st.integers(0, 14)))]
    before = arrange(first, CellShape(1, size), None).members
    survivors = [member for member in first if draw(st.booleans())]
    newcomers = [worker(f"{draw(st.sampled_from('abc'))}n{number}") for number in range(draw(st.integers(0, 6)))]
    return size, [*survivors, *newcomers], world(1, *(member.id for member in before)) if before else None


@given(changes())
def test_cells_are_whole_of_one_node_and_as_many_as_can_be(change: tuple[int, list[Member], World | None]) -> None:
    """Every member is in one cell or on standby; a node's standby members cannot form another cell."""
    size, members, last = change
    found = arrange(members, CellShape(1, size), last)
    assert Counter([*found.members, *found.spares]) == Counter(members)
    assert all(len(cell) == size and len({member.node_id for member in cell}) == 1 for cell in found.cells)
    assert all(number < size for number in Counter(member.node_id for member in found.spares).values())
    assert [cell[0] for cell in found.cells] == [member for member in members if places_in(found).get(member.id) == 0]


@given(changes())
def test_no_arrangement_moves_fewer_members(change: tuple[int, list[Member], World | None]) -> None:
    """As many members keep their place as their node's cells have such places; otherwise newcomers come first."""
    size, members, last = change
    found, had = arrange(members, CellShape(1, size), last), {}
    for member in members:
        rank = None if last is None else last.rank_of(member.id)
        if rank is not None:
            had[member.id] = rank % size
    now = places_in(found)
    for node in {member.node_id for member in members}:
        num_cells = sum(cell[0].node_id == node for cell in found.cells)
        mine = [member.id for member in members if member.node_id == node]
        known = Counter(had[name] for name in mine if name in had)
        kept = Counter(had[name] for name in mine if name in had and now.get(name) == had[name])
        assert kept == Counter({place: min(number, num_cells) for place, number in known.items() if num_cells})
        num_moved = sum(name in had and name in now and now[name] != had[name] for name in mine)
        num_new = sum(name not in had for name in mine)
        assert num_moved == max(0, num_cells * size - kept.total() - num_new)


@given(changes())
def test_an_arrangement_stands_until_somebody_comes_or_goes(change: tuple[int, list[Member], World | None]) -> None:
    """Given the world that was made of it, the result is the same, whichever members wait."""
    size, members, last = change
    found = arrange(members, CellShape(1, size), last)
    if found.cells:
        assert arrange(members, CellShape(1, size), world(2, *(member.id for member in found.members))) == found


def test_survivors_of_two_cells_make_one_and_keep_their_parts() -> None:
    """Each of two cells has lost a different part: the rest forms one complete replica."""
    left = [worker("a1"), worker("a2")]
    assert places_in(arrange(left, CellShape(1, 2), world(1, "a0", "a1", "a2", "a3"))) == {"a2": 0, "a1": 1}


def test_members_that_have_other_ids_since_keep_their_parts() -> None:
    """All have stepped back from leading, since none could write: in any order, their parts remain useful."""
    again = [replace(worker(f"a{number + 4}"), rank=number, rank_in=1) for number in (3, 0, 2, 1)]
    kept = {"a7": 1, "a4": 0, "a6": 0, "a5": 1}
    assert places_in(arrange(again, CellShape(1, 2), world(1, "a0", "a1", "a2", "a3"))) == kept
    assert places_in(arrange(again, CellShape(1, 2), None)) == kept, "etcd has lost the world"
    mixed = [*again[:2], worker("a2"), worker("a1")]
    assert places_in(arrange(mixed, CellShape(1, 2), world(1, "a0", "a1", "a2", "a3"))) == {
        "a7": 1,
        "a4": 0,
        "a2": 0,
        "a1": 1,
    }


def test_who_was_in_an_older_world_keeps_its_part_where_nobody_newer_has_it() -> None:
    """Frozen in a world's first step, it returns with new ids, and no world since took a step: its state is as new."""
    back = [replace(worker("b4"), rank=3, rank_in=15), replace(worker("b5"), rank=2, rank_in=15)]
    members = [worker("a0"), *back, worker("a6")]
    assert places_in(arrange(members, CellShape(1, 2), world(17, "a0", "a6"))) == {"a0": 0, "a6": 1, "b5": 0, "b4": 1}
    alone = [replace(worker("a4"), rank=1, rank_in=15), worker("a0")]
    assert places_in(arrange(alone, CellShape(1, 2), world(17, "a0", "a1"))) == {"a0": 0, "a4": 1}


def test_nodes_of_an_older_world_come_after_those_of_the_newest() -> None:
    """Both have trained, but only one can be in a world of one node."""
    policy = Policy(1, 1, 0.0, cell=CellShape(1, 2))
    old = [replace(worker(f"a{number}"), rank=number, rank_in=1) for number in range(2)]
    members = (*old, worker("b2"), worker("b3"))
    assert [member.id for member in admitted(members, policy, world(3, "b2", "b3"))] == ["b2", "b3"]


def test_who_was_in_the_newest_world_comes_before_who_was_in_an_older_one() -> None:
    """A process may appear twice until the lease of its old id expires; then one of them counts as new."""
    old = [replace(worker("a8"), rank=1, rank_in=1), worker("a0"), worker("a1")]
    assert places_in(arrange(old, CellShape(1, 2), world(2, "a1", "a0"))) == {"a1": 0, "a0": 1}
    twice = [worker("a0"), worker("a1"), replace(worker("a2"), rank=1, rank_in=1), worker("a3")]
    found = arrange(twice, CellShape(1, 2), world(1, "a0", "a1"))
    assert [[member.id for member in cell] for cell in found.cells] == [["a0", "a1"], ["a2", "a3"]]


@pytest.mark.parametrize("copies", [None, 2])
def test_members_of_an_older_world_take_no_place_that_the_newest_state_needs(copies: int | None) -> None:
    """A frozen pair returns after each of two cells has lost a worker, at different places: what is left of both, on
    two nodes, has all of the newest state. If it has not, the older pair is as good as any."""
    shape, last = CellShape(1, 2, copies), world(5, "a0", "a1", "b0", "b1")
    frozen = [replace(worker(f"a{number}"), rank=number - 4, rank_in=3) for number in (6, 7)]
    members = [*frozen, worker("a0", last), worker("b1", last), worker("bn")]
    assert places_in(arrange(members, shape, last)) == {"a0": 0, "a7": 1, "bn": 0, "b1": 1}
    lacking = [member for member in members if member.id != "b1"]
    assert places_in(arrange(lacking, shape, last)) == {"a6": 0, "a7": 1}


def test_a_holder_of_the_newest_state_is_waited_for_though_an_older_world_had_its_place() -> None:
    last, shape = world(5, "a0", "b1"), CellShape(1, 2)
    frozen = [replace(worker(f"c{number}"), rank=number, rank_in=3) for number in range(2)]
    newest = [worker("a0", last), worker("b1", last)]
    assert is_a_part_left_behind(frozen, [*newest, *frozen], shape, last)
    assert not is_a_part_left_behind(frozen, [newest[0], *frozen], shape, last), "the other part is gone"


def test_who_left_the_newest_world_without_its_state_holds_that_of_an_older_one() -> None:
    """A node of two lost a worker, and in the world that followed, of which nobody got the state, another node took
    both parts. So the worker that is left alone on the first node still has the only copy of its part."""
    shape, last = CellShape(1, 2), world(6, "b2", "b3")
    alone = replace(worker("a1", after=6), rank=1, rank_in=5)
    newcomers = [worker("b2", after=6), worker("b3", after=6)]
    assert is_a_part_left_behind(newcomers, [alone, *newcomers], shape, last)
    restored = [replace(one, rank=number, rank_in=6) for number, one in enumerate(newcomers)]
    assert not is_a_part_left_behind(restored, [alone, *restored], shape, last)
    moved = replace(worker("a0", after=6), rank=1, rank_in=5)
    assert places_in(arrange([moved, newcomers[0]], shape, world(6, "a0", "b2"))) == {}
    assert places_in(arrange([moved, worker("a9", after=6)], shape, world(6, "a0", "a9"))) == {"a0": 1, "a9": 0}


def test_who_leads_depends_on_who_left_the_last_world_with_its_state() -> None:
    """A member had moved to a place that it never got. The other one is to seal, which only their terms tell it."""
    last = world(6, "a0", "a8", "a1", "a9")
    newcomers = (worker("a4"), worker("a5"))
    left = [replace(worker("a0", after=6), rank=1, rank_in=4), replace(worker("a1", after=6), rank=0, rank_in=5)]
    told, untold = View(9, (*left, *newcomers), last), View(9, (worker("a0"), worker("a1"), *newcomers), last, over=6)
    for view, leader in ((told, "a1"), (untold, "a0")):
        assert [name for name in ("a0", "a1", "a4", "a5") if decisions.leads(view, name, CELLS)] == [leader]
    assert decisions.decide(told, "a0", CELLS, 0.0) == Wait("leader")
    assert decisions.decide(untold, "a1", CELLS, 0.0, left=6) == Wait("members")


def test_who_has_dropped_its_state_takes_no_holders_place() -> None:
    """It moved to another part in a world that ended before it had that; a lone cell needs whoever has its old one."""
    last, shape = world(6, "a3", "a1", "a2", "a0"), CellShape(1, 2)
    holders = [replace(worker(name, after=6), rank=rank, rank_in=5) for name, rank in (("a1", 1), ("a2", 2))]
    moved = worker("a0", after=6)
    assert places_in(arrange([moved, *holders], shape, last)) == {"a2": 0, "a1": 1}
    still = replace(moved, rank=4, rank_in=5)
    assert places_in(arrange([still, *holders], shape, last)) == {"a0": 0, "a1": 1}


def test_a_member_without_a_cell_stands_by_until_a_worker_joins_it() -> None:
    """One cell continues; the first worker to join completes the other cell, and only then a new world forms."""
    two = world(1, "a0", "a1", "a2", "a3")
    left = [worker(name, two) for name in ("a0", "a1", "a3")]
    view = View(9, tuple(left), two)
    assert decisions.decide(view, "a0", CELLS, 0.0) == Seal(2, (Seat("a0", 1), Seat("a1", 1)), "lost")
    assert decisions.decide(view, "a3", CELLS, 0.0) == Wait("room")
    one = world(2, "a0", "a1")
    smaller = View(10, tuple(left), one)
    assert standing.num_waiting(smaller, "a0", one, CELLS) == 0
    assert decisions.decide(smaller, "a3", CELLS, 0.0) == Wait("room")
    joined = View(11, (*left, worker("a4")), one)
    assert standing.num_waiting(joined, "a0", one, CELLS) == 2
    assert decisions.decide(joined, "a4", CELLS, 0.0) == Wait("members")


def test_what_makes_no_cell_makes_no_world() -> None:
    """Workers of different nodes do not share a cell."""
    view = View(9, (worker("a0"), worker("b0")))
    assert decisions.decide(view, "a0", CELLS, 99.0) == Wait("nodes")


def test_a_world_has_no_more_cells_than_it_can_use() -> None:
    six = View(9, tuple(worker(name) for name in ("a0", "b0", "a1", "b1", "b2", "b3")))
    assert decisions.decide(six, "a0", CELLS, 99.0) == Seal(
        1, tuple(Seat(name, 1) for name in ("a0", "a1", "b0", "b1")), "start"
    )
    full = world(1, "b0", "b1", "b2", "b3")
    assert standing.num_waiting(View(9, six.members, full), "b0", full, CELLS) == 0, "who trains is not replaced"


def test_a_spare_node_takes_the_place_of_one_that_makes_no_cell_any_more() -> None:
    """It keeps the place: a node that is complete again is then the standby, even if it registered earlier."""
    two_nodes, last = Policy(1, 2, 0.0, max_members=4, cell=CellShape(1, 2)), world(1, "a0", "a1", "b0", "b1")
    left = [*(worker(name, last) for name in ("a0", "b0", "b1")), worker("c0"), worker("c1")]
    filled = (Seat("b0", 1), Seat("b1", 1), Seat("c0", 1), Seat("c1", 1))
    assert decisions.decide(View(9, tuple(left), last), "b0", two_nodes, 0.0) == Seal(2, filled, "lost")
    new = world(2, "b0", "b1", "c0", "c1")
    back = View(10, (*(worker(name, new) for name in ("a0", "b0", "b1", "c0", "c1")), worker("a2")), new)
    assert decisions.decide(back, "b0", two_nodes, 0.0) == Seal(3, filled, "restart")


@pytest.mark.parametrize(
    ("left", "copies", "is_waited_for"),
    [
        (("a1", "b0", "c0", "c1"), 2, True),
        (("a1", "b0", "c0", "c1"), 3, False),
        (("a1", "b0", "c0", "c1"), None, False),
        (("a1", "b1", "c0", "c1"), 2, False),
        (("a1", "b0", "b1", "c0", "c1"), 2, False),
        (("a1", "b0", "b1", "c0", "c1"), 1, False),
    ],
    ids=["a holder has no mate", "more copies", "whole parts", "both holders are gone", "one cell less", "no copy"],
)
def test_members_that_may_alone_hold_a_share_are_waited_for(
    left: tuple[str, ...], copies: int | None, is_waited_for: bool
) -> None:
    """Each of three nodes has a cell; two have lost a worker, at different places: what is left of both has no cell."""
    policy = Policy(1, 4, 0.0, max_members=6, cell=CellShape(1, 2, copies))
    last = world(1, "a0", "a1", "b0", "b1", "c0", "c1")
    view = View(9, tuple(worker(name, last) for name in left), last)
    leader = "c0" if "b1" not in left or "b0" not in left else "b0"
    found = decisions.decide(view, leader, policy, 1.0)
    assert found == Wait("holder", 29.0) if is_waited_for else isinstance(found, Seal)


@pytest.mark.parametrize(
    ("dead", "chosen", "copies", "is_waited_for"),
    [
        ("a0 b2", "c", 2, True),
        ("a0 b2", "c", 3, False),
        ("a0 b2", "c", None, False),
        ("a0 b0", "c", 2, False),
        ("a0", "bc", 2, False),
        ("a0", "bc", 1, False),
        ("c0 c1 c2 c3", "a", 2, True),
    ],
    ids=[
        "of two cells",
        "a third copy",
        "whole parts",
        "both may be gone",
        "all in other cells",
        "no copy",
        "the last cell is gone",
    ],
)
def test_neighbours_with_shares_of_one_part_count_by_their_cells(
    dead: str, chosen: str, copies: int | None, is_waited_for: bool
) -> None:
    """Copies are in different cells: dropping a cell drops one copy of each shard, though two members hold shards."""
    shape, names = CellShape(2, 2, copies, alike=2), [f"{cell}{place}" for cell in "abc" for place in range(4)]
    last = world(1, *names)
    left = [worker(name, last) for name in names if name not in dead.split()]
    trained = [one for one in left if one.id[0] in chosen]
    assert is_a_part_left_behind(trained, left, shape, last) == is_waited_for


@pytest.mark.parametrize(
    ("stages", "names", "left", "new"),
    [
        (1, ("a0", "a1", "b0", "b1"), ("a0", "b1"), "an"),
        (2, ("a0", "a1", "b2", "b3", "c0", "c1", "d2", "d3"), ("a0", "a1", "b2", "d3"), "bn"),
    ],
)
@pytest.mark.parametrize("alike", [1, 2])
def test_nobody_is_waited_for_who_holds_what_a_neighbour_does(
    stages: int, names: tuple[str, ...], left: tuple[str, ...], new: str, alike: int
) -> None:
    """A cell with every place filled would wait for another's mate only if places held different parts."""
    shape, last = CellShape(stages, 2, alike=alike), world(1, *names)
    members = [worker(name, last) for name in (*left, new)]
    leader = arrange(members, shape, last).members[0].id
    found = decisions.decide(View(9, tuple(members), last), leader, Policy(1, 4, 0.0, cell=shape), 1.0)
    assert isinstance(found, Seal) if alike == 2 else found == Wait("holder", 29.0)


@pytest.mark.parametrize("lost", [0, 1])
def test_members_of_one_node_meet_in_whole_cells(store: MemoryStore, pool: ThreadPoolExecutor, lost: int) -> None:
    """Three workers make one cell and a standby, which replaces the worker that leaves."""
    nodes = [_make_worker(store) for _ in range(3)]
    for node in nodes:
        node.join(PATIENCE_S)
    first = nodes[:2]
    worlds = [future.result() for future in [pool.submit(_enter, node) for node in first]]
    assert worlds[0] == worlds[1] and [seat.member for seat in worlds[0].seats] == [node.id for node in first]
    waiting = pool.submit(_enter, nodes[2])
    first[lost].leave()
    survivor = first[1 - lost]
    survivor.join(PATIENCE_S)
    second = _enter(survivor)
    assert waiting.result() == second
    assert second.seats[1 - lost].member == survivor.id and second.seats[lost].member == nodes[2].id
    for node in nodes:
        node.leave()


def _make_worker(store: MemoryStore) -> Participant:
    place = Place("host", "127.0.0.1", 1, node="a", node_members=3)
    return Participant(store, "job", CELLS, place, ttl_s=3.0)


def _enter(node: Participant) -> World:
    found = node.next_world(lambda seal: ("127.0.0.1", 1), PATIENCE_S)
    assert found is not None
    node.note_state(is_there=True)
    return found


def test_a_world_waits_for_whoever_alone_may_hold_a_part() -> None:
    """A second fault hits a cell before it has taken a step: its place 1 survives, and place 0 on another node.

    A cell of the other node would have to start from the newest commit. So the node with place 1 gets time to start a
    worker; a member that is not needed is not waited for.
    """
    last = world(2, "a0", "a1")
    b0, a1, new_b = worker("b0"), worker("a1", last), worker("bn")
    alone = View(1, (b0, a1, new_b), last)
    found = decisions.decide(alone, "b0", CELLS, 1.0)
    assert found == Wait("holder", 29.0)
    assert isinstance(decisions.decide(alone, "b0", CELLS, 30.0), Seal), "its node may have lost a device for good"
    whole = View(1, (b0, a1, new_b, worker("an")), last)
    found = decisions.decide(whole, "b0", CELLS, 1.0)
    assert isinstance(found, Seal) and {seat.member for seat in found.seats} == {"a1", "an", "b0", "bn"}
    both = world(2, "a0", "a1", "b0", "b1")
    other = View(1, tuple(worker(name, both) for name in ("b0", "a1", "b1")), both)
    assert isinstance(decisions.decide(other, "b0", CELLS, 0.0), Seal), "b1 has place 1, too"
