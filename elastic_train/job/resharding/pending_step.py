"""Settle a step that a world left between summing its gradient and applying it.

A rank that loses a peer during that exchange, and does not know the norm of the whole gradient, keeps the step as
*pending*, because a peer may have applied it.

* If a rank has applied it, the ranks with it pending apply it with that rank's norm.
* If every surviving rank of that world has it pending, and together they know the norm, they apply it.
* If any survivor does not have it pending, no rank can have applied it, and all drop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.core.mesh import ranks_by_part
from elastic_train.job import gradient_norm
from elastic_train.job.resharding.peer_states import PeerState, all_arcs_of, comes_to
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group
from elastic_train.placement.table import Table


def roll_forward(group: Group, state: AppliedState, brought: Sequence[PeerState]) -> Sequence[PeerState]:
    """Apply a pending step if a rank may have applied it, else drop it; return the ranks' new states."""
    table, furthest = state.shards.table, max(one.place for one in brought)
    ahead = [rank for rank, one in enumerate(brought) if one.place == furthest]
    late = [rank for rank, one in enumerate(brought) if one.pending and comes_to(one) == furthest]
    if late:
        norm = torch.tensor(brought[ahead[0]].norm, dtype=torch.float64)
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
    rows = group.all_gather(gradient_norm.padded(mine, max(grains.size for grains in trained.values())))
    norm = gradient_norm.norm_of_rows(rows, table.parts, by_part)
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
