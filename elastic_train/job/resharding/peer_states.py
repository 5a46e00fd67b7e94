"""What every rank brings into a world, of which all others learn.

Ranks that hold the same part of the state in all cells are a *column*, and have all of it or shares of it; where there
are no cells, all ranks are one. A step counts as held where all columns hold all of theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place, StateShards
from elastic_train.parallel.group import Group
from elastic_train.placement.arcs import Arc
from elastic_train.placement.domains import Path
from elastic_train.placement.seats import Seat


@dataclass(frozen=True, slots=True)
class PeerState:
    """What a rank brings into a world: how far it is, and its seat, None if it holds nothing by one.

    `pending` is the term of the step that it holds as pending, 0 for none; `trained_in` the last world that it trained
    in; `norm` that of the last step that it has applied. Who cannot write commits holds nothing from here on
    (`may_hold`): a share whose holders all cannot write would be in no commit. `retained` is what it holds beside its
    seat.
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
        """Return what a rank brings whose state does not count."""
        return replace(self, place=Place(0, 0), seat=None, pending=0, retained=())


def gather_peer_states(
    group: Group, state: AppliedState, shards: StateShards, path: Path, *, may_hold: bool = True
) -> list[PeerState]:
    """Return what every rank brings, by rank.

    Where no rank of a column can write commits, all of it may hold something, and so may rank 0 anyway.
    """
    pending = state.pending.facts.term if state.pending is not None else 0
    may_hold = may_hold or group.rank == 0
    norm, retained = _bits(state.reached.norm), _encoded_arcs(shards.share.retained.arcs)
    mine = [*state.place, _encoded(shards.seat), list(path), pending, shards.trained_in, norm, may_hold, retained]
    brought = _read(group.all_gather_objects(mine))
    able = {shards.column_of(rank) for rank, one in enumerate(brought) if one.may_hold}
    if len(able) == len(shards.columns):
        return brought
    columns = map(shards.column_of, range(len(brought)))
    return [
        one if column in able else replace(one, may_hold=True) for column, one in zip(columns, brought, strict=True)
    ]


def by_column(shards: StateShards, brought: Sequence[PeerState]) -> list[list[PeerState]]:
    """Return what the ranks of each column bring."""
    found: list[list[PeerState]] = [[] for _ in shards.columns]
    for rank, one in enumerate(brought):
        found[shards.column_of(rank)].append(one)
    return found


def _read(told: Sequence[Sequence[Any]]) -> list[PeerState]:
    """Read what every rank has said of what it brings."""
    return [
        PeerState(
            Place(step, term), _decoded(seat), tuple(path), pending, trained_in, _float(norm), may, _arcs(retained)
        )
        for step, term, seat, path, pending, trained_in, norm, may, retained in told
    ]


def leave_out_unfinished(shards: StateShards, brought: Sequence[PeerState]) -> tuple[list[PeerState], int]:
    """Return what ranks bring, without those that are further than all of the state is held; and how much is lost.

    A rank that was away while its peers' shares were lost may come back further than they are now: what it holds is of
    no use. Lost are the shards that nobody holds at the newest world's last step, 0 if that is what is continued. If
    nothing is held as a whole, nobody brings anything.
    """
    places = sorted({one.place for one in brought if one.place.step}, reverse=True)
    missing = {place: _num_missing(shards, brought, place) for place in places}
    whole = next((place for place in places if not missing[place]), Place(0, 0))
    newest = max(places, key=lambda place: (place.term, place.step), default=whole)
    kept = [one if one.place <= whole else one.without_state() for one in brought]
    return kept, missing[newest] if newest > whole else 0


def comes_to(one: PeerState) -> Place:
    """Return where a rank is once it has applied the step that it holds as pending."""
    return Place(one.place.step + 1, one.pending)


def _num_missing(shards: StateShards, brought: Sequence[PeerState], place: Place) -> int:
    """Return how many grains nobody of their column holds at a place, or can bring there.

    A column without anybody there lacks something, even if it has no grains.
    """
    missing = 0
    for column, of_column in zip(shards.columns, by_column(shards, brought), strict=True):
        there = [one for one in of_column if place in (one.place, comes_to(one) if one.pending else None)]
        missing += max(column.missing(map(all_arcs_of, there)), 0 if there else 1)
    return missing


def all_arcs_of(one: PeerState) -> tuple[Arc, ...]:
    """Return all that a rank holds, by its seat or beside it."""
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


def _bits(value: float) -> int:
    """Return a float's bits, so that one that is not a number travels, too."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
