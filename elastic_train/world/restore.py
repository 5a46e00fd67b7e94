"""The start of a world: at the furthest applied step, from a member or from the newest valid commit.

Rank 0 reads the fence and the store and decides; all ranks then load one commit, or get the state from the members that
hold it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from elastic_train.checkpoint.commits.reader import (
    ABSENT,
    continues,
    damage_of,
    discover,
    exists,
    load,
    read_record,
    records,
)
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.stores.store import Store
from elastic_train.core.accounting import SampleAccount
from elastic_train.core.lineage import Interval, cut, parted_at, place_of
from elastic_train.errors import CommitError, ConfigError, ElasticTrainError, StateLostError, StorageError
from elastic_train.job.peer_states import PeerState, gather_peer_states, leave_out_unfinished, roll_forward
from elastic_train.job.plan import Plan
from elastic_train.job.plan_facts import config_of, describe_changes
from elastic_train.job.reshard import is_first, take_first_seat, take_state
from elastic_train.job.state import AppliedState, TrainProgress
from elastic_train.job.state_shards import Place, StateShards
from elastic_train.system.failpoints import reach
from elastic_train.world.agreement import agree
from elastic_train.world.equal_weights import begin_alike, level
from elastic_train.world.fencing import Fence
from elastic_train.world.forming import own_path
from elastic_train.world.world import Source, World, banner_of


def restore(plan: Plan, world: World, state: AppliedState, before: Sequence[Interval] = ()) -> CommitRecord | None:
    """Bring every rank to the furthest applied step: a member's, or the newest valid commit's if that is further.

    `before` is this rank's history as it came, to report what it gives up; a rank with a new place has already lost it.
    Returns the commit that the next one continues, None at the beginning of a run.
    """
    started = time.perf_counter()
    reach("restore")
    # Rank 0 asks once: only this world's term can publish now.
    published = functools.cache(lambda: named(world.fence))
    known = _KnownCommits(world, published, plan.config.checkpoint.accept_loss)
    found = _find(plan, world, state, known)
    if found.head is not None:
        plan.check_continues(found.head)
    found = _take_state(plan, world, state, found, known)
    if not found.is_loaded:
        found = replace(found, head=_parent(world, state, found, published))
    if found.head is not None and world.is_leader and published() != found.head.key:
        with contextlib.suppress(StorageError):  # if the fence does not hear of it now, it will with the next commit
            world.fence.publish(world.term, found.head.key)
    _report(world, state, found, before, time.perf_counter() - started, known.accepted_step)
    return found.head


@dataclass(frozen=True, slots=True)
class _Found:
    """The possible starts of a world: its members' states, and the newest commit, which `is_loaded` if it is further.

    States outside the lineage are excluded. `skipped` are commits that were passed over. `given_by` is the rank that
    sent this one its state. `num_lost` is the number of shards that no rank holds.
    """

    brought: Sequence[PeerState]
    head: CommitRecord | None
    skipped: tuple[tuple[str, str], ...]
    given_by: int | None = None
    is_loaded: bool = False
    num_lost: int = 0


class _KnownCommits:
    """Commits that the store should have, on rank 0: according to the fence, and to the run's folder.

    A store that was restored from a backup, or has lost files, lacks the newest of them. Its steps were committed, so a
    world that would go back refuses to begin until the loss of that commit is accepted explicitly.
    """

    def __init__(self, world: World, published: Callable[[], str | None], accepted: str | None) -> None:
        self._world, self.published, self._accepted = world, published, accepted
        self.accepted_step = 0

    def check(self, step: int, head: str | None, skipped: Sequence[tuple[str, str]] = ()) -> None:
        """Return if a world may begin with a step, where `head` is the newest commit found.

        Raise ConfigError otherwise. Damaged commits, which are among the `skipped`, are not missing.
        """
        world, newest_here = self._world, (place_of(head) if head else None) or (0, 0)
        damaged = {key for key, why in skipped if why != ABSENT}
        named = {"etcd": self.published(), world.history.folder: world.history.newest_commit()}
        for by, key in named.items():
            term, lost = (place_of(key) if key else None) or (0, 0)
            if key is None or lost <= step or (term, lost) <= newest_here or key in damaged:
                continue
            if exists(world.store, key):
                continue
            if self._accepted == f"{term}-{lost}":
                self.accepted_step = max(self.accepted_step, lost)
                continue
            raise ConfigError(_refusal_to_go_back(world.store.url, by, key, lost, step, f"{term}-{lost}"))


def _refusal_to_go_back(url: str, by: str, key: str, lost: int, step: int, value: str) -> str:
    where = f"step {step} is the newest that {url} has" if step else f"{url} has no commit at all"
    return (
        f"{by} names {key} (step {lost}) as this run's newest commit, and {url} does not have it: {where}. Was it "
        f"restored from a backup, or is another folder mounted there? Going back would lose {lost - step} committed "
        f"steps, so nothing was trained. Restore that commit (its record, and its files below data/), or "
        f"accept the loss: checkpoint.accept_loss={value} (--checkpoint.accept_loss {value}, or "
        f"ELASTIC_TRAIN__CHECKPOINT__ACCEPT_LOSS={value}), which holds for this commit alone"
    )


def _find(plan: Plan, world: World, state: AppliedState, known: _KnownCommits) -> _Found:
    published, path = known.published, own_path()
    brought: Sequence[PeerState] = gather_peer_states(world.group, state, path, may_hold=world.writes)
    if _furthest(brought).step > 0:
        term, fields = agree(world.group, lambda: _newest(world, published()))
        lineage = [Interval(*interval) for interval in fields]
        counts = state.reached.term > term or _is_of(lineage, state)
        counted = world.group.all_gather(torch.tensor(int(counts))).flatten().tolist()
        brought = [one if is_one else one.without_state() for one, is_one in zip(brought, counted, strict=True)]
    furthest = _furthest(brought).step
    key, skipped = agree(world.group, lambda: _find_head(world.store, published(), furthest, known))
    head = read_record(world.store, key) if key else None
    is_loaded = head is not None and head.step > furthest
    return _Found(brought, head, tuple((name, why) for name, why in skipped), is_loaded=is_loaded)


def _parent(
    world: World, state: AppliedState, found: _Found, published: Callable[[], str | None]
) -> CommitRecord | None:
    """Return the newest commit that the members' state continues.

    Usually that is the newest of all. Others may have deleted it if this world was frozen meanwhile.
    """
    head = found.head if not found.skipped else None
    if head is not None and continues(state.reached.intervals, head):
        return head
    key = agree(world.group, lambda: parent_of(world.store, state, published()))
    return read_record(world.store, key) if key else None


def _furthest(brought: Sequence[PeerState]) -> Place:
    """Return the progress of the furthest rank."""
    return max(one.place for one in brought)


def _load_head(plan: Plan, world: World, state: AppliedState, found: _Found) -> None:
    assert found.head is not None, "there is a commit to load"
    _load(world.store, plan, found.head, state)
    _say_if_clipping_rounds_otherwise(plan, world, found.head)
    if state.changes is not None:
        world.announce(f"{found.head.key} was trained with another configuration: {state.changes}")


def _take_state(plan: Plan, world: World, state: AppliedState, found: _Found, known: _KnownCommits) -> _Found:
    """Bring this rank to the furthest complete step; return the start, with its source."""
    shards, brought = state.shards, found.brought
    if not found.is_loaded:
        kept, num_lost = leave_out_unfinished(shards.table, brought)
        furthest, whole = _furthest(brought), _furthest(kept)
        if whole < furthest:
            if shards.table.is_whole:
                num_ranks = world.mesh.cell.size
                what = f"every cell has lost the same part of the state ({num_ranks} ranks hold it together)"
            else:
                copies = plan.config.parallel.copies
                what = f"all holders of {num_lost} of the state's shards are lost (parallel.copies: {copies})"
            found = _find_after_loss(plan, world, found, known, what, num_lost, whole.step)
        brought = kept
    if found.is_loaded:
        state.drop_pending()
        take_first_seat(world.holders, shards, brought)
        _load_head(plan, world, state, found)
    else:
        brought = roll_forward(world.group, state, brought)
        if is_first(shards.table, brought):
            _begin_alike(world, shards)
        taken = take_state(world.holders, state, brought)
        if taken.lost.size:
            raise StateLostError(
                "all holders of some of the first weights are lost, before the first step: start again"
            )
        if shards.table.is_whole and taken.given_by is not None:
            found = replace(found, given_by=world.mesh.by_part[shards.table.part][taken.given_by])
        if state.reached.is_fast:
            level(world.holders, state)
    shards.share.agree_on_order(world.group, shards.order)
    shards.trained_in = world.term
    return found


def _begin_alike(world: World, shards: StateShards) -> None:
    """Make all ranks begin a run with the same weights."""
    cuts = shards.cut.cuts
    if cuts:
        of_part = {name: one for name, one in shards.share.model.state_dict().items() if name in cuts}
        begin_alike(world.holders, of_part, world.announce)
    alike = {name: one for name, one in shards.share.weights().items() if name not in cuts}
    begin_alike(world.group, alike, world.announce)


def _find_after_loss(
    plan: Plan, world: World, found: _Found, known: _KnownCommits, what: str, num_lost: int, whole: int
) -> _Found:
    """Return the start of a world in which some members are ahead of the complete state, which is at step `whole`.

    `what` describes the cause. The start is the newest commit if that is further. If it is as far as the furthest
    member, nothing was lost: that member had loaded it when its world ended.
    """
    named_key = found.head.key if found.head else None
    key, skipped = agree(world.group, lambda: _find_head(world.store, named_key, 0, known, whole))
    head = read_record(world.store, key) if key else None
    if head is None and whole == 0:
        raise StateLostError(f"{what}, and there is no commit yet: start again from the beginning")
    if head is not None and head.step > whole:
        plan.check_continues(head)
        skips = (*found.skipped, *((name, why) for name, why in skipped))
        found, whole = replace(found, head=head, skipped=skips, is_loaded=True), head.step
    if num_lost and whole < (step := _furthest(found.brought).step):
        world.announce(f"{what}: step {step} cannot be restored, training resumes from step {whole}")
        return replace(found, num_lost=num_lost)
    return found


def _report(
    world: World, state: AppliedState, found: _Found, before: Sequence[Interval], seconds: float, lost_step: int
) -> None:
    """Record the world's start, and what was given up, in the history; show the cost of a resume on rank 0."""
    head = found.head
    source = Source("the members' own state" if state.step else "the beginning", state.step, None)
    if head is not None and found.is_loaded:
        source = Source(head.key, head.step, time.time() - head.created_at)
    source = replace(source, lost_step=lost_step)
    banner = banner_of(world, source, found.skipped, seconds) if world.is_leader else None
    intervals = state.reached.intervals
    if before and (kept := parted_at(before, intervals)) < before[-1].hi:
        world.history.rollback(from_step=before[-1].hi, to_step=kept)
    world.history.restore(
        step=state.step,
        epoch=state.reached.cursor.epoch,
        offset=state.reached.cursor.offset,
        commit=head.key if head else None,
        given_by=found.given_by,
        applied_by=state.reached.term or None,
        seconds=seconds,
        skipped=list(found.skipped),
        resumed=asdict(banner) if banner else None,
        num_lost=found.num_lost,
        holds_nothing=state.shards.table.holds_nothing,
    )
    if banner is not None and world.progress is not None:
        world.progress.banner(banner)


