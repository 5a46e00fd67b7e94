"""One world from the inside: its group, the term that it claimed, and its right to publish.

The order is the protocol of DESIGN.md: form the group, claim the term, and only then read a commit (fence first, then
restore). Rank 0 makes all decisions that depend on the outside world and sends them, or its errors, to the others, so
that all ranks continue or stop together. Only rank 0 uses etcd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_train.checkpoint.commits.pruning import drop_unfinished, sweep
from elastic_train.checkpoint.saving.store_health import StoreHealth, StoreKeeper
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, Store
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.schema import Config
from elastic_train.core.mesh import Axis, Cell, Mesh
from elastic_train.errors import ConfigError, ElasticTrainError, FencedError, StorageError
from elastic_train.parallel.group import Group
from elastic_train.system.failpoints import reach
from elastic_train.system.file_systems import location_of
from elastic_train.system.preemption import LeaveNow
from elastic_train.system.wording import counted
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import MOST_BYTES, MOST_TERMS, History
from elastic_train.tracking.progress import Progress, ResumeBanner
from elastic_train.tracking.run_folder import CONFIG
from elastic_train.world import one_store
from elastic_train.world.agreement import agree
from elastic_train.world.claims import Own, Rivals, term_key
from elastic_train.world.fencing import CONFIGS, Fence, JoinedFence, StoreFence, forget_old_terms
from elastic_train.world.forming import Formed, own_run_id
from rendezvous.context import RendezvousContext, open_fence
from rendezvous.waiting import begin

FENCE_TIMEOUT_S = 3.0
"""An etcd election takes about a second; without an answer, a commit is still found by its record."""
FENCE_PATIENCE_S, FENCE_PAUSE_S = 10.0, 0.5
"""Seconds that the last write of a job waits for a fence without answer, and between attempts."""

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
    word: str = ""
    """Unique to this world, and equal on all of its ranks."""
    writes: bool = True
    """True if this rank writes parts of commits: its store is the job's, and writable."""
    keeper: StoreKeeper | None = None
    """Keeps the store and the run's folder complete."""
    config_text: str = ""
    """The resolved configuration as YAML, on rank 0."""

    shape: Cell = field(default_factory=Cell)
    """Shape of a replica; by default, one rank."""
    cell: Group | None = None
    """Ranks of this rank's cell, by place; None if every rank is a replica."""
    column: Group | None = None
    """Ranks with this rank's place in all cells; None if every rank is a replica."""
    across_context: Group | None = None
    """Ranks of all cells that differ from this one only in their tokens; None if all compute whole rows."""
    across_experts: Group | None = None
    """Ranks of all cells that differ from this one only in their experts; None if experts are not spread."""

    mesh: Mesh = field(init=False)
    """The ranks' positions in replicas."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh(self.group.rank, self.group.size, self.shape))

    @property
    def replicas(self) -> Group:
        """Ranks with this rank's place in all replicas, which hold the same; numbered by replica."""
        return self.group if self.column is None else self.column

    @property
    def holders(self) -> Group:
        """All ranks that hold the same part of the state as this one, by replica."""
        return self.replicas if self.across_context is None else self.across_context

    @property
    def owners(self) -> Group:
        """One rank of every owner of lanes; numbered by owner."""
        return self.replicas if self.across_experts is None else self.across_experts

    @property
    def is_leader(self) -> bool:
        """True if this rank decides, publishes and reports: rank 0."""
        return self.group.rank == 0

    def announce(self, text: str) -> None:
        """Show one line to people, once for the whole world."""
        if self.progress is not None:
            self.progress.event(text)

    def announce_elsewhere(self, text: str) -> None:
        """Show one line on each node whose first rank is not the leader: nothing else tells that it trains."""
        is_only_node = self.group.size <= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not self.is_leader and not is_only_node and os.environ.get("LOCAL_RANK") == "0":
            with contextlib.suppress(OSError):  # a closed terminal
                sys.stderr.write(f"{text}\n")

    def check_newest(self) -> None:
        """Raise FencedError on rank 0 if a newer term is claimed, to protect what its successors have written.

        Does nothing on other ranks, and if the fence does not answer for a while: peers that have lost it as well may
        have formed another world as soon as it is back.
        """
        if not self.is_leader:
            return
        deadline = time.monotonic() + FENCE_PATIENCE_S
        while True:
            try:
                newest = self.fence.head()
            except StorageError:
                if time.monotonic() >= deadline:
                    return
                time.sleep(FENCE_PAUSE_S)
                continue
            if newest is not None and newest.term > self.term:
                raise FencedError(f"term {newest.term} was claimed, so the result of term {self.term} is not written")
            return

    def close(self) -> None:
        """Leave the last status on the screen, and close files and connections; idempotent."""
        if self.progress is not None:
            self.progress.close()
        self.history.close()
        self.fence.close()


