"""Seats of cells: one for all ranks of a cell, with copies in different domains at each place, and few moves."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.placement.arcs import Path, length, overlap, paths_of_cells
from elastic_train.placement.seats import Seat, seats_of, seats_of_cells

nodes = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def named(*names: str) -> list[Path]:
    return [("", name) for name in names]


def test_a_cell_is_in_a_domain_of_every_width() -> None:
    """Cells 0 and 1 share a rack at one place, 1 and 2 a node at the other: names are first cells, linked in turn."""
    places = [[("a", "a0"), ("b", "b0")], [("a", "a1"), ("c", "c0")], [("d", "d0"), ("c", "c0")], [("e", "e0")] * 2]
    assert paths_of_cells(places) == [("0", "0"), ("0", "1"), ("0", "1"), ("3", "3")]


@given(nodes, st.integers(1, 3))
def test_cells_of_one_rank_have_the_seats_of_ranks(of_ranks: list[int], copies: int) -> None:
    paths = [(f"rack{node // 2}", f"node{node}") for node in of_ranks]
    seats = seats_of_cells(
        paths_of_cells([[path] for path in paths]), copies, [[None] * len(paths)], [True] * len(paths)
    )
    assert seats == seats_of(paths, copies)


@given(nodes, nodes)
def test_cells_are_apart_if_their_ranks_of_every_place_are(first: list[int], second: list[int]) -> None:
    """Two cells share a domain if they, directly or through other cells, share one at some place."""
    cells = [named(f"node{one}", f"node{other}") for one, other in zip(first, second, strict=False)]
    paths = paths_of_cells(cells)
    for one, cell in enumerate(cells):
        for other, theirs in enumerate(cells[:one]):
            if any(mine == his for mine, his in zip(cell, theirs, strict=True)):
                assert paths[one] == paths[other]
    apart = [
        number
        for number, cell in enumerate(cells)
        if not any(_meets(cell, theirs) for theirs in _others(cells, number))
    ]
    assert len({paths[number] for number in apart}) == len(apart)


def _meets(cell: list[Path], other: list[Path]) -> bool:
    return any(mine == theirs for mine, theirs in zip(cell, other, strict=True))


def _others(cells: list[list[Path]], number: int) -> list[list[Path]]:
    return cells[:number] + cells[number + 1 :]


def test_stages_of_one_node_each_have_copies_on_different_nodes() -> None:
    """The second stages of two cells share a node, so these cells form one group, and others have the copies."""
    cells = [named("a", "x"), named("b", "x"), named("c", "y"), named("d", "y")]
    seats = seats_of_cells(paths_of_cells(cells), 2, [[None] * 4] * 2, [True] * 4)
    groups = [seat.group for seat in seats]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_a_newcomer_takes_the_seat_of_its_cell() -> None:
    """This holds at any place; no other rank moves anything."""
    paths = named("a", "b", "c", "d")
    had = seats_of(paths, 2)
    with_gaps = [[None, *had[1:]], [*had[:2], None, had[3]], had]
    assert seats_of_cells(paths, 2, with_gaps, [True] * 4) == had


def test_a_cell_of_two_others_ranks_takes_what_moves_least() -> None:
    """Three places of its ranks held one shard, and one place another."""
    had = seats_of(named("a", "b", "c"), 1)
    mixed, kept = [had[0], had[2]], [had[0], had[1]]
    seats = seats_of_cells(named("a", "b"), 1, [mixed, kept, kept, kept], [True] * 2)
    assert moved(seats, kept) == Fraction(1, 3) < moved(seats, mixed)
    assert seats == seats_of_cells(named("a", "b"), 1, [kept, mixed, kept, kept], [True] * 2)


def moved(seats: list[Seat], had: list[Seat]) -> Fraction:
    """Return the fraction of the circle that ranks receive."""
    pairs = zip(seats, had, strict=True)
    return sum((length(seat.arcs) - overlap(seat.arcs, old.arcs) for seat, old in pairs), Fraction(0))