def _say_if_clipping_rounds_otherwise(plan: Plan, world: World, head: CommitRecord) -> None:
    if not head.is_by_grains and plan.config.optimizer.clip_norm is not None:
        world.announce(
            f"{head.key} is of an older version, which computed the norm of gradients otherwise: a step that clips "
            "rounds otherwise from here on, so the weights are not those that the older version would end with"
        )


def _load(store: Store, plan: Plan, head: CommitRecord, state: AppliedState) -> None:
    account = head.account or SampleAccount()
    reached = TrainProgress(
        head.step,
        head.cursor,
        head.coverage,
        head.intervals,
        head.metrics,
        account,
        head.fast_steps or (),
        head.skipped_steps or (),
        sources=tuple(source.coverage for source in head.sources or ()),
        improvement=head.improvement,
    )
    try:
        # Every rank reads the commit, and all have one configuration; a member's state includes its rates.
        state.restore(lambda tensors: load(store, head, tensors), reached, keeps_rates=True)
    except ConfigError as error:  # another optimizer's state
        keys = "optimizer.name", "optimizer.options"
        changed = describe_changes(plan.config, config_of(plan.config, head.term), only=keys)
        raise ConfigError("; ".join([f"{head.key}: {error}", *changed])) from error
    except StorageError as error:
        # The state is neither the old nor the new one: only a new process may continue from here.
        raise ElasticTrainError(f"{head.key} could not be read to its end: {error}") from error
    except CommitError as error:
        if damage_of(store, head.key) is None:
            raise  # it is complete, but does not fit this job
        what = f"{head.key} was damaged after it was checked: {error}"
        raise ElasticTrainError(f"{what}. The next start passes over it") from error


