"""One world from the inside: the group that formed, the term that it claimed, and what it may publish.

The order is the protocol of DESIGN.md: form the group, claim the term, and only then read a commit (fence first, then
restore). Decisions that read the outside world are rank 0's; it tells the others, its errors included, so that all
ranks go on alike or stop alike. Rank 0 alone speaks to etcd.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from elastic_train import errors
from elastic_train.checkpoint import CommitRecord, Store, discover, load, open_store, sweep
from elastic_train.checkpoint.commits.reader import DAMAGE, read_record, records
from elastic_train.checkpoint.stores.deadline import DeadlineStore
from elastic_train.config.schema import Config
from elastic_train.core.accounting import Account
from elastic_train.core.lineage import Interval, cut, parted_at
from elastic_train.errors import ElasticTrainError, StorageError
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState, Reached
from elastic_train.parallel.group import Group
from elastic_train.system.failpoints import reach
from elastic_train.tracking.history import History, last_applied
from elastic_train.tracking.progress import Progress, ResumeBanner
from elastic_train.world.fencing import Fence, JoinedFence, StoreFence
from elastic_train.world.forming import Formed
from elastic_train.world.handover import gather_places, hand_over
from rendezvous.context import RendezvousContext, open_fence

FENCE_TIMEOUT_S = 3.0
"""An election of etcd's takes about a second; a commit that etcd does not answer to is found by its record anyway."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that train together under one term."""

    group: Group
    term: int
    store: Store
    fence: Fence
    history: History
    progress: Progress | None
    launched: RendezvousContext | None
    formed_at: float
    save_store: Store
    """The same store without deadlines: a save that hangs is abandoned as a whole."""

    @property
    def is_leader(self) -> bool:
        """Say whether this rank decides, publishes and shows: rank 0."""
        return self.group.rank == 0

    def tell(self, text: str) -> None:
        """Show one line to people, once for the whole world."""
        if self.progress is not None:
            self.progress.event(text)

    def close(self) -> None:
        """Leave the last status on the screen, and let go of files and connections; once more does nothing."""
        if self.progress is not None:
            self.progress.close()
        self.history.close()
        self.fence.close()


def enter_world(config: Config, formed: Formed, started_at: float, on_progress: Callable[[], None]) -> World:
    """Claim the term of a group that has formed; sweep what fenced writers left behind.

    `on_progress` is called for every answer of the store, and every piece of a file.
    """
    reach("form")
    group, launched = formed.group, formed.launched
    save_store = open_store(config.checkpoint_url, config.checkpoint.near_dir)
    store = DeadlineStore(save_store, on_progress)
    fence: Fence = _joined(store, launched) if launched and group.rank == 0 else StoreFence(store)
    at_least = launched.term if launched else 1
    try:
        term = agree(group, lambda: fence.claim(at_least))
    except ElasticTrainError:
        fence.close()
        raise
    history = History(config.run.dir, term, group.rank)
    history.form(
        world=group.size,
        cause=launched.cause if launched else "start",
        joined_at=launched.joined_at if launched else None,
        sealed_at=launched.sealed_at if launched else None,
        started_at=started_at,
    )
    if group.rank == 0:
        try:
            sweep(store, term)
        except StorageError as error:
            log.warning("what fenced writers left could not be removed: %s", error)
    progress = Progress() if group.rank == 0 else None
    return World(group, term, store, fence, history, progress, launched, time.time(), save_store)


def _joined(store: Store, launched: RendezvousContext) -> Fence:
    return JoinedFence(store, open_fence(launched, give_up_after_s=FENCE_TIMEOUT_S))


def restore(plan: Plan, world: World, state: AppliedState) -> CommitRecord | None:
    """Bring every rank to the furthest applied step: a member's, or the newest valid commit's if that is further.

    Returns the commit that the next one continues, None at the beginning of a run.
    """
    started = time.perf_counter()
    reach("restore")
    before = state.reached.intervals
    places = gather_places(world.group, state)
    if max(places).step > 0:
        term, fields = agree(world.group, lambda: _published(world))
        published = [Interval(*interval) for interval in fields]
        places = gather_places(world.group, state, counts=state.reached.term > term or _is_of(published, state))
    furthest = max(places)
    key, skipped = agree(world.group, lambda: _find_head(world, furthest.step))
    head = read_record(world.store, key) if key else None
    given_by = None
    is_loaded = head is not None and head.step > furthest.step
    if head is not None:
        plan.check_continues(head)
    if head is not None and is_loaded:
        _load(world.store, head, state)
    else:
        given_by = hand_over(world.group, state, places)
        key = agree(world.group, lambda: parent_of(world.store, state))
        head = read_record(world.store, key) if key else None
    seconds = time.perf_counter() - started
    source = Source("the members' own state" if state.step else "the beginning", state.step, None)
    if head is not None and is_loaded:
        source = Source(head.key, head.step, time.time() - head.created_at)
    banner = _banner(plan, world, source, [(name, why) for name, why in skipped], seconds) if world.is_leader else None
    intervals = state.reached.intervals
    if before and (kept := parted_at(before, intervals)) < before[-1].hi:
        world.history.rollback(from_step=before[-1].hi, to_step=kept)
    world.history.restore(
        step=state.step,
        epoch=state.cursor.epoch,
        offset=state.cursor.offset,
        commit=key,
        given_by=given_by,
        applied_by=state.reached.term or None,
        seconds=seconds,
        skipped=[(name, why) for name, why in skipped],
        resumed=asdict(banner) if banner else None,
    )
    if banner is not None and world.progress is not None:
        world.progress.banner(banner)
    return head


