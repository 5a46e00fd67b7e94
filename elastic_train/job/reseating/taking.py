"""Taking seats: ranks bring what they hold of the furthest step, and each comes to hold what its seat asks for.

All ranks tell one another how far they are, by which seat they hold something, and whether they hold a step that is
*pending*: they lost a peer where the ranks met over its gradient, so somebody may have applied it.

* If a rank has applied it, those that hold it as pending apply it, too, with the norm that this rank knows.
* If all that are left of its world hold it as pending, they know the norm together, and apply it.
* If any of them does not hold it, nobody can have applied it, and all drop it.

What is then held at the furthest step goes to where it is wanted, along one plan that all ranks compute (`recut`), and
a seat is taken only when everything for it has arrived. What a rank held before it keeps as a spare until all ranks
have met: whoever knows that all have their seats lets go of it. So a fault on the way leaves every share with its old
holders, or with its new ones, or with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from elastic_train.checkpoint.format.layout import State
from elastic_train.checkpoint.format.weights_digest import checksum
from elastic_train.core.arrays import Int64s
from elastic_train.errors import PeerLostError
from elastic_train.job.reseating.brought import Brought, Seated, all_arcs_of, comes_to
from elastic_train.job.sharded.held_state import HeldState
from elastic_train.job.sharded.held_tree import HeldRun, Spare, run_around
from elastic_train.job.state import AppliedState, Reached
from elastic_train.job.state_shards import Place
from elastic_train.job.tree_transfer import give_tree, take_tree
from elastic_train.parallel.group import Group
from elastic_train.shards.holdings import Run, grains_in
from elastic_train.shards.recut import Holder, Recut, plan_recut
from elastic_train.shards.seating import Seating
from elastic_train.shards.seats import Seat, seats_of_holders
from elastic_train.system.failpoints import reach
from elastic_train.system.huge_pages import on_huge_pages


def roll_forward(group: Group, state: AppliedState, shards: Seated, brought: Sequence[Brought]) -> Sequence[Brought]:
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
    most = max(1, *(grains.size for _, grains in holders))
    mine = torch.zeros(most, dtype=torch.float64)
    if group.rank in able:
        assert state.pending is not None, "this rank has said so"
        size = _trained_by(shards, group.rank, shards.seat).size
        mine[:size] = state.pending.measured[:size]
    norm = shards.norm_of_rows(group.all_gather(mine), holders)
    return _apply(group, state, brought, able, norm, Place(furthest.step + 1, term))


def _trained_by(shards: Seated, rank: int, seat: Seat | None) -> Int64s:
    """Return the grains of its column that a rank holds and updates."""
    return shards.columns[shards.column_of(rank)].trained_by(seat)


def _all_left(shards: Seated, brought: Sequence[Brought], ahead: Sequence[int], term: int) -> list[int]:
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
    group: Group, state: AppliedState, brought: Sequence[Brought], ranks: Sequence[int], norm: Tensor, place: Place
) -> list[Brought]:
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


def reseat(
    group: Group,
    state: AppliedState,
    shards: HeldState,
    brought: Sequence[Brought],
    seats: Sequence[Seat] | None = None,
) -> Int64s:
    """Bring this rank to the furthest step, on the seat that it has in this world: of `seats` if they are known.

    Returns the grains that nobody holds any more: if there are any, nothing has changed.

    Raises PeerLostError, with state and seat as they were, if a peer is lost or something arrives damaged.
    """
    furthest = max(one.place for one in brought)
    if is_first(shards, brought):
        take_first_seats(group, shards, brought, seats, begins=True)
        return np.empty(0, dtype=np.int64)
    mine = brought[group.rank] if brought[group.rank].place == furthest else Brought(Place(0, 0), None, ())
    seats = seats_at(brought, shards.copies, furthest) if seats is None else seats
    seating = Seating(shards.layout, shards.circle, seats, group.rank)
    plan = _plan_of(brought, shards, furthest, seating)
    if plan.lost.size:
        return plan.lost
    old = [*shards.runs, *shards.spare.runs] if mine.seat is not None else []
    runs = shards.room_for(seating, old)
    reach("hand-over")
    arrived = _move(group, shards, seating, plan, runs, old)
    given = _share_settings(group, state, shards, [one.place == furthest for one in brought])
    # Everything for this seat is here.
    for one in runs:
        _keep(one, old)
    for memory, weights in arrived:
        memory.copy_(weights)
    counts = None
    if given is not None:
        settings, state.reached = given
        counts = shards.settings.take_all(settings)
    arcs = all_arcs_of(mine) if mine.seat is not None else ()
    shards.sit(seating, runs, counts, Spare(arcs, tuple(one for one in old if not _is_within(one.run, runs))))
    reach("hand-over")
    group.barrier()
    # And everything for all others, so that nobody needs the spare any more.
    shards.spare = Spare()
    shards.refresh(group, everything=True)
    return plan.lost


def is_first(shards: HeldState, brought: Sequence[Brought]) -> bool:
    """Say whether ranks bring nothing but the weights that a run begins with, whole on each of them."""
    is_shared_out = shards.is_shared_out and any(one.seat is not None for one in brought)
    return max(one.place for one in brought).step == 0 and not is_shared_out


def _holder(shards: HeldState, one: Brought, furthest: Place) -> Holder:
    if one.place != furthest or one.seat is None:
        return Holder()
    return Holder(furthest, grains_in(shards.circle, all_arcs_of(one)))


def _is_within(run: Run, others: Sequence[HeldRun]) -> bool:
    return any(one.run.flat == run.flat and one.run.lo <= run.lo and run.hi <= one.run.hi for one in others)


def take_first_seats(
    group: Group,
    shards: HeldState,
    brought: Sequence[Brought],
    seats: Sequence[Seat] | None = None,
    *,
    begins: bool = False,
) -> None:
    """Take the seats of a world that has no updates yet, and begins with the first weights, or with a commit."""
    seats = seats_at(brought, shards.copies, None) if seats is None else seats
    seating = Seating(shards.layout, shards.circle, seats, group.rank)
    runs = shards.room_for(seating)
    if begins:
        shards.begin(runs)
    else:
        shards.begin_from_commit(runs)
    shards.sit(seating, runs, [0.0] * len(shards.optimizer.param_groups))


def seats_at(brought: Sequence[Brought], copies: int, furthest: Place | None) -> list[Seat]:
    """Return every rank's seat; those that ranks bring count at the furthest step, and none do without it."""
    before = [one.seat if one.place == furthest else None for one in brought]
    return seats_of_holders([one.path for one in brought], copies, before, [one.may_hold for one in brought])


