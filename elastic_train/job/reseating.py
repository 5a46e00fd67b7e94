"""Taking seats: ranks bring what they hold of the furthest step, and each comes to hold what its seat asks for.

All ranks tell one another how far they are, by which seat they hold something, and whether they hold a step that is
*pending*: they lost a peer where the ranks met over its gradient, so somebody may have applied it.

* If a rank has applied it, those that hold it as pending apply it, too, with the norm that this rank knows.
* If all that are left of its world hold it as pending, they know the norm together, and apply it.
* If any of them does not hold it, nobody can have applied it, and all drop it.

What is then held at the furthest step goes to where it is wanted, along one plan that all ranks compute (`recut`), and
a seat is taken only when everything for it has arrived. So a fault on the way leaves every rank with what it had.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.core.arrays import Int64s
from elastic_train.errors import PeerLostError
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.job.sharded.held_tree import HeldRun, run_around
from elastic_train.job.state import AppliedState, Reached
from elastic_train.job.state_shards import Place
from elastic_train.job.tree_transfer import give_tree, take_tree
from elastic_train.parallel.group import Group
from elastic_train.shards.domains import Path
from elastic_train.shards.holdings import Run, held, runs_of
from elastic_train.shards.recut import Holder, Recut, plan_recut
from elastic_train.shards.seats import Seat, seats_of
from elastic_train.system.failpoints import reach


@dataclass(frozen=True, slots=True)
class Brought:
    """What a rank brings into a world: how far it is, and its seat, None if it holds nothing.

    `pending` is the term of the step that it holds as pending, 0 for none; `trained_in` the last world that it trained
    in; `norm` that of the last step that it has applied.
    """

    place: Place
    seat: Seat | None
    path: Path
    pending: int = 0
    trained_in: int = 0
    norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Reseated:
    """How seats were taken: `lost` are grains that nobody holds any more, in which case nothing has changed."""

    lost: Int64s
    num_bytes: int = 0


def bring(group: Group, state: AppliedState, shards: HeldState, path: Path, *, counts: bool) -> list[Brought]:
    """Return what every rank brings, by rank; a rank whose state does not count brings nothing."""
    place = state.place if counts else Place(0, 0)
    seat = shards.seat if counts else None
    pending = state.pending.facts.term if state.pending is not None and counts else 0
    mine = [*place, _encoded(seat), list(path), pending, shards.trained_in, _bits(state.reached.norm)]
    return [
        Brought(Place(step, term), _decoded(seat), tuple(path), pending, trained_in, _float(bits))
        for step, term, seat, path, pending, trained_in, bits in group.all_gather_objects(mine)
    ]


def roll_forward(group: Group, state: AppliedState, shards: HeldState, brought: Sequence[Brought]) -> list[Brought]:
    """Apply a pending step if it may have been applied, else drop it; return what ranks bring then."""
    furthest = max(one.place for one in brought)
    ahead = [rank for rank, one in enumerate(brought) if one.place == furthest]
    late = [rank for rank, one in enumerate(brought) if one.pending and _comes_to(one) == furthest]
    if late:
        norm = torch.tensor(brought[ahead[0]].norm, dtype=torch.float64)
        return _apply(group, state, brought, late, norm, furthest)
    term = max(brought[rank].pending for rank in ahead)
    able = _all_left(shards, brought, ahead, term)
    if not able:
        state.drop_pending()
        return list(brought)
    holders = [(rank, shards.trained_by(brought[rank].seat)) for rank in able]
    most = max(1, *(grains.size for _, grains in holders))
    mine = torch.zeros(most, dtype=torch.float64)
    if group.rank in able:
        assert state.pending is not None, "this rank has said so"
        size = shards.trained_by(shards.seat).size
        mine[:size] = state.pending.measured[:size]
    norm = shards.norm_from(group.all_gather(mine), holders)
    return _apply(group, state, brought, able, norm, Place(furthest.step + 1, term))


def _all_left(shards: HeldState, brought: Sequence[Brought], ahead: Sequence[int], term: int) -> list[int]:
    """Return the ranks that can apply the step that is pending since a term; none if not all left of it can."""
    if term == 0:
        return []
    left = [rank for rank in ahead if brought[rank].trained_in == term]
    if any(brought[rank].pending != term for rank in left):
        return []
    known = np.unique(np.concatenate([shards.trained_by(brought[rank].seat) for rank in left]))
    return left if known.size == shards.layout.trained.size else []


def _comes_to(one: Brought) -> Place:
    return Place(one.place.step + 1, one.pending)


def _apply(
    group: Group, state: AppliedState, brought: Sequence[Brought], ranks: Sequence[int], norm: Tensor, place: Place
) -> list[Brought]:
    """Apply the pending step on those ranks, drop it on others; return what ranks bring then."""
    if group.rank in ranks:
        assert state.pending is not None, "this rank has said so"
        state.apply(state.pending.facts, norm)
    else:
        state.drop_pending()
    return [
        Brought(place, one.seat, one.path, 0, one.trained_in, float(norm)) if rank in ranks else one
        for rank, one in enumerate(brought)
    ]


def reseat(group: Group, state: AppliedState, shards: HeldState, brought: Sequence[Brought]) -> Reseated:
    """Bring this rank to the furthest step, on the seat that it has in this world.

    Raises PeerLostError, with state and seat as they were, if a peer is lost or something arrives damaged.
    """
    furthest = max(one.place for one in brought)
    if furthest.step == 0:
        take_first_seats(group, shards, [one.path for one in brought])
        return Reseated(np.empty(0, dtype=np.int64))
    before = [one.seat if one.place == furthest else None for one in brought]
    seating = shards.seating_of(seats_of([one.path for one in brought], shards.copies, before), group.rank)
    had = [Holder() if seat is None else Holder(furthest, held(shards.circle, seat)) for seat in before]
    plan = plan_recut(had, seating.holdings, shards.layout.span)
    if plan.lost.size:
        return Reseated(plan.lost)
    runs, old = shards.room_for(seating), shards.runs if before[group.rank] is not None else []
    reach("hand-over")
    arrived = _move(group, shards, plan, runs, old)
    given = _share_settings(group, state, shards, [one.place == furthest for one in brought])
    # Everything is here: from now on nothing can come between.
    for one in runs:
        _keep(one, old)
    for run, weights in arrived:
        shards.flat.weights_at(run).copy_(weights)
    counts = None
    if given is not None:
        settings, state.reached = given
        counts = shards.take_settings(settings)
    shards.sit(seating, runs, counts)
    shards.refresh(group, everything=True)
    return Reseated(plan.lost, sum(2 * weights.nbytes for _, weights in arrived))


def take_first_seats(group: Group, shards: HeldState, paths: Sequence[Path]) -> None:
    """Take the seats of a world that begins with whole weights on every rank and no updates, or with a commit."""
    seating = shards.seating_of(seats_of(paths, shards.copies), group.rank)
    shards.sit(seating, shards.room_for(seating), [0.0] * len(shards.optimizer.param_groups))


def _keep(new: HeldRun, old: Sequence[HeldRun]) -> None:
    """Copy into a new run's moments what old ones have of it."""
    for one in old:
        lo, hi = max(new.run.lo, one.run.lo), min(new.run.hi, one.run.hi)
        if one.run.flat == new.run.flat and lo < hi:
            both = Run(new.run.flat, lo, hi)
            for name, moment in new.cut(both).items():
                moment.copy_(one.cut(both)[name])


