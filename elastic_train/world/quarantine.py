"""Quarantine: turn data that one rank could not read into holes that every rank, and every replay, skips equally.

A rank that cannot read a sample of the next step reports it with the step's lane table. No rank applies that step. The
ranks exchange which row groups they miss, and these ranks and some others read them again, bypassing all caches. Row
groups that no rank can read are recorded in the store by rank 0, as holes from this step on, and all repeat the step
without their samples. If other ranks can read a row group, the failing rank's copy is at fault and no data is lost: it
ends, and the others continue without it. The record precedes the step, so a world that continues from an earlier commit
finds it and skips the same samples from the same step on, even if it could read them.

A hole in a commit is in effect; a recorded one takes effect at its step, in any world that begins at or before that
step. A record that a later world has passed over belongs to an abandoned lineage.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from pydantic import TypeAdapter, ValidationError

from elastic_train.checkpoint.stores.store import Store, create_once, read
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import group_of, ranges_of
from elastic_train.core.mixture import RunOrder
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import DataError, PeerLostError, StorageError, UnreadableError
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.world.agreement import agree
from elastic_train.world.world import World

FOLDER = "holes/"
MOST_OTHERS = 4
"""Number of unaffected ranks that read a row group to find out if it is lost."""
_HOLES = TypeAdapter(tuple[Hole, ...])


def find_holes(
    world: World, plan: Plan, state: AppliedState, lanes: Sequence[LaneBatch], *, may_have_passed: bool = True
) -> tuple[Hole, ...]:
    """Return the recorded holes that begin with the next step: all its row groups that no rank can read.

    Empty if the ranks that missed data can read it now; with `may_have_passed` False they do not try again. Raises
    UnreadableError on a rank whose own copy is at fault, and then PeerLostError on the others; StorageError, on every
    rank, if the holes cannot be recorded, or the storage of the data is away: then its samples are not lost.
    """
    mine = {group: why for batch in lanes for group, why in batch.unreadable.items()}
    missed = _gather_by_rank(world.group, mine)
    found = _look_again(world, plan, missed, may_have_passed=may_have_passed)
    if not found:
        return ()

    def record() -> list[object]:
        if away := next(filter(None, map(plan.feed.why_away, sorted(found))), None):
            raise StorageError(f"nothing is quarantined: {away}")
        begin = functools.partial(_hole, plan, state.step)
        return _record(world.store, world.term, [begin(group, why) for group, why in sorted(found.items())])

    return _HOLES.validate_python(agree(world.group, record))


def known_holes(world: World, plan: Plan, state: AppliedState) -> tuple[Hole, ...]:
    """Return the holes that a world begins with: those in effect, and those recorded for later steps."""
    in_effect = state.reached.account.holes
    if not plan.config.data.quarantine:
        return in_effect
    recorded = _HOLES.validate_python(agree(world.group, lambda: _read_all(world.store)))
    ahead: dict[tuple[int, int], Hole] = {}  # by their samples
    for hole in recorded:
        known = (*in_effect, *ahead.values())
        # One that shares samples with a known one was refused, and its step was not applied.
        is_ahead = hole.since >= state.step and not any(hole.overlaps(held) for held in known)
        if is_ahead and (hole.lo, hole.hi) not in {(held.lo, held.hi) for held in in_effect}:
            first = ahead.get((hole.lo, hole.hi), hole)
            ahead[hole.lo, hole.hi] = min(first, hole, key=lambda hole: hole.since)
    return (*in_effect, *(ahead[samples] for samples in sorted(ahead)))


def quarantine_deadly(
    world: World, plan: Plan, step: int, mine: Mapping[int, str], holes: Sequence[Hole]
) -> tuple[Hole, ...]:
    """Return the holes plus new ones, from a step on, for all samples that any rank found to kill its process.

    Raises DataError, on every rank, if the configuration does not allow skipping samples.
    """
    found = _gather(world.group, mine)
    if not found:
        return tuple(holes)
    lost = [_sample_hole(plan, step, sample, why) for sample, why in sorted(found.items())]
    named = "; ".join(f"sample {hole.lo} (row group {hole.row_group} of {hole.file}) {hole.why}" for hole in lost)
    if "deadly" not in plan.config.data.quarantine:
        raise DataError(
            f"step {step + 1} cannot be computed: {named}. Repair the data or the task, or set `data.quarantine: "
            "[deadly]` to continue without these samples"
        )
    world.announce(f"QUARANTINED from step {step} on: {named}")
    recorded = _HOLES.validate_python(agree(world.group, lambda: _record(world.store, world.term, lost)))
    return (*holes, *recorded)


def _sample_hole(plan: Plan, step: int, sample: int, why: str) -> Hole:
    group = group_of(plan.order.group_first_id, sample)
    whole = _hole(plan, step, group, why)
    applied = tuple((sample, sample + 1) for lo, hi in whole.applied_before if lo <= sample < hi)
    return replace(whole, lo=sample, hi=sample + 1, applied_before=applied)


def make_hole(order: RunOrder, manifest: Manifest, micro_batch: int, step: int, group: int, why: str) -> Hole:
    """Describe a row group that is skipped from a step on, and the part of it that its epoch had already applied.

    In a mixture the epoch is the first unfinished one of its source, and applied samples of later epochs count, too.
    """
    number, within = manifest.place_of_group(group)
    lo, cursor = int(order.group_first_id[group]), order.cursor_at(step, micro_batch)
    epoch, applied = order.applied_of_group(group, cursor)
    return Hole(
        group=group,
        file=manifest.files[number].path,
        row_group=within,
        lo=lo,
        hi=lo + int(order.group_rows[group]),
        since=step,
        epoch=epoch,
        applied_before=ranges_of(applied),
        why=why,
    )


def _hole(plan: Plan, step: int, group: int, why: str) -> Hole:
    """Describe a row group of the plan's training set; in a mixture, its file is prefixed with the source's name."""
    hole = make_hole(plan.order, plan.manifest, plan.micro_batch, step, group, why)
    if len(plan.sources) < 2:
        return hole
    number, _, path = hole.file.partition("/")
    return replace(hole, file=f"{plan.sources[int(number)].name}/{path}")


def _look_again(
    world: World, plan: Plan, missed: Sequence[Mapping[int, str]], *, may_have_passed: bool
) -> dict[int, str]:
    """Return the missed row groups that no rank can read, and why; ranks whose own copy is at fault end.

    They are read again by the ranks that missed them, unless these have failed often enough, and by a few others,
    spread over all ranks because ranks of one node are neighbours.
    """
    group, found = world.group, _merge(missed)
    asked = {number: _readers(number, missed, may_have_passed=may_have_passed) for number in found}
    mine = {number: plan.feed.why_unreadable(number) for number in found if group.rank in asked[number]}
    seen = _gather_by_rank(group, mine)
    lost = {number: why for number, why in found.items() if all(of.get(number, why) for of in seen)}
    at_fault = {
        rank: why
        for rank, of in enumerate(missed)
        for number, why in of.items()
        if number not in lost and seen[rank].get(number, why)
    }
    if at_fault:
        _part(world, at_fault)
    return lost


def _readers(number: int, missed: Sequence[Mapping[int, str]], *, may_have_passed: bool) -> set[int]:
    """Return the ranks that read a row group again."""
    others = [rank for rank, of in enumerate(missed) if number not in of]
    num = min(MOST_OTHERS, len(others))
    chosen = {others[place * (len(others) - 1) // max(1, num - 1)] for place in range(num)}
    return chosen | ({rank for rank, of in enumerate(missed) if number in of} if may_have_passed else set())


def _part(world: World, at_fault: Mapping[int, str]) -> NoReturn:
    """End the world: the ranks whose copies are at fault end, and the others form a new one.

    The failing ranks wait until the world has ended; if they left before all answers arrived, they would seem lost.
    """
    rank, why = next(iter(at_fault.items()))
    world.announce(f"rank {rank} ends, since others can read what it cannot, so nothing is quarantined: {why}")
    if (mine := at_fault.get(world.group.rank)) is not None:
        raise UnreadableError(
            f"{mine}. Other ranks can read it, so this node's copy or disk is at fault: nothing is quarantined, this "
            "process ends, and the others continue without it. Restore the copy, and start it again"
        )
    world.group.all_gather(torch.tensor(0))  # fails as soon as the first of them has ended
    raise PeerLostError(f"rank {rank} ends: it cannot read what others can")


def _gather(group: Group, mine: Mapping[int, str]) -> dict[int, str]:
    """Return the row groups that any rank misses; if several do, the lowest rank's reason counts."""
    return _merge(_gather_by_rank(group, mine))