def _plan_of(brought: Sequence[Brought], shards: HeldState, furthest: Place, seating: Seating) -> Recut:
    """Return who gives what to whom, the same on all ranks."""
    had = [_holder(shards, one, furthest) for one in brought]
    return plan_recut(had, seating.holdings, shards.layout.span)


def _keep(new: HeldRun, old: Sequence[HeldRun]) -> None:
    """Copy into a new run what old ones have of it; whole weights are in it already."""
    for one in old:
        if one is new:
            return  # it is the one that was held
        lo, hi = max(new.run.lo, one.run.lo), min(new.run.hi, one.run.hi)
        if one.run.flat == new.run.flat and lo < hi:
            here, there = (run.cut(Run(new.run.flat, lo, hi)) for run in (new, one))
            if here.weights.data_ptr() != there.weights.data_ptr():
                here.weights.copy_(there.weights)
            for name, moment in here.moments.items():
                moment.copy_(there.moments[name])


def _move(
    group: Group,
    shards: HeldState,
    seating: Seating,
    plan: Recut,
    runs: Sequence[HeldRun],
    old: Sequence[HeldRun],
) -> list[tuple[Tensor, Tensor]]:
    """Send and receive what the plan says, into `runs`; return pairs of weights' memory and what it is to be.

    Where weights are whole on every rank, those of the old seat are in that memory until the new one is taken.
    """
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    arrived: list[tuple[Tensor, Tensor]] = []
    for giver, taker, grains in plan.transfers:
        for run in seating.runs_at(taker, grains) if group.rank in (giver, taker) else ():
            one = _cut_out(shards, old if group.rank == giver else runs, run)
            moments = [moment for _, moment in sorted(one.moments.items())]
            if group.rank == giver:
                sends += [(taker, tensor) for tensor in (one.weights, *moments)]
            else:
                weights = one.weights
                if not shards.is_shared_out:
                    weights = on_huge_pages(torch.empty_like(weights))
                    arrived.append((one.weights, weights))
                receives += [(giver, tensor) for tensor in (weights, *moments)]
    if sends or receives:
        group.exchange(sends, receives)
        _check(group, sends, receives)
    return arrived


def _cut_out(shards: HeldState, runs: Sequence[HeldRun], run: Run) -> HeldRun:
    """Return what held runs have of a run: live where one of them has it all, else put together."""
    if _is_within(run, runs):
        return run_around(runs, run).cut(run)
    found = shards.new_run(run)
    _keep(found, runs)
    return found


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
            give_tree(group, shards.settings.all(), state.reached, taker)
        elif group.rank == taker:
            given = take_tree(group, giver)
    return given