def _move(
    group: Group, shards: HeldState, plan: Recut, runs: Sequence[HeldRun], old: Sequence[HeldRun]
) -> list[tuple[Run, Tensor]]:
    """Send and receive what the plan says, moments into `runs`; return the weights that have arrived, by run."""
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    arrived: list[tuple[Run, Tensor]] = []
    for giver, taker, grains in plan.transfers:
        for run in runs_of(shards.layout, grains) if group.rank in (giver, taker) else ():
            weights = shards.flat.weights_at(run)
            if group.rank == giver:
                sends += [(taker, tensor) for tensor in (weights, *_moments(shards, old, run))]
            else:
                arrived.append((run, torch.empty_like(weights)))
                receives += [(giver, tensor) for tensor in (arrived[-1][1], *_moments(shards, runs, run))]
    if sends or receives:
        group.exchange(sends, receives)
        _check(group, sends, receives)
    return arrived


def _moments(shards: HeldState, runs: Sequence[HeldRun], run: Run) -> list[Tensor]:
    """Return a run's moments in the order of their names, none if it is not trained."""
    if shards.layout.flats[run.flat].group is None:
        return []
    return [moment for _, moment in sorted(run_around(runs, run).cut(run).items())]


def _check(group: Group, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Compare the checksums of what was sent with those of what has arrived."""
    given, taken = _checksums(sends), _checksums(receives)
    told = {rank: torch.empty_like(sums) for rank, sums in taken.items()}
    group.exchange(list(given.items()), list(told.items()))
    for rank, sums in taken.items():
        if not torch.equal(sums, told[rank]):
            raise PeerLostError(f"the shards that rank {rank} handed over arrived damaged")


def _checksums(tensors: Sequence[tuple[int, Tensor]]) -> dict[int, Tensor]:
    """Return the checksums of tensors by the rank at the other end, in their order."""
    sums: dict[int, list[int]] = {}
    for rank, tensor in tensors:
        sums.setdefault(rank, []).append(checksum(tensor))
    return {rank: torch.tensor(found) for rank, found in sums.items()}


def _share_settings(
    group: Group, state: AppliedState, shards: HeldState, is_furthest: Sequence[bool]
) -> tuple[State, Reached] | None:
    """Let ranks at the furthest step give what all have alike to those that are not; return what this one is given."""
    givers = [rank for rank, is_it in enumerate(is_furthest) if is_it]
    takers = [rank for rank, is_it in enumerate(is_furthest) if not is_it]
    given = None
    for turn, taker in enumerate(takers):
        giver = givers[turn % len(givers)]
        if group.rank == giver:
            give_tree(group, shards.settings(), state.reached, taker)
        elif group.rank == taker:
            given = take_tree(group, giver)
    return given


def _encoded(seat: Seat | None) -> list[object] | None:
    if seat is None:
        return None
    arcs = [[lo.numerator, lo.denominator, hi.numerator, hi.denominator] for lo, hi in seat.arcs]
    return [*seat[:-1], arcs]


def _decoded(fields: list[Any] | None) -> Seat | None:
    if fields is None:
        return None
    arcs = tuple((Fraction(lo, part), Fraction(hi, whole)) for lo, part, hi, whole in fields[-1])
    group, slot, size, place, base, num_base, _ = fields
    return Seat(group, slot, size, place, base, num_base, arcs)


def _bits(value: float) -> int:
    """Return a float's bits, so that one that is not a number travels, too."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