def _newest(world: World, published: str | None) -> tuple[int, list[tuple[int, int, int]]]:
    """Return term and intervals of the newest readable commit of a world; 0 and [] if there is none.

    The fence may not know it, and a listing may lack the one that the fence names. A state of a newer term counts
    regardless: its world was fenced from that commit, and so knew it, and either continues it or skipped it as damaged.
    Commits made without a world (no step applied in their own term) invalidate no other state.
    """
    readable = (record for _, record, _ in records(world.store, published) if record)
    newest = next((r for r in readable if r.key == published or (r.intervals and r.intervals[-1].term == r.term)), None)
    return (newest.term, [(i.term, i.lo, i.hi) for i in newest.intervals]) if newest else (0, [])


def _is_of(published: Sequence[Interval], state: AppliedState) -> bool:
    """Return True if a state and a published commit are of one lineage.

    A rank that was frozen while others continued from an earlier commit and published may be further, on a dead branch.
    """
    mine = state.reached.intervals
    common = min(state.step, published[-1].hi if published else 0)
    return cut(mine, common) == cut(published, common)


def named(fence: Fence) -> str | None:
    """Return the key of the commit that the fence names as head, listed in the store or not; None if it names none."""
    claimed = fence.head()
    return claimed.commit if claimed else None


def parent_of(store: Store, state: AppliedState, published: str | None, most: int | None = None) -> str | None:
    """Return the newest commit that the state continues, up to its step or `most`.

    `published` is the fence's head, if any: it counts even if it is not listed. A fenced writer's late record is not an
    ancestor of it.
    """
    mine, limit = state.reached.intervals, state.step if most is None else most
    found = (r for _, r, _ in records(store, published) if r and r.step <= limit and continues(mine, r))
    return next((record.key for record in found), None)


def _find_head(
    store: Store, published: str | None, furthest: int, known: _KnownCommits, whole: int = 0
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the newest commit's key, and the skipped ones; a commit that will not be loaded is not read in full.

    Raises ConfigError if `known` has a newer one than the start of the world: that commit, or the members' state, which
    is at `furthest`, complete up to `whole`.
    """
    if furthest > 0:
        newest = next((record for _, record, _ in records(store, published) if record), None)
        if newest is None or newest.step <= furthest:
            key = newest.key if newest else None
            known.check(furthest, key)
            return key, []
    found = discover(store, published=published)
    key, step = (found.head.key, found.head.step) if found.head else (None, 0)
    known.check(max(step, whole), key, found.skipped)
    return key, list(found.skipped)
