"""The state that each rank has when it enters a world, gathered on all ranks.

Ranks that hold the same part of the state in all cells are a *column* (shard group); without cells, all ranks are one
column. A column holds its part whole or in shards. A step is complete if every column holds all of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from elastic_train.core.mesh import ranks_by_part
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.placement.arcs import Arc
from elastic_train.placement.domains import Path
from elastic_train.placement.seats import Seat
from elastic_train.placement.table import Table


@dataclass(frozen=True, slots=True)
class PeerState:
    """A rank's progress when it enters a world, and its seat, None if it holds no shard.

    `pending` is the term of a pending step, 0 for none; `trained_in` is the last world it trained in; `norm` is the
    gradient norm of its last applied step. A rank that cannot write commits gets no shard (`may_hold`), because a shard
    whose holders all cannot write would be in no commit. `retained` are the arcs it holds besides its seat.
    """

    place: Place
    seat: Seat | None
    path: Path
    pending: int = 0
    trained_in: int = 0
    norm: float = 0.0
    may_hold: bool = True
    retained: tuple[Arc, ...] = ()

    def without_state(self) -> PeerState:
        """Return the same rank without its state."""
        return replace(self, place=Place(0, 0), seat=None, pending=0, retained=())


def gather_peer_states(group: Group, state: AppliedState, path: Path, *, may_hold: bool = True) -> list[PeerState]:
    """Return every rank's state, by rank.

    If no rank of a column can write commits, all of them may hold shards; rank 0 always may.
    """
    pending = state.pending.facts.term if state.pending is not None else 0
    may_hold = may_hold or group.rank == 0
    shards, table = state.shards, state.shards.table
    retained = _encoded_arcs(shards.share.retained.arcs)
    seat, norm = _encoded(table.seat), state.reached.norm
    mine = [*state.place, seat, list(path), pending, shards.trained_in, norm, may_hold, retained]
    brought = _read(group.all_gather_objects(mine))
    parts = [table.cell.holder_of(rank)[0] for rank in range(len(brought))]
    able = {parts[rank] for rank, one in enumerate(brought) if one.may_hold}
    if len(able) == table.cell.num_parts:
        return brought
    return [one if part in able else replace(one, may_hold=True) for part, one in zip(parts, brought, strict=True)]


def by_column(table: Table, brought: Sequence[PeerState]) -> list[list[PeerState]]:
    """Return the states of each column's ranks."""
    return [[brought[rank] for rank in ranks] for ranks in ranks_by_part(len(brought), table.cell)]


def _read(told: Sequence[Sequence[Any]]) -> list[PeerState]:
    """Decode the gathered states."""
    return [
        PeerState(Place(step, term), _decoded(seat), tuple(path), pending, trained_in, norm, may, _arcs(retained))
        for step, term, seat, path, pending, trained_in, norm, may, retained in told
    ]


def leave_out_unfinished(table: Table, brought: Sequence[PeerState]) -> tuple[list[PeerState], int]:
    """Discard the states of ranks ahead of the last complete step; return the states and the number of lost shards.

    A rank that was away while its peers' shards were lost may return with a later step than they can restore; its state
    is useless. The number of lost shards is that of the newest world's last step, 0 if that step is continued. If no
    step is complete, all states are discarded.
    """
    places = sorted({one.place for one in brought if one.place.step}, reverse=True)
    missing = {place: _num_missing(table, brought, place) for place in places}
    whole = next((place for place in places if not missing[place]), Place(0, 0))
    newest = max(places, key=lambda place: (place.term, place.step), default=whole)
    kept = [one if one.place <= whole else one.without_state() for one in brought]
    return kept, missing[newest] if newest > whole else 0


def comes_to(one: PeerState) -> Place:
    """Return a rank's place after it has applied its pending step."""
    return Place(one.place.step + 1, one.pending)


def _num_missing(table: Table, brought: Sequence[PeerState], place: Place) -> int:
    """Return the number of grains that no rank of their column holds at a place, or can reach by its pending step.

    A column without ranks at that place counts as missing at least one.
    """
    missing = 0
    for column, of_column in zip(table.parts.columns, by_column(table, brought), strict=True):
        there = [one for one in of_column if place in (one.place, comes_to(one) if one.pending else None)]
        missing += max(column.missing(map(all_arcs_of, there)), 0 if there else 1)
    return missing


def all_arcs_of(one: PeerState) -> tuple[Arc, ...]:
    """Return all arcs that a rank holds, by its seat or retained."""
    return tuple(dict.fromkeys([*(one.seat.arcs if one.seat is not None else ()), *one.retained]))


def _encoded(seat: Seat | None) -> list[object] | None:
    if seat is None:
        return None
    return [*seat[:-1], _encoded_arcs(seat.arcs)]


def _encoded_arcs(arcs: Sequence[Arc]) -> list[list[int]]:
    return [[lo.numerator, lo.denominator, hi.numerator, hi.denominator] for lo, hi in arcs]


def _arcs(fields: Sequence[Sequence[int]]) -> tuple[Arc, ...]:
    return tuple((Fraction(lo, part), Fraction(hi, whole)) for lo, part, hi, whole in fields)


def _decoded(fields: list[Any] | None) -> Seat | None:
    if fields is None:
        return None
    group, slot, size, place, base, num_base, arcs = fields
    return Seat(group, slot, size, place, base, num_base, _arcs(arcs))
