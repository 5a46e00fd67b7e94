"""Seats in columns: each rank takes its own in the column of its place, and knows those of all others.

Where no cells hold the state all ranks are one column. Columns move what they hold among themselves; what step they
come to, all of them have decided together.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.core.arrays import Int64s
from elastic_train.job.cells.seated_cell import SeatedCellState
from elastic_train.job.reseating.brought import Brought
from elastic_train.job.reseating.taking import is_first, reseat, seats_at, take_first_seats
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group

Shards = HeldState | SeatedCellState


def reseat_columns(column: Group, state: AppliedState, shards: Shards, brought: Sequence[Brought]) -> Int64s:
    """Bring this rank to the furthest step, on its seat; see `reseat`. `brought` is of all ranks of the world."""
    if isinstance(shards, HeldState):
        return reseat(column, state, shards, brought)
    counts = not is_first(shards.share, brought)
    lost = reseat(column, state, shards.share, _of_place(shards, brought))
    if not lost.size:
        _know_all(shards, brought, counts=counts)
    return lost


def take_first_columns(column: Group, shards: Shards, brought: Sequence[Brought]) -> None:
    """Take the seats of a world that begins with a commit."""
    if isinstance(shards, HeldState):
        take_first_seats(column, shards, brought)
        return
    take_first_seats(column, shards.share, _of_place(shards, brought))
    _know_all(shards, brought, counts=False)


def _of_place(shards: SeatedCellState, brought: Sequence[Brought]) -> Sequence[Brought]:
    """Return what the ranks of this one's place bring, by cell."""
    assert shards.mesh is not None, "a world has given this rank a place"
    return brought[shards.mesh.place :: len(shards.columns)]


def _know_all(shards: SeatedCellState, brought: Sequence[Brought], *, counts: bool) -> None:
    """Work out the seats of all columns, as the ranks of each do; what is brought counts unless nothing does."""
    furthest, size = max(one.place for one in brought) if counts else None, len(shards.columns)
    shards.know([seats_at(brought[place::size], shards.share.copies, furthest) for place in range(size)])
