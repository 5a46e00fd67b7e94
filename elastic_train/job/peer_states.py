"""The state with which each rank enters a world, gathered on all ranks, and the step that is still pending.

Ranks that hold the same part of the state in all cells are a *column* (shard group); without cells, all ranks are one
column. A column holds its part whole or in shards. A step is complete if every column holds all of its part.

A rank that loses a peer between summing a gradient and applying it, and does not know the norm of the whole gradient,
keeps the step as *pending*, because a peer may have applied it.

* If a rank has applied it, the ranks with it pending apply it with that rank's norm.
* If every surviving rank of that world has it pending, and together they know the norm, they apply it.
* If any survivor does not have it pending, no rank can have applied it, and all drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.core.mesh import ranks_by_part
from elastic_train.job.state import AppliedState, norm_of_rows, padded
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.placement.arcs import Arc, Path
from elastic_train.placement.seats import Seat
from elastic_train.placement.table import Table


@dataclass(frozen=True, slots=True)
class PeerState:
    """A rank's progress when it enters a world, and its seat, None if it holds no shard.

    `pending` is the term of a pending step, 0 for none; `trained_in` is the last world it trained in; `norm` is the
    gradient norm of its last applied step, None if it is from a commit. A rank that cannot write commits gets no shard
    (`may_hold`), because a shard whose holders all cannot write would be in no commit. `retained` are the arcs it holds
    besides its seat.
    """

    place: Place
    seat: Seat | None
    path: Path
    pending: int = 0
    trained_in: int = 0
    norm: float | None = None
    may_hold: bool = True
    retained: tuple[Arc, ...] = ()

    def without_state(self) -> PeerState:
        """Return the same rank without its state."""
        return replace(self, place=Place(0, 0), seat=None, pending=0, retained=())


def gather_peer_states(group: Group, state: AppliedState, path: Path, *, may_hold: bool = True) -> list[PeerState]:
    """Return every rank's state, by rank.

    If no rank of a column can write commits, all of them may hold shards; rank 0 always may. A pending step does not
    count if the ranks that are beyond it have it from a commit, which does not say its norm.
    """
    pending = state.pending.facts.term if state.pending is not None else 0
    may_hold = may_hold or group.rank == 0
    shards, table = state.shards, state.shards.table
    retained = _encoded_arcs(shards.share.retained.arcs)
    seat, norm = _encoded(table.seat), state.reached.norm
    mine = [*state.place, seat, list(path), pending, shards.trained_in, norm, may_hold, retained]
    brought = _read(group.all_gather_objects(mine))
    unknown = {one.place for one in brought} - {one.place for one in brought if one.norm is not None}
    brought = [replace(one, pending=0) if one.pending and comes_to(one) in unknown else one for one in brought]
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


def roll_forward(group: Group, state: AppliedState, brought: Sequence[PeerState]) -> Sequence[PeerState]:
    """Apply a pending step if a rank may have applied it, else drop it; return the ranks' new states."""
    table, furthest = state.shards.table, max(one.place for one in brought)
    ahead = [rank for rank, one in enumerate(brought) if one.place == furthest]
    late = [rank for rank, one in enumerate(brought) if one.pending and comes_to(one) == furthest]
    if late:
        known = next(one.norm for one in brought if one.place == furthest and one.norm is not None)
        norm = torch.tensor(known, dtype=torch.float64)
        return _apply(group, state, brought, late, norm, furthest)
    term = max(brought[rank].pending for rank in ahead)
    able = _all_left(table, brought, ahead, term)
    if not able:
        state.drop_pending()
        return brought
    trained = dict[int, Int64s]()
    by_part: list[list[tuple[int, Int64s]]] = [[] for _ in table.parts.columns]
    for rank in able:
        part, _ = table.cell.holder_of(rank)
        trained[rank] = table.parts.columns[part].trained_by(brought[rank].seat)
        by_part[part].append((rank, trained[rank]))
    mine = torch.zeros(0, dtype=torch.float64)
    if group.rank in able:
        assert state.pending is not None, "this rank has said so"
        mine = state.pending.measured[: trained[group.rank].size]
    rows = group.all_gather(padded(mine, max(grains.size for grains in trained.values())))
    norm = norm_of_rows(rows, table.parts, by_part)
    return _apply(group, state, brought, able, norm, Place(furthest.step + 1, term))


def _all_left(table: Table, brought: Sequence[PeerState], ahead: Sequence[int], term: int) -> list[int]:
    """Return the ranks that can apply the step pending since `term`; empty unless all survivors of that world can."""
    if term == 0:
        return []
    left = [rank for rank in ahead if brought[rank].trained_in == term]
    if any(brought[rank].pending != term for rank in left):
        return []
    for column, ranks in zip(table.parts.columns, ranks_by_part(len(brought), table.cell), strict=True):
        of_column = [brought[rank] for rank in left if rank in ranks]
        trained = column.layout.trained
        held = [column.trained_by(one.seat) for one in of_column]
        is_known = np.unique(np.concatenate([trained[:0], *held])).size == trained.size
        if not of_column or not is_known or column.missing(map(all_arcs_of, of_column)):
            return []  # a column without trained weights must reach the same step as the others
    return left


def _apply(
    group: Group, state: AppliedState, brought: Sequence[PeerState], ranks: Sequence[int], norm: Tensor, place: Place
) -> list[PeerState]:
    """Apply the pending step on `ranks`, drop it on others; return the ranks' new states."""
    if group.rank in ranks:
        assert state.pending is not None, "this rank has said so"
        state.apply(state.pending.facts, norm)
    else:
        state.drop_pending()
    return [
        replace(one, place=place, pending=0, norm=float(norm)) if rank in ranks else one
        for rank, one in enumerate(brought)
    ]
