"""Quarantine: how what one rank could not read becomes a fact that every rank, and every replay, acts on alike.

A rank that cannot read a sample of the next step says so with the step's lane table. Nobody applies that step: the
ranks tell each other which row groups they miss, rank 0 records them in the store as holes from this step on, and then
all repeat the step without their samples. The record comes before the step. So a world that continues from an earlier
commit finds it, and leaves out the same samples from the same step on, whether it could read them or not.

A hole in a commit is in effect; one that is only recorded takes effect when its step comes, in any world that begins at
or before that step. A record that a later world has passed over belongs to a lineage that was given up.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from elastic_train.checkpoint.stores.store import Store, create_once, read
from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import ranges_of
from elastic_train.core.order import Order
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import DataError, StorageError
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.parallel.group import Group
from elastic_train.world.agreement import agree
from elastic_train.world.world import World

FOLDER = "holes/"
_HOLES = TypeAdapter(tuple[Hole, ...])


def find_holes(world: World, plan: Plan, state: AppliedState, lanes: Sequence[LaneBatch]) -> tuple[Hole, ...]:
    """Return the holes that begin with the next step: all row groups that any rank could not read of it, recorded.

    StorageError, on every rank, if they cannot be recorded.
    """
    mine = {group: why for batch in lanes for group, why in batch.unreadable.items()}
    found = _gather(world.group, mine)

    def record() -> list[object]:
        begin = functools.partial(make_hole, plan.order, plan.manifest, plan.micro_batch, state.step)
        return _record(world.store, world.term, [begin(group, why) for group, why in sorted(found.items())])

    return _HOLES.validate_python(agree(world.group, record))


def known_holes(world: World, plan: Plan, state: AppliedState) -> tuple[Hole, ...]:
    """Return the holes that a world begins with: those in effect, and those recorded for steps that are to come."""
    in_effect = state.reached.account.holes
    if plan.config.data.unreadable == "fail":
        return in_effect
    recorded = _HOLES.validate_python(agree(world.group, lambda: _read_all(world.store)))
    ahead: dict[int, Hole] = {}
    for hole in recorded:
        if hole.since >= state.step and hole.group not in {held.group for held in in_effect}:
            first = ahead.get(hole.group, hole)
            ahead[hole.group] = min(first, hole, key=lambda hole: hole.since)
    return (*in_effect, *(ahead[group] for group in sorted(ahead)))


def make_hole(order: Order, manifest: Manifest, micro_batch: int, step: int, group: int, why: str) -> Hole:
    """Describe a row group that is left out from a step on, and what its epoch had applied of it before."""
    number, within = manifest.place_of_group(group)
    lo, cursor = int(order.group_first_id[group]), order.cursor_at(step, micro_batch)
    return Hole(
        group=group,
        file=manifest.files[number].path,
        row_group=within,
        lo=lo,
        hi=lo + int(order.group_rows[group]),
        since=step,
        epoch=cursor.epoch,
        applied_before=ranges_of(order.epoch(cursor.epoch).ids_of_group(group, cursor.offset)),
        why=why,
    )


def _gather(group: Group, mine: Mapping[int, str]) -> dict[int, str]:
    """Return what any rank misses; where several do, the reason is the lowest rank's."""
    found: dict[int, str] = {}
    for rank in range(group.size):
        received = group.broadcast_object([[number, why] for number, why in mine.items()], rank)
        assert isinstance(received, list), "pairs of a row group and a reason"
        for number, why in received:
            found.setdefault(number, why)
    return found


def _record(store: Store, term: int, holes: Sequence[Hole]) -> list[object]:
    """Record holes durably; return them as they were written."""
    written: list[object] = json.loads(json.dumps([hole.to_dict() for hole in holes]))
    key = f"{FOLDER}{term:08d}-{holes[0].since:012d}-{holes[0].group}.json"
    if not create_once(store, key, json.dumps(written, indent=1).encode()):
        raise StorageError(f"{store.url}/{key}: somebody else has recorded holes of this term; who else runs here?")
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