def enter_world(
    config: Config,
    formed: Formed,
    started_at: float,
    files: BackgroundFiles,
    on_progress: Callable[[], None],
    use: StoreHealth,
) -> World:
    """Claim the term of a group that has formed, and clean up after fenced writers.

    `files` writes the history. `use` has this process's knowledge of its store. `on_progress` is called for every
    answer of the store, and every piece of a file.
    """
    reach("form")
    group, launched = formed.group, formed.launched
    save_store = open_store(config.checkpoint_url, config.checkpoint.near_dir)
    store = DeadlineStore(save_store, on_progress)
    fence = _fence(store, group, launched, use, config.run.dir)
    at_least = launched.term if launched else 1

    def begin_term() -> tuple[str | None, int, str, str]:
        bound, term = _tested(store, fence, use.proven), fence.claim(at_least)
        return bound, term, fence.nonce, _word()

    try:
        bound, term, nonce, word = agree(group, begin_term)
        word_of_store = _find_store(group, store, fence, bound, one_store.Claimed(term, nonce), use)
        writes = word_of_store is not None and use.try_again()
    except (ElasticTrainError, LeaveNow):
        fence.close()
        raise
    use.last_term = term
    location = use.location = location_of(config.checkpoint_url)
    history = _open_history(config, formed, files, term, started_at)
    if group.rank == 0:
        try:
            sweep(store, term)
        except StorageError as error:
            log.warning("what fenced writers left could not be removed: %s", error)
        begin("old terms", lambda: _forget_old_terms(save_store, term))  # nothing waits for it
    progress = Progress() if group.rank == 0 else None
    keys = {} if word_of_store is None else {one_store.KEY: word_of_store.encode()}
    keys[term_key(term)] = fence.claimed
    text, texts = "", dict[Path, str]()
    if group.rank == 0:  # the only rank that checks them; the text takes a while
        text = config.to_yaml()
        texts[Path(config.run.dir) / CONFIG] = text
        if config.checkpoint.url is not None:
            keys[f"{CONFIGS}{term:08d}.yaml"] = text.encode()
    keeper = StoreKeeper(save_store, keys, location, files, texts)
    at = time.time()
    return World(group, term, store, fence, history, progress, launched, at, save_store, word, writes, keeper, text)


def _open_history(config: Config, formed: Formed, files: BackgroundFiles, term: int, started_at: float) -> History:
    """Return this rank's history of a term, which begins with how the world formed."""
    launched, history = formed.launched, History(files, config.run.dir, term, formed.group.rank, MOST_BYTES)
    history.form(
        world=formed.group.size,
        cause=launched.cause if launched else "start",
        joined_at=launched.joined_at if launched else None,
        sealed_at=launched.sealed_at if launched else None,
        started_at=started_at,
    )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        history.prune(max(MOST_TERMS, config.give_up_after_worlds or 0))
    return history


def form_cells(world: World, parallel: ParallelConfig) -> World:
    """Return the world divided into cells, with this rank's groups; raise ConfigError if cells would be incomplete.

    All ranks must have been checked to have the same shape.
    """
    shape = parallel.cell
    if shape.size == 1:
        return world
    if world.group.size % shape.size:
        raise ConfigError(
            f"a world of {counted(world.group.size, 'rank')} is not of whole cells of {shape.size} "
            f"({parallel.set_degrees}): start a multiple of {shape.size} workers"
            f"{' on each node' if shape.stage == 1 else '; with --recovery live others wait as spares'}, or set it to 1"
        )
    mesh = Mesh(world.group.rank, world.group.size, shape)
    first = mesh.replica * shape.size
    cell = world.group.part(f"cell-{mesh.replica}", range(first, first + shape.size))
    column = world.group.part(f"column-{mesh.place}", mesh.column)
    context, experts = (_across(world.group, mesh, axis) for axis in ("context", "expert"))
    return replace(world, shape=shape, cell=cell, column=column, across_context=context, across_experts=experts)


