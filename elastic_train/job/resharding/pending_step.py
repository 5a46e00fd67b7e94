"""What becomes of a step that a world left between the sum of its gradient and its application.

A rank that loses a peer where the ranks meet over a step's gradient, and does not know the norm of all of it, holds the
step as *pending*: somebody may have applied it.

* If a rank has applied it, those that hold it as pending apply it, too, with the norm that this rank knows.
* If all that are left of its world hold it as pending, and know the norm together, they apply it.
* If any of them does not hold it, nobody can have applied it, and all drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.job import gradient_norm
from elastic_train.job.resharding.peer_states import PeerState, all_arcs_of, comes_to
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place, StateShards
from elastic_train.parallel.group import Group
from elastic_train.placement.seats import Seat


def roll_forward(
    group: Group, state: AppliedState, shards: StateShards, brought: Sequence[PeerState]
) -> Sequence[PeerState]:
    """Apply a pending step if it may have been applied, else drop it; return what ranks bring then."""
    furthest = max(one.place for one in brought)
    ahead = [rank for rank, one in enumerate(brought) if one.place == furthest]
    late = [rank for rank, one in enumerate(brought) if one.pending and comes_to(one) == furthest]
    if late:
        norm = torch.tensor(brought[ahead[0]].norm, dtype=torch.float64)
        return _apply(group, state, brought, late, norm, furthest)
    term = max(brought[rank].pending for rank in ahead)
    able = _all_left(shards, brought, ahead, term)
    if not able:
        state.drop_pending()
        return brought
    holders = [(rank, _trained_by(shards, rank, brought[rank].seat)) for rank in able]
    by_part: list[list[tuple[int, Int64s]]] = [[] for _ in shards.columns]
    for rank, grains in holders:
        by_part[shards.column_of(rank)].append((rank, grains))
    mine = torch.zeros(0, dtype=torch.float64)
    if group.rank in able:
        assert state.pending is not None, "this rank has said so"
        mine = state.pending.measured[: _trained_by(shards, group.rank, shards.seat).size]
    rows = group.all_gather(gradient_norm.padded(mine, max(grains.size for _, grains in holders)))
    norm = gradient_norm.norm_of_rows(rows, shards.parts, by_part)
    return _apply(group, state, brought, able, norm, Place(furthest.step + 1, term))


def _trained_by(shards: StateShards, rank: int, seat: Seat | None) -> Int64s:
    """Return the grains of its column that a rank holds and updates."""
    return shards.columns[shards.column_of(rank)].trained_by(seat)


def _all_left(shards: StateShards, brought: Sequence[PeerState], ahead: Sequence[int], term: int) -> list[int]:
    """Return the ranks that can apply the step that is pending since a term; none if not all left of it can."""
    if term == 0:
        return []
    left = [rank for rank in ahead if brought[rank].trained_in == term]
    if any(brought[rank].pending != term for rank in left):
        return []
    for number, column in enumerate(shards.columns):
        of_column = [brought[rank] for rank in left if shards.column_of(rank) == number]
        trained = column.layout.trained
        held = [column.trained_by(one.seat) for one in of_column]
        is_known = np.unique(np.concatenate([trained[:0], *held])).size == trained.size
        if not of_column or not is_known or column.missing(map(all_arcs_of, of_column)):
            return []  # a column that trains nothing, too, has to come to the same step as the others
    return left


def _apply(
    group: Group, state: AppliedState, brought: Sequence[PeerState], ranks: Sequence[int], norm: Tensor, place: Place
) -> list[PeerState]:
    """Apply the pending step on those ranks, drop it on others; return what ranks bring then."""
    if group.rank in ranks:
        assert state.pending is not None, "this rank has said so"
        state.apply(state.pending.facts, norm)
    else:
        state.drop_pending()
    return [
        replace(one, place=place, pending=0, norm=float(norm)) if rank in ranks else one
        for rank, one in enumerate(brought)
    ]
