"""The placement table (ranks with equal weights, reporting ranks) agrees with a search over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.mesh import Cell
from elastic_train.placement.grains import Listed, cut_along, lay_out
from elastic_train.placement.holdings import Column, column_of
from elastic_train.placement.seats import seats_of, seats_of_holders
from elastic_train.placement.table import Parts, Table

WIDE, TALL = (600, 400), (64, 3000)
CUT = {name: cut_along(shape, 0) for name, shape in {"wide": WIDE, "tall": TALL}.items()}


def parts_of(degree: int, *, in_shares: bool) -> Parts:
    """Return a model with two tensors cut in `degree` parts, a whole one, and one that is not saved."""
    whole = [
        Listed("wide", WIDE, "torch.float32", cut=CUT["wide"]),
        Listed("norm", (7,), "torch.float32"),
        Listed("tall", TALL, "torch.float32", cut=CUT["tall"]),
        Listed("base", (70_000,), "torch.float32", group=None),
    ]

    def part(number: int) -> list[Listed]:
        found = []
        for one in whole:
            rows = one.shape[0] // degree
            cut = None if one.cut is None else one.cut.part(number * rows, (number + 1) * rows)
            shape = one.shape if cut is None else (rows, *one.shape[1:])
            found.append(Listed(one.name, shape, one.dtype, group=one.group, cut=cut))
        return found

    layouts = [lay_out(part(number)) for number in range(degree)]
    columns = [column_of(one) if in_shares else Column(one) for one in layouts]
    numels = {"wide": WIDE[0] * WIDE[1], "tall": TALL[0] * TALL[1]}
    starts = {name: [numel // degree * number for number in range(degree)] for name, numel in numels.items()}
    return Parts(lay_out(whole), columns, starts, {"wide", "norm", "tall"})


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Draw a world of one to six replicas of one, two or four tensor ranks, replicated or sharded."""
    degree, replicas = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 6))
    in_shares, copies = draw(st.booleans()), draw(st.integers(1, 3))
    seats = seats_of([(f"node-{number}",) for number in range(replicas)], copies) if in_shares else ()
    shares_weights = in_shares and draw(st.booleans())
    return Table(
        parts_of(degree, in_shares=in_shares),
        seats,
        draw(st.integers(0, degree * replicas - 1)),
        degree * replicas,
        Cell(tensor=degree),
        shares_weights,
    )


def numbers_of(table: Table) -> list[set[int]]:
    """Return the grains of the model whose weights each rank has."""
    return [
        set(table.parts.numbers[table.cell.holder_of(rank)[0]][grains].tolist())
        for rank, grains in enumerate(table.weights)
    ]


@given(tables())
def test_grains_are_in_one_set_if_the_same_ranks_share_them(table: Table) -> None:
    common, has = table.weights_in_common, numbers_of(table)
    saved = np.flatnonzero(table.parts.is_saved).tolist()
    holders = {number: [rank for rank, numbers in enumerate(has) if number in numbers] for number in saved}
    holders[table.parts.layout.num_grains] = list(range(table.size))  # the buffers
    holders = {number: ranks for number, ranks in holders.items() if len(ranks) > 1}
    assert {number: list(common.ranks[common.set_of[number]]) for number in holders} == holders
    assert len(common.ranks) == len({tuple(ranks) for ranks in holders.values()})
    assert all((common.set_of[number] == -1) == (number not in holders) for number in range(len(common.set_of)))
    of_rank = [{one for one, ranks in enumerate(common.ranks) if rank in ranks} for rank in range(table.size)]
    assert [set(sets.tolist()) for sets in common.of_rank] == of_rank


@given(tables())
def test_each_grain_has_one_rank_that_speaks_for_it_and_has_it(table: Table) -> None:
    has = numbers_of(table)
    owned = [set(numbers.tolist()) for numbers in table.weights_owned()]
    assert all(mine <= held for mine, held in zip(owned, has, strict=True))
    assert sorted(number for mine in owned for number in mine) == list(range(table.parts.layout.num_grains))


