"""Open a session's saves, their cadence, and its displays for people: trackers, page, traces, and rank 0's watch.

A state can also be committed without a world. The FLOPs per sample are counted at process start, for MFU, unless the
device's peak is unknown: in one forward pass without gradients. A backward pass takes as much for the inputs, and as
much again for the trained weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from elastic_train.checkpoint.commits.pruning import prune
from elastic_train.checkpoint.commits.reader import (
    ABSENT,
    Discovery,
    commit_keys,
    discover,
    read_record,
    readable,
    strays_from,
)
from elastic_train.checkpoint.commits.record import CommitRecord
from elastic_train.checkpoint.commits.writer import CommitWriter
from elastic_train.checkpoint.format.layout import leaves_by_path
from elastic_train.checkpoint.saving.background_saves import Role, SaveMemory, Saves
from elastic_train.checkpoint.saving.cadence import Cadence, Faults, faults_before
from elastic_train.checkpoint.saving.save_thread import call_abandonable
from elastic_train.checkpoint.stores.open import open_store
from elastic_train.checkpoint.stores.store import DeadlineStore, Store
from elastic_train.config.schema import Config
from elastic_train.core.lanes import Assignment
from elastic_train.core.lineage import place_of
from elastic_train.data.dataset.manifest import check_there
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import CommitError, ConfigError, DataError, StorageError
from elastic_train.insight.page import Facts, Page
from elastic_train.insight.phases import FILE as UTILISATION
from elastic_train.insight.phases import StepClock, Utilisation
from elastic_train.insight.tracing import Tracer
from elastic_train.job.plan import Plan
from elastic_train.job.state import AppliedState
from elastic_train.job.units.blocks import unit_names
from elastic_train.job.warm_up import FIRST_LOSS, meta_model, unchanged, warm_up
from elastic_train.parallel.gradient_sum import GradientSum
from elastic_train.system.preemption import LeaveNow, StepDropped
from elastic_train.system.wording import first_line
from elastic_train.tasks.task import on_device
from elastic_train.tracking.delivery import Destination
from elastic_train.tracking.destinations.event_files import EventFiles
from elastic_train.tracking.destinations.weights_and_biases import WeightsAndBiases
from elastic_train.tracking.history_files import host_in
from elastic_train.tracking.mlflow_run import (
    COMMIT_TAG,
    HOSTS_TAG,
    IDENTITY_TAG,
    WORLD_TAG,
)
from elastic_train.tracking.tracker import Tracker
from elastic_train.training.commits import describe_commit
from elastic_train.training.memory import MemoryWatch, held_by
from elastic_train.training.session import Process
from elastic_train.training.watch import Watch
from elastic_train.world.claims import Own
from elastic_train.world.fencing import CONFIGS, StoreFence
from elastic_train.world.restore import parent_of
from elastic_train.world.world import World

log = logging.getLogger(__name__)
PHASES_EVERY_STEPS = 50
"""Steps between two rows of each rank's seconds per phase, and of its memory, in the history."""


@dataclass(frozen=True)
class Planning:
    """Makes the plan when it is iterated; raises AwayError in a run that has trained before, if its data is away."""

    config: Config
    make: Callable[[Config], Plan]

    def __iter__(self) -> Iterator[Plan]:
        try:
            plan = self.make(self.config)
        except (ConfigError, DataError):
            if not _has_trained(self.config.run.dir):
                raise
            for url in (*self.config.data.sources, *filter(None, [self.config.data.validation])):
                check_there(url)
            plan = self.make(self.config)  # the storage may just have come back
        yield plan


def _has_trained(run_dir: str) -> bool:
    """Return True if a history of the run has a step."""
    return any(b'"op": "step"' in path.read_bytes() for path in (Path(run_dir) / "history").glob("*"))


def start_tracker(process: Process, world: World, head: CommitRecord | None) -> Tracker | None:
    """Start the tracker on rank 0, and store the resolved configuration with the commits."""
    if not world.is_leader:
        return None
    config, folder = process.plan.config, Path(process.plan.config.run.dir)
    process.files.replace(folder / "config.yaml", world.config_text)
    if process.utilisation is not None:
        process.files.replace(folder / UTILISATION, process.utilisation.to_json())
    if config.checkpoint.url is not None:
        try:
            world.store.create(f"{CONFIGS}{world.term:08d}.yaml", world.config_text.encode())
        except StorageError as error:
            world.announce(f"the configuration cannot be stored with the commits, training continues: {error}")
    return Tracker.start(
        files=process.files,
        run_dir=folder,
        term=world.term,
        config=config.as_written.model_dump(mode="json"),
        mlflow_uri=config.tracking.mlflow_uri,
        experiment=config.tracking.experiment,
        run_name=config.run_name,
        others=_other_trackers(config),
        intervals=process.state.reached.intervals,
        settled=head.step if head else 0,
        tags={
            WORLD_TAG: str(world.group.size),
            HOSTS_TAG: str(world.launched.num_nodes) if world.launched else os.environ.get("GROUP_WORLD_SIZE", "1"),
            IDENTITY_TAG: config.identity(),
            **({COMMIT_TAG: head.key} if head else {}),
        },
    )


def _other_trackers(config: Config) -> list[Destination]:
    keys, folder = config.tracking, Path(config.run.dir)
    found: list[Destination] = [EventFiles(folder)] if keys.tensorboard else []
    if keys.wandb is not None:
        tree = config.as_written.model_dump(mode="json")
        found.append(WeightsAndBiases(folder, tree, keys.wandb, keys.experiment, config.run_name))
    return found


