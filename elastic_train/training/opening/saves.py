"""Open a world's saves and their cadence, and commit a state without a world."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from elastic_train.checkpoint import (
    CommitRecord,
    CommitWriter,
    Retention,
    Role,
    SaveMemory,
    Saves,
    Store,
    discover,
    open_store,
    prune,
)
from elastic_train.checkpoint.commits.reader import ABSENT, read_record, strays_from
from elastic_train.checkpoint.format.layout import leaves_by_path
from elastic_train.checkpoint.interval.cadence import Cadence
from elastic_train.checkpoint.interval.measured import faults_before
from elastic_train.checkpoint.interval.young_daly import Faults
from elastic_train.checkpoint.saving.abandonment import call_abandonable
from elastic_train.checkpoint.stores.deadline import DeadlineStore
from elastic_train.core.lineage import place_of
from elastic_train.job.commit_facts import describe_commit
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.training.session import Process
from elastic_train.world.claims import Own
from elastic_train.world.fencing import StoreFence
from elastic_train.world.restore import parent_of
from elastic_train.world.world import World


def open_cadence(process: Process, world: World, head: CommitRecord | None) -> Cadence:
    """Return the rule by which commits are due; rank 0 knows how often faults have cost steps.

    Worlds may end faster than commits are due, so time since the head counts if the state is ahead of it.
    """
    config = process.plan.config
    past = Faults(0, 0.0)
    if world.is_leader:
        past = process.files.ask(lambda: faults_before(config.run.dir, world.term), past)
    last_at = process.started_at if head is None else head.created_at
    owed_s = max(0.0, time.time() - last_at) if process.state.step > (0 if head is None else head.step) else 0.0
    return Cadence(config.checkpoint, past, owed_s=owed_s)


def open_saves(
    process: Process, world: World, head: CommitRecord | None, versions: Mapping[str, str] | None = None
) -> Saves:
    """Open this rank's saves; every rank that can write takes part, rank 0 always."""
    seen = world.group.all_gather(torch.tensor(int(world.writes))).tolist()
    can = [0, *(rank for rank in range(1, world.group.size) if seen[rank])]
    writers = process.state.pieces.assign(can)
    place = writers.index(world.group.rank) if world.group.rank in writers else None
    retention = process.plan.retention
    store, look = world.save_store, world.keeper.look if world.keeper is not None else lambda parent: None
    return Saves(
        store,
        CommitWriter(store, world.fence, world.term, head, look, versions),
        world.term,
        Role(place, len(writers), world.word),
        process.save_memory,
        tidy=lambda commit: _prune(store, retention, commit),
    )


def _prune(store: Store, retention: Retention, newest: CommitRecord) -> None:
    prune(store, retention, newest=newest)


def commit_alone(
    plan: Plan, state: AppliedState, memory: SaveMemory, published: str | None = None, run_id: str = ""
) -> bool:
    """Commit a state that is ahead of the newest commit, without a world, under its own term.

    `published` is the head that etcd last named to this process; a state that diverged before it is not committed.
    Returns False if this rank does not hold all of the state. Raises StorageError if the storage hangs; a commit that
    it completes later is still valid.
    """
    if not state.pieces.assign_alone():
        return False
    tensors = state.pieces.tree()
    num_bytes = memory.planner.plan(tensors, leaves_by_path(tensors), num_writers=1).parts[0].num_bytes
    call_abandonable(
        lambda on_progress: _commit_alone(plan, state, published, run_id, on_progress),
        memory.timeout.limit_s(num_bytes),
    )
    return True


def _commit_alone(
    plan: Plan, state: AppliedState, published: str | None, run_id: str, on_progress: Callable[[], None]
) -> None:
    store = DeadlineStore(open_store(plan.config.checkpoint_url), on_progress)
    found = discover(store, published=published)
    head, missing = found.head, [key for key, why in found.skipped if why == ABSENT]
    if state.step <= max([head.step if head else 0, *(place[1] for key in missing if (place := place_of(key)))]):
        return  # a start falls back behind a missing commit only if explicitly allowed
    if head is not None and head.key == published and strays_from(state.reached.intervals, head):
        return
    fence = StoreFence(store, Own(run_id))
    # A record of this step was skipped as damaged: this commit replaces it, and does not continue it.
    term, key = fence.claim(), parent_of(store, state, published, state.step - 1)
    writer = CommitWriter(store, fence, term, read_record(store, key) if key else None)
    writer.save(state.pieces.tree(), describe_commit(plan, state, world_size=1), state.reached.intervals)