def _across(group: Group, mesh: Mesh, axis: Axis) -> Group | None:
    """Return the ranks that differ from this one along one axis only; None if a cell has just one such rank."""
    ranks = mesh.across(axis)
    if len(ranks) == mesh.num_replicas:
        return None
    return group if len(ranks) == group.size else group.part(f"{axis}-{ranks[0]}", ranks)


def _word() -> str:
    return uuid.uuid4().hex[:12]


def _tested(store: Store, fence: Fence, proven: set[str]) -> str | None:
    """Return the word of the job's store, None if it has none yet.

    Raise ConfigError if the store is unfit for a lineage.
    """
    bound = fence.bind(None)
    if bound is not None and bound not in proven and one_store.proves_itself(store, bound):
        proven.add(bound)
    return bound


def _find_store(
    group: Group, store: Store, fence: Fence, bound: str | None, claimed: one_store.Claimed, use: StoreHealth
) -> str | None:
    """Return the word of the job's store if this rank sees it.

    Raise ConfigError, on this rank only, if it sees another. `bound` is the word of the job's store, None if it has
    none yet; rank 0 has `claimed` the world's term there. The result is None if this rank's store does not answer. If
    rank 0 has trained with the store and its word is lost, it is restored.
    """
    is_leader, look = group.rank == 0, one_store.check
    if bound is None:
        bound, sees_it = one_store.choose(group, store)
        if is_leader and bound is not None:
            one_store.proves_itself(store, bound)
            fence.bind(bound)
        if is_leader or not sees_it or bound is None:
            return bound if sees_it else None
        look = one_store.check_first
    try:
        look(store, bound, group.check, None if is_leader else claimed)
    except ConfigError:
        is_same_place = use.location is not None and use.location == location_of(store.url)
        if not (is_leader and is_same_place and one_store.mend(store, bound)):
            raise
    except StorageError as error:
        log.warning("this rank writes no part of this world's commits: %s", error)
        return None
    return bound


def _forget_old_terms(store: Store, term: int) -> None:
    with contextlib.suppress(StorageError):  # the next world tries again
        forget_old_terms(store, term)
    try:
        if keys := drop_unfinished(store):
            log.info("%s: aborted %d uploads that killed processes had left, such as %s", store.url, len(keys), keys[0])
    except StorageError as error:
        log.info("uploads that killed processes left are not aborted, the bucket's lifecycle rules may: %s", error)


def _fence(
    store: Store, group: Group, launched: RendezvousContext | None, use: StoreHealth, run_dir: str
) -> StoreFence | JoinedFence:
    """Return the fence of a job in its folder; claiming a term checks that no other job is running there."""
    own = Own(own_run_id(), ",".join(launched.endpoints) if launched else "", lambda: fence.head())
    rivals = Rivals(store, run_dir, own, use.last_term, lambda other: fence.num_members(other))
    fence: StoreFence | JoinedFence = StoreFence(store, own, rivals.check)
    if launched and group.rank == 0:
        fence = JoinedFence(store, open_fence(launched, give_up_after_s=FENCE_TIMEOUT_S), own, rivals.check)
    return fence


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a world's state: a commit or its members, its step, and a commit's age.

    `lost_step` is the step of a newer commit that is missing and whose loss was accepted; 0 without one.
    """

    name: str
    step: int
    age_s: float | None
    lost_step: int = 0


def banner_of(world: World, source: Source, skipped: Sequence[tuple[str, str]], seconds: float) -> ResumeBanner | None:
    """Return the cost of a resume, as far as earlier histories record it; None at a run's beginning."""
    last = world.history.last_applied()
    if source.step == 0 and last is None and not source.lost_step:
        return None
    joined_at = world.launched.joined_at if world.launched else None
    furthest = max(source.lost_step, last.step if last else 0)
    return ResumeBanner(
        commit=source.name,
        step=source.step,
        age_s=source.age_s,
        steps_lost=furthest - source.step if furthest >= source.step else None,  # histories may be lost, or elsewhere
        world_before=last.world if last else None,
        world_after=world.group.size,
        term_before=last.term if last else None,
        term_after=world.term,
        detect_s=max(0.0, joined_at - last.at) if last and joined_at else None,
        form_s=world.formed_at - joined_at if joined_at else None,
        restore_s=seconds,
        skipped=tuple(skipped),
    )
