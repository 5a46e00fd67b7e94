"""Seats: groups of ranks over failure domains, such that copies are in different domains if possible."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.placement.arcs import Path, length, overlap
from elastic_train.placement.holdings import all_held, circle_of
from elastic_train.placement.seats import Seat, lanes_by_owner, seats_of, seats_of_holders
from tests.elastic_train.placement.laws import blocks, check_apart, check_balance, check_partition, check_survives

LAYOUT = blocks(3, 41)
CIRCLE = circle_of(LAYOUT)

racks = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5)
"""The ranks of every node, by rack."""


def paths_of(nodes: list[list[int]]) -> list[Path]:
    return [
        (f"rack{r}", f"node{n}") for r, rack in enumerate(nodes) for n, size in enumerate(rack) for _ in range(size)
    ]


@given(racks, st.integers(1, 4), st.randoms(use_true_random=False))
def test_copies_are_in_as_many_domains_as_there_are(nodes: list[list[int]], copies: int, draw: random.Random) -> None:
    """This holds for racks, nodes in a rack, and ranks in a node, whatever the order of the ranks."""
    paths = paths_of(nodes)
    draw.shuffle(paths)
    seats = seats_of(paths, copies)
    holdings = all_held(CIRCLE, seats)
    check_partition(seats, holdings, LAYOUT.num_grains, copies)
    check_apart(paths, holdings, LAYOUT.num_grains)


@given(racks, st.integers(1, 4))
def test_one_domain_less_than_copies_may_be_lost(nodes: list[list[int]], copies: int) -> None:
    """With enough racks, any copies - 1 of them may be lost, including their nodes and ranks."""
    paths = paths_of(nodes)
    names = sorted({path[0] for path in paths})
    if len(names) < copies:
        return
    holdings = all_held(CIRCLE, seats_of(paths, copies))
    for lost in itertools.combinations(names, copies - 1):
        check_survives(paths, holdings, LAYOUT.num_grains, lost)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 8))
def test_groups_are_even_where_no_domain_is_too_long(num_nodes: int, copies: int, ranks_each: int) -> None:
    """With at least `copies` nodes of one size, groups differ by one rank, even if a node is split between them."""
    num_nodes = max(num_nodes, copies)
    seats = seats_of([(f"node{n}",) for n in range(num_nodes) for _ in range(ranks_each)], copies)
    sizes = {seat.size for seat in seats}
    assert max(sizes) - min(sizes) <= 1


def test_one_rank_is_the_replicated_case() -> None:
    """Whatever `copies` says, it is one group of one slot, which holds everything."""
    assert [seat.arcs for seat in seats_of([("node",)], 3)] == [((0, 1),)]


def test_as_many_copies_as_ranks_is_the_replicated_case() -> None:
    assert {(seat.slot, seat.size) for seat in seats_of([("a",), ("b",), ("c",)], 5)} == {(0, 1)}


def test_a_rack_longer_than_half_becomes_a_group() -> None:
    """Even groups would put both copies of a quarter of the grains into the long rack."""
    seats = seats_of([("long",)] * 5 + [("short",)] * 3, 2)
    assert [seat.group for seat in seats] == [0] * 5 + [1] * 3


def test_with_fewer_racks_than_copies_the_longer_one_gets_more_groups() -> None:
    seats = seats_of([("long", f"n{i}") for i in range(4)] + [("short", f"n{i}") for i in range(2)], 3)
    assert [seat.group for seat in seats] == [0, 0, 1, 1, 2, 2]


def test_without_labels_ranks_are_their_own_domains() -> None:
    assert [seat[:3] for seat in seats_of([()] * 5, 2)] == [(0, 0, 2), (0, 1, 2), (1, 0, 3), (1, 1, 3), (1, 2, 3)]


def test_neighbours_in_rank_need_not_be_neighbours_in_the_line() -> None:
    """Ranks that alternate between two nodes are sorted by node."""
    seats = seats_of([("a",), ("b",), ("a",), ("b",)], 2)
    assert [(seat.group, seat.slot) for seat in seats] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@given(racks, st.integers(1, 4), st.data())
def test_a_domain_that_replaces_one_of_its_size_moves_nobody_else(
    nodes: list[list[int]], copies: int, data: st.DataObject
) -> None:
    """The newcomers have the last ranks, and take the free places."""
    paths = paths_of(nodes)
    before = seats_of(paths, copies)
    gone = data.draw(st.sampled_from(sorted(set(paths))))
    stay = [rank for rank, path in enumerate(paths) if path != gone]
    new = [(gone[0], "new")] * (len(paths) - len(stay))
    had = [before[rank] for rank in stay] + [None] * len(new)
    after = seats_of([paths[rank] for rank in stay] + new, copies, had)
    assert after[: len(stay)] == [before[rank] for rank in stay]


@given(racks, st.integers(1, 4))
def test_nothing_moves_where_nothing_has_changed(nodes: list[list[int]], copies: int) -> None:
    paths = paths_of(nodes)
    seats = seats_of(paths, copies)
    assert seats_of(paths, copies, seats) == seats


@pytest.mark.parametrize(("paths", "copies"), [([], 1), ([()], 0)])
def test_a_world_without_ranks_or_copies_is_refused(paths: list[Path], copies: int) -> None:
    with pytest.raises(AssertionError):
        seats_of(paths, copies)


def moved(before: list[Seat | None], after: list[Seat]) -> Fraction:
    """Return the amount that ranks receive, as a fraction of the whole."""
    pairs = zip(before, after, strict=True)
    return sum((length(new.arcs) - overlap(new.arcs, old.arcs if old else ()) for old, new in pairs), Fraction(0))


@pytest.mark.heavy
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("size", range(4, 25))
def test_a_lost_rank_moves_half_as_much_again_as_it_held_at_most(size: int, copies: int) -> None:
    """Each rank is a separate node. If groups stay the same, only its shard moves, within its group."""
    before = seats_of([()] * size, copies)
    for lost in range(size):
        had = [seat for rank, seat in enumerate(before) if rank != lost]
        after = seats_of([()] * (size - 1), copies, had)
        share = length(before[lost].arcs)
        assert moved(list(had), after) <= share * 3 / 2
        if all(old.group == new.group for old, new in zip(had, after, strict=True)):
            assert moved(list(had), after) == share
            others = [rank for rank, seat in enumerate(had) if seat.group != before[lost].group]
            assert all(had[rank].arcs == after[rank].arcs for rank in others)


@pytest.mark.parametrize(
    ("num_nodes", "copies", "worst"),
    [(16, 2, 1), (16, 3, Fraction(64, 63)), (8, 2, 1), (8, 3, Fraction(68, 9)), (4, 2, Fraction(15, 4))],
)
def test_what_a_lost_node_moves(num_nodes: int, copies: int, worst: Fraction | int) -> None:
    """Nodes of eight ranks; amounts are fractions of the node's holdings.

    With four nodes, groups are cut again: kept ones would have 8 and 16 ranks, new ones have 12 each.
    """
    paths: list[Path] = [(f"node{rank // 8:02}",) for rank in range(8 * num_nodes)]
    before = seats_of(paths, copies)
    parts = []
    for lost in range(num_nodes):
        stay = [rank for rank in range(len(paths)) if rank // 8 != lost]
        had = [before[rank] for rank in stay]
        parts.append(
            moved(list(had), seats_of([paths[rank] for rank in stay], copies, had)) / Fraction(copies, num_nodes)
        )
    assert max(parts) == worst


@pytest.mark.heavy
@pytest.mark.parametrize("num_nodes", [3, 5, 7])
@pytest.mark.parametrize("each", [4, 8])
@pytest.mark.parametrize("is_rack", [False, True])
def test_where_two_groups_share_a_domain_twice_what_a_lost_rank_held_moves_at_most(
    num_nodes: int, each: int, *, is_rack: bool
) -> None:
    """The domain's ranks hold different shards in each group, and may not take over shards that they have a copy of.

    A rank that joins the domain gets its share, and nothing else moves.
    """
    size = num_nodes * each
    paths: list[Path] = [(f"{rank // each}", f"{rank // 2}" if is_rack else "") for rank in range(size)]
    before = seats_of(paths, 2)
    for lost in range(size):
        stay = [rank for rank in range(size) if rank != lost]
        had, left = [before[rank] for rank in stay], [paths[rank] for rank in stay]
        after = seats_of(left, 2, had)
        assert moved(list(had), after) < 2 * length(before[lost].arcs)
        check_apart(left, all_held(CIRCLE, after), LAYOUT.num_grains)
    had = [*seats_of(paths[:-1], 2), None]
    after = seats_of(paths, 2, had)
    assert moved(had, after) == length(after[-1].arcs)
    check_apart(paths, all_held(CIRCLE, after), LAYOUT.num_grains)


@pytest.mark.heavy
@pytest.mark.parametrize(("num_nodes", "each", "copies"), [(9, 1, 2), (9, 1, 3), (4, 3, 2), (8, 2, 2)])
def test_a_long_life_keeps_every_law(num_nodes: int, each: int, copies: int) -> None:
    """Nodes leave and join a hundred times: each group always holds everything once, with copies in different domains.

    In total, at most three times as much moves as was lost and as newcomers must receive.
    """
    draw = random.Random(num_nodes)
    paths: list[Path] = [(f"node{number}",) for number in range(num_nodes) for _ in range(each)]
    seats = seats_of(paths, copies)
    total, least = Fraction(0), Fraction(0)
    for turn in range(100):
        nodes = sorted(set(paths))
        had: list[Seat | None] = list(seats)
        if draw.random() < len(nodes) / (2 * num_nodes) and len(nodes) > copies:
            gone = draw.choice(nodes)
            least += sum((length(s.arcs) for s, path in zip(seats, paths, strict=True) if path == gone), Fraction(0))
            had = [seat for seat, path in zip(had, paths, strict=True) if path != gone]
            paths = [path for path in paths if path != gone]
        else:
            had += [None] * each
            paths = paths + [(f"new{turn}",)] * each
            least += Fraction(copies * each, len(paths))
        seats = seats_of(paths, copies, had)
        total += moved(had, seats)
        holdings = all_held(CIRCLE, seats)
        check_partition(seats, holdings, LAYOUT.num_grains, copies)
        check_balance(CIRCLE, LAYOUT, seats, holdings)
        check_apart(paths, holdings, LAYOUT.num_grains)
        assert max(seat.size for seat in seats) - min(seat.size for seat in seats) <= max(each, len(paths) // 5)
    assert total <= 3 * least


@given(racks, st.integers(1, 4), st.data())
def test_who_is_to_hold_nothing_has_a_seat_without_an_arc(
    nodes: list[list[int]], copies: int, data: st.DataObject
) -> None:
    """The others share all of it, as they would without it, and a rank that may hold again counts as a newcomer.

    It computes lanes like the others of its group: every lane belongs to one rank.
    """
    paths = paths_of(nodes)
    may = [True, *data.draw(st.lists(st.booleans(), min_size=len(paths) - 1, max_size=len(paths) - 1))]
    seats = seats_of_holders(paths, copies, [None] * len(paths), may)
    holders = [rank for rank, is_one in enumerate(may) if is_one]
    held = [seats[rank] for rank in holders]
    alone = seats_of([paths[rank] for rank in holders], copies)
    assert [seat._replace(size=0, place=0) for seat in held] == [seat._replace(size=0, place=0) for seat in alone]
    check_partition(alone, all_held(CIRCLE, alone), LAYOUT.num_grains, copies)
    assert sorted(seat.place for seat in seats) == list(range(len(seats)))
    groups = {seats[rank].group for rank in holders}
    others = [seat for rank, seat in enumerate(seats) if rank not in holders]
    assert all(not seat.arcs and seat.base is None and seat.group in groups for seat in others)
    num_lanes = 3 * len(paths) + 1
    lanes = [lane for owned in lanes_by_owner(seats, num_lanes) for lane in owned]
    assert sorted(lanes) == list(range(num_lanes))
    assert all(len({seat.slot for seat in seats if seat.group == one.group}) == one.size for one in seats)
    again = seats_of_holders(paths, copies, seats, [True] * len(paths))
    check_partition(again, all_held(CIRCLE, again), LAYOUT.num_grains, copies)
