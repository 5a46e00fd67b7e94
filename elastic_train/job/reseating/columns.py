"""Seats in columns: a cell has one seat, which each of its ranks takes in the column of its part.

So the ranks of a cell compute the same lanes where these are dealt by seats, and each knows who holds what in all
columns. Where several ranks of a cell hold the same part, each of some tokens, those with the same tokens have a seat.
Columns move what they hold among themselves; what step they come to, all of them have decided together. Where
no cells hold the state all ranks are one column.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.core.arrays import Int64s
from elastic_train.job.cells.seated_cell import SeatedCellState
from elastic_train.job.reseating.brought import Brought, by_column
from elastic_train.job.reseating.taking import is_first, reseat, take_first_seats
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.shards.domains import paths_of_cells
from elastic_train.shards.seats import Seat, seats_of_cells

Shards = HeldState | SeatedCellState


def reseat_columns(column: Group, state: AppliedState, shards: Shards, brought: Sequence[Brought]) -> Int64s:
    """Bring this rank to the furthest step, on its seat; see `reseat`. `brought` is of all ranks of the world."""
    if isinstance(shards, HeldState):
        return reseat(column, state, shards, brought)
    furthest = None if is_first(shards.share, brought) else max(one.place for one in brought)
    seats = _seats_at(shards, brought, furthest)
    lost = reseat(column, state, shards.share, by_column(shards, brought)[shards.part], seats)
    if not lost.size:
        shards.know(seats)
    return lost


def take_first_columns(column: Group, shards: Shards, brought: Sequence[Brought]) -> None:
    """Take the seats of a world that begins with a commit."""
    if isinstance(shards, HeldState):
        take_first_seats(column, shards, brought)
        return
    seats = _seats_at(shards, brought, None)
    take_first_seats(column, shards.share, by_column(shards, brought)[shards.part], seats)
    shards.know(seats)


def _seats_at(shards: SeatedCellState, brought: Sequence[Brought], furthest: Place | None) -> list[Seat]:
    """Return every cell's seat; those that ranks bring count at the furthest step, and none do without it.

    A cell holds nothing if one of its ranks may not, unless no other cell can. Where it has several seats it is a
    domain of its own, the narrowest one: it is given up as a whole if it loses a rank.
    """
    columns, context = by_column(shards, brought), shards.cell.context
    seated = list(zip(*columns, strict=True))
    able = [all(one.may_hold for one in ranks) for ranks in seated]
    before = [[one.seat if one.place == furthest else None for one in of_column] for of_column in columns]
    paths = paths_of_cells([[one.path for one in ranks] for ranks in seated])
    if context > 1:
        paths = [(*path, str(number // context)) for number, path in enumerate(paths)]
    return seats_of_cells(paths, shards.share.copies, before, able if any(able) else [True] * len(seated))
