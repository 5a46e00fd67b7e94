"""What becomes of a step that a world of cells left between the sum and its application, and how far it got as a whole.

A rank that loses a peer where the ranks meet over a step's gradient holds the step as *pending*: somebody may have
applied it.

* If a rank has applied it, those that hold it as pending apply it, too, with the norm that this rank knows.
* If all that are left of its world hold it as pending, and know each part of the norm, they apply it.
* Otherwise nobody can have applied it, and all drop it.

So as long as a rank with each part is left in some cell, all of them come to one step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastic_train.job.cells.cell_state import CellState
from elastic_train.job.state import AppliedState
from elastic_train.job.state_shards import Place
from elastic_train.parallel.group import Group


@dataclass(frozen=True, slots=True)
class _Brought:
    """How far a rank is, the term of the step that it holds as pending (0: none), the last world that it trained in,
    and the norm of the last step that it has applied."""

    place: Place
    pending: int
    trained_in: int
    norm: float


def settle_pending(group: Group, state: AppliedState, shards: CellState, *, counts: bool) -> list[Place]:
    """Apply a pending step if it may have been applied, else drop it; return how far every rank is then, by rank.

    A rank whose state does not count is where one that was just built is.
    """
    if not counts:
        state.drop_pending()
    brought = _bring(group, state, shards, counts=counts)
    furthest = max(one.place for one in brought)
    late = [rank for rank, one in enumerate(brought) if one.pending and _reached_by(one) == furthest]
    if late:
        norm = next(one.norm for one in brought if one.place == furthest)
        return _apply(group, state, brought, late, torch.tensor(norm, dtype=torch.float64))
    term = max(one.pending for one in brought if one.place == furthest)
    left = [rank for rank, one in enumerate(brought) if one.place == furthest and one.trained_in == term]
    cell = shards.cell
    first_with = {cell.part_of(rank % cell.size): rank for rank in reversed(left)}
    if term == 0 or len(first_with) < cell.num_parts or any(brought[rank].pending != term for rank in left):
        state.drop_pending()
        return [one.place for one in brought]
    rows = group.all_gather(_measured(state, shards)).numpy()
    of_places = np.stack([rows[first_with[cell.part_of(place)]] for place in range(cell.size)])
    return _apply(group, state, brought, left, shards.norm_of_places(of_places))


def furthest_whole(places: Sequence[Place], by_part: Sequence[Sequence[int]]) -> Place:
    """Return the furthest place at which each part of the state is held, from where all ranks are.

    `by_part` are the ranks that may hold each part.
    """
    held = [{places[rank] for rank in ranks} for ranks in by_part]
    return max(set.intersection(*held), default=Place(0, 0))


def _apply(
    group: Group, state: AppliedState, brought: Sequence[_Brought], ranks: Sequence[int], norm: Tensor
) -> list[Place]:
    """Apply the pending step on those ranks, drop it on others; return how far every rank is then."""
    if group.rank in ranks:
        assert state.pending is not None, "this rank has said so"
        state.apply(state.pending.facts, norm)
    else:
        state.drop_pending()
    return [_reached_by(one) if rank in ranks else one.place for rank, one in enumerate(brought)]


def _reached_by(one: _Brought) -> Place:
    """Return where a rank is once it has applied the step that it holds as pending."""
    return Place(one.place.step + 1, one.pending)


def _bring(group: Group, state: AppliedState, shards: CellState, *, counts: bool) -> list[_Brought]:
    place = state.place if counts else Place(0, 0)
    pending = state.pending.facts.term if state.pending is not None else 0
    [bits] = struct.unpack("<q", struct.pack("<d", state.reached.norm))
    return _read(group.all_gather(torch.tensor([*place, pending, shards.trained_in, bits])))


def _read(gathered: Tensor) -> list[_Brought]:
    """Read what every rank has said of what it brings."""
    return [
        _Brought(Place(step, term), pending, trained_in, struct.unpack("<d", struct.pack("<q", norm))[0])
        for step, term, pending, trained_in, norm in gathered.tolist()
    ]


def _measured(state: AppliedState, shards: CellState) -> Tensor:
    return torch.zeros(shards.num_grains, dtype=torch.float64) if state.pending is None else state.pending.measured