def _load(store: Store, head: CommitRecord, state: AppliedState) -> None:
    account = head.account or Account()
    reached = Reached(head.step, head.cursor, head.coverage, head.intervals, head.metrics, account)
    try:
        # Every rank reads the commit, and all of them have one configuration; a member's state brings its rates along.
        state.restore(lambda tensors: load(store, head, tensors), reached, keeps_rates=True)
    except StorageError as error:
        # The state is neither the old nor the new one: nothing but a new process may go on from here.
        raise ElasticTrainError(f"{head.key} could not be read to its end: {error}") from error


def _published(world: World) -> tuple[int, list[tuple[int, int, int]]]:
    """Return term and intervals of the newest commit of a world that can be read; 0 and none if there is none.

    The fence may not have heard of it, and a listing may lack the one that the fence names. A state of a newer term
    counts whatever it goes on from: its world was fenced off from that commit, and so knew it. It goes on from it, or
    has passed over it because it was damaged. What a process has committed alone takes nobody's state away: it applied
    no step in the term that it claimed for it.
    """
    claimed = world.fence.head()
    readable = (record for _, record, _ in records(world.store) if record)
    newest = next(
        (record for record in readable if record.intervals and record.intervals[-1].term == record.term), None
    )
    if claimed and claimed.commit:
        with contextlib.suppress(*DAMAGE):
            named = read_record(world.store, claimed.commit)
            newest = max(named, newest or named, key=lambda record: (record.term, record.step))
    return (newest.term, [(i.term, i.lo, i.hi) for i in newest.intervals]) if newest else (0, [])


def _is_of(published: Sequence[Interval], state: AppliedState) -> bool:
    """Say whether a state and a published commit are of one lineage.

    Who was frozen while others went on from an earlier commit, and published, may be further, on a dead branch.
    """
    mine = state.reached.intervals
    common = min(state.step, published[-1].hi if published else 0)
    return cut(mine, common) == cut(published, common)


def parent_of(store: Store, state: AppliedState, most: int | None = None) -> str | None:
    """Return the newest commit that the state goes on from, of its step or `most`, or of an earlier one.

    A fenced writer's late record is no ancestor of it.
    """
    mine, limit = state.reached.intervals, state.step if most is None else most
    found = (r for _, r, _ in records(store) if r and r.step <= limit and r.intervals == cut(mine, r.step))
    return next((record.key for record in found), None)


def agree(group: Group, decide: Callable[[], T]) -> T:
    """Let rank 0 decide and tell the others; if it fails, every rank raises an error of the same kind.

    What `decide` returns must be made of JSON's types (a tuple arrives as a list).
    """
    if group.rank == 0:
        try:
            value = decide()
        except ElasticTrainError as error:
            group.broadcast_object({"error": _public_name(error), "message": str(error)}, 0)
            raise
        group.broadcast_object({"value": value}, 0)
        return value
    answer = group.broadcast_object(None, 0)
    assert isinstance(answer, dict), "rank 0 sends a value or an error"
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]  # type: ignore[no-any-return]


def _public_name(error: ElasticTrainError) -> str:
    """Return the name of the nearest class that errors.py has; rooms have finer ones of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))


def has_equal_kernels(group: Group, device: torch.device) -> bool:
    """Say whether all ranks compute on the same kind of device with the same library, so that bits can be equal."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    mine = torch.tensor([zlib.crc32(f"{device.type} {name} {torch.__version__}".encode())])
    return bool((group.all_gather(mine) == mine).all())


def _find_head(world: World, furthest: int) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the newest commit's key, and what was passed over; a commit that nobody will load is not read in full."""
    if furthest > 0:
        newest = next((record for _, record, _ in records(world.store) if record), None)
        if newest is None or newest.step <= furthest:
            return (newest.key if newest else None), []
    claimed = world.fence.head()
    found = discover(world.store, published=claimed.commit if claimed else None)
    return (found.head.key if found.head else None), list(found.skipped)


@dataclass(frozen=True, slots=True)
class Source:
    """What a world goes on from: a commit or its members' state, its step, and a commit's age."""

    name: str
    step: int
    age_s: float | None


def _banner(
    plan: Plan, world: World, source: Source, skipped: list[tuple[str, str]], seconds: float
) -> ResumeBanner | None:
    """Return what a resumption cost, as far as the histories of earlier terms tell; None at a run's beginning."""
    last = last_applied(plan.config.run.dir, before_term=world.term)
    if source.step == 0 and last is None:
        return None
    joined_at = world.launched.joined_at if world.launched else None
    return ResumeBanner(
        commit=source.name,
        step=source.step,
        age_s=source.age_s,
        steps_lost=max(0, last.step - source.step) if last else None,
        world_before=last.world if last else None,
        world_after=world.group.size,
        term_before=last.term if last else None,
        term_after=world.term,
        detect_s=max(0.0, joined_at - last.at) if last and joined_at else None,
        form_s=world.formed_at - joined_at if joined_at else None,
        restore_s=seconds,
        skipped=tuple(skipped),
    )