@given(tables(), st.data())
def test_a_rank_is_missed_if_it_alone_has_a_grain(table: Table, data: st.DataObject) -> None:
    leaving = data.draw(st.lists(st.booleans(), min_size=table.size, max_size=table.size))
    assert table.would_lose_state(leaving) == is_missed(table, leaving)


def is_missed(table: Table, leaving: Sequence[bool]) -> bool:
    """Return True if the ranks that leave take the last copy of a part or of a grain."""
    for part, ranks in enumerate(table.ranks):
        stay = [number for number, rank in enumerate(ranks) if not leaving[rank]]
        held = range(len(ranks)) if table.is_whole else table.seating(part).holdings
        left = {0} if table.is_whole and stay else {g for number in stay for g in held[number].tolist()}  # type: ignore[attr-defined]
        if not stay or (not table.is_whole and len(left) < table.parts.columns[part].layout.num_grains):
            return True
    return False


@given(tables(), st.data())
def test_a_rank_holds_everything_if_its_grains_are_all_and_nothing_if_it_may_not_hold(
    table: Table, data: st.DataObject
) -> None:
    """A rank with arcs in which no grain begins counts as a holder."""
    paths = [(f"node-{number}",) for number in range(len(table.seats))]
    may_hold = [number == 0 or data.draw(st.booleans()) for number in range(len(paths))]
    if table.seats:
        table = replace(table, seats=seats_of_holders(paths, 2, (), may_hold))
    part, number = table.cell.holder_of(table.rank)
    held = None if table.is_whole else table.seating(part).holdings[number]
    is_all = held is None or len(held) == table.parts.columns[part].layout.num_grains
    assert table.holds_all is (is_all and table.cell.size == 1)
    assert table.holds_nothing is (held is not None and not may_hold[number])
    assert held is None or not table.holds_nothing or not len(held)


@given(tables())
def test_what_parts_have_measured_counts_once(table: Table) -> None:
    """This includes grains of the tensor that is whole in every part."""
    parts = table.parts
    squares = np.arange(1.0, parts.layout.num_grains + 1)
    rows = np.zeros((table.size, parts.layout.num_grains))
    for part, of_part in enumerate(table.updated):
        for rank, grains in of_part:
            rows[rank, : grains.size] = squares[parts.numbers[part][grains]]
    assert parts.squares_of(rows, table.updated).tolist() == squares[parts.layout.trained].tolist()


def test_a_replicas_ranks_are_consecutive() -> None:
    parts = parts_of(2, in_shares=False)
    assert [Table(parts, rank=rank, size=6, cell=Cell(tensor=2)).place for rank in range(6)] == [0, 1] * 3


def test_the_first_and_the_last_stage_give_each_other_the_gradients_of_tied_weights() -> None:
    """Both stages have a tensor, each in two halves: ranks with the same half do. The first stage alone has another."""

    def half(name: str, shape: tuple[int, int], number: int) -> Listed:
        cut, rows = CUT[name], shape[0] // 2
        assert cut is not None
        return Listed(name, (rows, shape[1]), "torch.float32", cut=cut.part(number * rows, (number + 1) * rows))

    shapes, none = {"wide": WIDE, "tall": TALL}, Listed("tall", (0, 3000), "torch.float32")
    whole = lay_out([Listed(name, shape, "torch.float32", cut=CUT[name]) for name, shape in shapes.items()])
    first = [lay_out([half(name, shape, number) for name, shape in shapes.items()]) for number in range(2)]
    last = [lay_out([half("wide", WIDE, number), none]) for number in range(2)]
    starts = {name: [0, shape[0] * shape[1] // 2] * 2 for name, shape in shapes.items()}
    parts = Parts(whole, [*map(Column, (*first, *last))], starts, {*shapes})
    table = Table(parts, size=4, cell=Cell(stage=2, tensor=2))
    upper, lower = (grains.tolist() for grains in np.split(np.array(whole.tensors[0].grains), 2))
    exchanged = sorted((one.giver, one.taker, one.grains.tolist()) for one in table.ties)
    assert exchanged == [(0, 2, upper), (1, 3, lower), (2, 0, upper), (3, 1, lower)]