def _merge(missed: Sequence[Mapping[int, str]]) -> dict[int, str]:
    return {number: why for of in reversed(missed) for number, why in of.items()}


def _gather_by_rank(group: Group, mine: Mapping[int, str]) -> list[dict[int, str]]:
    """Return each rank's reasons, by row group or sample."""
    said = []
    for rank in range(group.size):
        received = group.broadcast_object([[number, why] for number, why in mine.items()], rank)
        assert isinstance(received, list), "pairs of a number and a text"
        said.append(dict(received))
    return said


def _record(store: Store, term: int, holes: Sequence[Hole]) -> list[object]:
    """Record holes durably; return them as written."""
    written: list[object] = json.loads(json.dumps([hole.to_dict() for hole in holes]))
    key = f"{FOLDER}{term:08d}-{holes[0].since:012d}-{holes[0].lo}.json"
    if not create_once(store, key, json.dumps(written, indent=1).encode()):
        raise StorageError(
            f"{store.url}/{key}: somebody else has recorded holes of this term; is another job using this run.dir?"
        )
    return written


def _read_all(store: Store) -> list[object]:
    holes: list[object] = []
    for entry in store.list(FOLDER):
        try:
            content = json.loads(read(store, entry.key))
            _HOLES.validate_python(content)
        except (ValueError, ValidationError) as error:
            raise DataError(
                f"{store.url}/{entry.key} is not a record of holes ({str(error).splitlines()[0]}); "
                "remove it to search for unreadable row groups again"
            ) from error
        holes += content
    return holes