def open_watch(process: Process, world: World, tracker: Tracker | None, assigned: Assignment) -> Watch | None:
    """Return rank 0's watch over all ranks' rows; None on other ranks."""
    if not world.is_leader:
        return None
    config, term = process.plan.config, world.term

    def host_of(rank: int) -> str | None:
        return process.files.ask(lambda: host_in(config.run.dir, term, rank), None)

    keys = config.monitoring
    num_lanes = world.mesh.num_lanes(assigned)
    every, actions, drop = PHASES_EVERY_STEPS, keys.on_event, process.worlds.drop
    return Watch(world, tracker, process.totals, every, num_lanes, actions, host_of, drop, followed=process.followed)


def open_memory_watch(process: Process, world: World, gradients: GradientSum) -> MemoryWatch:
    held = partial(held_by, process.state, gradients, process.save_memory)
    page = None if process.page is None else process.page.facts
    return MemoryWatch(process.meter, held, world.history, PHASES_EVERY_STEPS, page)


def open_tracer(config: Config, world: World, clock: StepClock, step: int) -> Tracer | None:
    """Return this rank's tracer; None if it is not to be traced, which is the default."""
    keys, rank = config.profile, world.group.rank
    if not keys.at_steps or (keys.ranks != "all" and rank not in keys.ranks):
        return None
    tracer = Tracer(keys, config.run.dir, rank=rank, term=world.term, clock=clock, group=world.group)
    tracer.applied(step)
    return tracer


def open_page(config: Config, utilisation: Utilisation | None) -> Page | None:
    """Serve the node's Prometheus page, if configured, in a node's first process."""
    keys = config.monitoring
    if keys.address is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    page = Page(Facts(utilisation=utilisation), config.run_name, socket.gethostname())
    host, port = keys.address
    page.open(host, port)
    if page.port is not None:
        log.warning("metrics for Prometheus: http://%s:%d/metrics", host, page.port)
    return page


def warm_up_once(process: Process) -> None:
    """Do a first step's one-time work, and count a sample's FLOPs, if peers would wait or bits depend on it."""
    plan, state = process.plan, process.state
    # The choice of attention kernels depends on it.
    learns = plan.config.compile is True or plan.config.parallel.shards == "parameters" or plan.device.type == "cuda"
    peak, counted = peak_of(plan), list[Utilisation | None]()
    if not (process.worlds.is_live or learns or peak is not None):
        return
    process.watchdog.warm_up()
    try:
        with process.leave.droppable():
            warm_up(plan, state, lambda batch: counted.append(count(plan, state, batch, peak)))
    except StepDropped:
        raise LeaveNow from None
    process.utilisation = counted[0] if counted else None
    process.done.add(FIRST_LOSS)


def peak_of(plan: Plan) -> float | None:
    """Return the peak FLOP/s of this process's GPU by its name; None if unknown, and for a CPU."""
    if plan.device.type != "cuda":
        return None
    from elastic_train.planning.arithmetic.catalogue import device_named  # not needed on a CPU

    known = device_named(torch.cuda.get_device_name(plan.device))
    return None if known is None else known.peak_flops(plan.config.precision)


def count(plan: Plan, state: AppliedState, batch: LaneBatch, peak_flops: float | None) -> Utilisation | None:
    """Count the FLOPs of a micro-batch's samples; None without samples or a peak, or if the forward pass fails.

    If the weights are not in memory yet, the task's sketch runs on the meta device.
    """
    if batch.tensors is None or peak_flops is None:
        return None
    devices = [plan.device] if plan.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            forward, of_blocks = _forward_flops(plan, state, batch.tensors)
    except Exception as error:  # noqa: BLE001 - a model may raise anything; if training fails too, it reports the error
        log.info("MFU is unknown: the FLOPs of a sample cannot be counted: %s", first_line(error))
        return None
    parameters = list(state.model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad) / max(1, sum(map(torch.numel, parameters)))
    num_samples = len(batch.ids)
    again = of_blocks if plan.config.parallel.recompute == "units" else 0.0
    flops = forward * (2 + trained)
    return Utilisation(flops / num_samples, again / num_samples, peak_flops) if flops else None


def _forward_flops(plan: Plan, state: AppliedState, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return the FLOPs of a forward pass of a micro-batch, and the part of them in blocks."""
    from elastic_train.planning.tracing import REST, Trace  # imported only if a peak is known

    model, device = (
        (state.model, plan.device) if state.shards.cut.has_weights else (meta_model(plan), torch.device("meta"))
    )
    given = on_device(batch, device)
    names = unit_names(model)
    trace = Trace(model, names, [*model.parameters(), *model.buffers(), *given.values()])
    with contextlib.ExitStack() as inside:
        if device == plan.device:
            inside.enter_context(unchanged(model))
            inside.enter_context(plan.autocast())
        inside.enter_context(torch.no_grad())
        inside.enter_context(trace.watching())
        plan.task.loss(model, given)
    of_blocks = sum(unit.forward.flops for name, unit in trace.units.items() if name != REST)
    return of_blocks + trace.units[REST].forward.flops, of_blocks


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
        tidy=lambda commit: prune(store, retention, newest=commit),
    )


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
    found = _discover(store, state, published)
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


def _discover(store: Store, state: AppliedState, published: str | None) -> Discovery:
    """Return the newest intact commit; none if all are damaged, and the state has all their steps: it alone is left."""
    try:
        return discover(store, published=published)
    except CommitError:
        named = readable(store, published) if published is not None else None
        furthest = max(place[1] for key in commit_keys(store, published) if (place := place_of(key)))
        if furthest > state.step or (named is not None and strays_from(state.reached.intervals, named)):
            raise
        return Discovery(None, ())
