"""Puts the simulated world under the product: the one table of what is replaced, module by module.

The product's modules keep their code. While a simulation runs, the names by which they reach the machine (clock,
threads, sockets, etcd's client, storage, process groups, tensors) lead to the simulated ones. What is in no line of
this table is what ships.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import TypeVar, TypeVarTuple

from chaos.sim.job.host import Host
from chaos.sim.job.live_node import Node
from chaos.sim.job.restart_node import start_processes
from chaos.sim.job.surroundings import Surroundings
from chaos.sim.machine import stdlib
from chaos.sim.machine.etcd import EtcdClient
from chaos.sim.machine.meeting import MeetingStore, agent_store
from chaos.sim.machine.object_store import StorageClient
from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.machine.tracker import TrackedRun, Tracking
from chaos.sim.modelled import commit_files, training
from chaos.sim.modelled.silenced import Silent, Uncompacted, Unwatched
from elastic_train.checkpoint.commits import record
from elastic_train.checkpoint.interval.young_daly import Faults
from elastic_train.core.coverage import CoverageSums
from elastic_train.data.loading.loader import LaneBatch
from elastic_train.parallel import step_tables
from elastic_train.system.failpoints import reach
from elastic_train.tracking.background_files import BackgroundFiles
from elastic_train.tracking.history import History, UnformedWorlds
from elastic_train.tracking.history_files import Stagnation
from elastic_train.training import step_sums
from elastic_train.training.session import Session
from elastic_train.training.step_sums import LaneSums
from elastic_train.world import handover
from rendezvous.context import RendezvousContext
from rendezvous.membership.fence import EtcdFence
from rendezvous.membership.reachability import SELDOM_S
from rendezvous.membership.records import read_view

PRODUCT = (
    "rendezvous.membership.participant",
    "rendezvous.live_member",
    "rendezvous.torchelastic.live_agent",
    "rendezvous.torchelastic.live_handler",
    "rendezvous.meeting_point",
    "rendezvous.membership.fence",
    "rendezvous.membership.decisions",
    "rendezvous.membership.records",
    "rendezvous.membership.reachability",
    "rendezvous.waiting",
    "rendezvous.membership.latest_view",
    "rendezvous.membership.own_record",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "elastic_train.training.supervisor",
    "elastic_train.training.loop",
    "elastic_train.training.step_clock",
    "elastic_train.training.commits",
    "elastic_train.training.open_session",
    "elastic_train.world.world",
    "elastic_train.world.restore",
    "elastic_train.world.forming",
    "elastic_train.world.standstill",
    "elastic_train.world.one_store",
    "elastic_train.world.handover",
    "elastic_train.world.claims",
    "elastic_train.world.fencing",
    "elastic_train.checkpoint.saving.store_use",
    "elastic_train.tracking.background_files",
    "elastic_train.tracking.history",
    "elastic_train.training.result",
    "elastic_train.system.failpoints",
    "elastic_train.system.file_locks",
    "elastic_train.tracking.metric_log",
    "elastic_train.tracking.tracker",
    "elastic_train.checkpoint.commits.writer",
    "elastic_train.checkpoint.commits.reader",
    "elastic_train.checkpoint.commits.record",
    "elastic_train.checkpoint.commits.pruning",
    "elastic_train.checkpoint.commits.sweeping",
    "elastic_train.checkpoint.stores.store",
    "elastic_train.checkpoint.saving.background_saves",
    "elastic_train.checkpoint.saving.save_thread",
    "elastic_train.checkpoint.saving.abandonment",
    "elastic_train.checkpoint.saving.staging",
    "elastic_train.checkpoint.saving.part_receipts",
    "elastic_train.checkpoint.commits.pins_and_holds",
)
MACHINE: Mapping[str, ModuleType] = {
    "time": time,
    "threading": threading,
    "uuid": uuid,
    "socket": socket,
    "random": random,
}

X = TypeVar("X")
Y = TypeVar("Y")
Ys = TypeVarTuple("Ys")
NUM_LANES_READ = 1 << 12
"""Lanes of steps that some process has still to count: the same for all that read them."""
NUM_VIEWS = 256
"""Snapshots on their way to a process, of a thousand nodes that all write at once."""


@contextlib.contextmanager
def installed(
    host: Host, nodes: Sequence[Node], reach: Callable[[str], None], bug: Mapping[str, object]
) -> Iterator[None]:
    """Let the product run over a job's simulated world, for as long as the context lasts.

    `reach` is called with every failpoint that a process comes to; `bug` replaces product code by path.
    """
    world = (*_machine(host.around), *_world(host, reach), *_launch(host, nodes), *_track(host.around.tracking))
    with contextlib.ExitStack() as undo:
        undo.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        for module, name, stand_in in (*world, *_tensors(host), *_planted(bug)):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield


def _machine(around: Surroundings) -> Iterator[tuple[ModuleType, str, object]]:
    """Replace the machine's own modules wherever the product has imported them."""
    here = stdlib.Here(around.kernel, around.net.connect)
    stand_ins = {
        "time": stdlib.Time(around.kernel),
        "threading": stdlib.Threading(around.kernel),
        "uuid": stdlib.Unique(around.draws("names")),
        "socket": here,
        "random": around.draws("product"),
    }
    for path in PRODUCT:
        module = importlib.import_module(path)
        for name, real in MACHINE.items():
            if getattr(module, name, None) is real:
                yield module, name, stand_ins[name]
    for path in ("elastic_train.world.claims", "elastic_train.tracking.history"):
        yield importlib.import_module(path), "os", here
    # The judge compares when commits were made, so no jump of a clock moves that; what a clock is ahead, it finds out.
    yield importlib.import_module("elastic_train.checkpoint.commits.writer"), "time", stdlib.SteadyTime(around.kernel)


def _client_of(around: Surroundings) -> Callable[..., EtcdClient]:
    """Return what makes a process's way to etcd."""

    def client(*_: object, give_up_after_s: float = 4.0) -> EtcdClient:
        return EtcdClient(around.etcd, around.kernel.process, give_up_after_s)

    return client


def _world(host: Host, reach: Callable[[str], None]) -> Iterable[tuple[ModuleType, str, object]]:
    """Replace the ways to etcd, storage, peers, and the launcher."""
    around, client = host.around, _client_of(host.around)

    def storage(url: str, near_dir: str | None = None) -> StorageClient:
        return StorageClient(around.storage, around.kernel.process)

    def fence(context: RendezvousContext, *, give_up_after_s: float) -> EtcdFence:
        return EtcdFence(client(give_up_after_s=give_up_after_s), context.run_id, world_term=context.term)

    yield from _in(
        "rendezvous.live_member",
        EtcdStore=client,
        etcd_options=lambda *_: None,
        Compaction=Uncompacted,
        os=_Launcher(host),
    )
    yield from _in("rendezvous.membership.known_agents", ask=around.net.ask, refuses=around.net.refuses)
    seldom_s = SELDOM_S * around.shape.look_s
    yield from _in("rendezvous.membership.reachability", ThreadPoolExecutor=around.net.at_once, SELDOM_S=seldom_s)
    for path in ("rendezvous.waiting", "elastic_train.tracking.background_files"):
        yield from _in(path, SimpleQueue=functools.partial(stdlib.Queue, around.kernel))
    yield from _in("rendezvous.membership.dead_agents", LOOK_S=around.shape.look_s)
    yield from _in("rendezvous.membership.participant", LOOK_S=around.shape.look_s)
    yield from _in("rendezvous.membership.latest_view", read_view=_memory_of(read_view, NUM_VIEWS))
    yield from _in("rendezvous.meeting_point", TCPStore=functools.partial(MeetingStore, around.net))
    yield from _in("elastic_train.world.forming", Group=functools.partial(SimGroup, look_s=around.shape.look_s))
    yield from _in("elastic_train.world.forming", live_context=host.context, os=_Launcher(host))
    yield from _in("elastic_train.world.world", open_store=storage, DeadlineStore=_undelayed, open_fence=fence)
    yield from _in("elastic_train.world.world", History=functools.partial(SimHistory, host), Progress=Silent)
    yield from _in("elastic_train.tracking.history", process_identity=host.identity, process_usage=dict)
    yield from _in("elastic_train.training.open_session", open_store=storage, DeadlineStore=_undelayed)
    yield from _in("elastic_train.world.one_store", open_store=storage, DeadlineStore=_undelayed)
    yield from _in("elastic_train.checkpoint.saving.store_use", open_store=storage, DeadlineStore=_undelayed)
    yield from _in("elastic_train.world.claims", process_identity=host.identity)
    yield from _in(
        "elastic_train.world.uniformity",
        _version=lambda _: "other" if around.kernel.process.node in around.other_code else "ours",
    )
    yield from _in("elastic_train.training.open_session", hazards=lambda _: iter(()))
    yield from _in("elastic_train.training.open_session", faults_before=lambda *_: Faults(0, 0.0))
    yield from _in(
        "elastic_train.training.supervisor",
        os=_Launcher(host),
        Watchdog=Unwatched,
        make_repeatable=_nothing,
        make_plan=lambda _: host.plan,
        UnformedWorlds=functools.partial(SimUnformedWorlds, host),
    )
    # There is nothing to open or to load.
    yield from _in("elastic_train.training.supervisor", warm_up=lambda plan, state: None)
    yield from _in(
        "elastic_train.training.supervisor", sys=SimpleNamespace(stderr=SimpleNamespace(write=lambda _: None))
    )
    yield from _in("elastic_train.training.result", write_atomically=host.record.take_file)
    yield from _in("elastic_train.system.failpoints", _folder="simulated", _look=lambda _, name: reach(name))


def _launch(host: Host, nodes: Sequence[Node]) -> Iterable[tuple[ModuleType, str, object]]:
    """Replace what torchrun's agent and the workers of `restart` mode find on their machine."""
    around, client = host.around, _client_of(host.around)
    agents = "torch.distributed.elastic.agent.server"
    mine = {"os": _Launcher(host), "atexit": SimpleNamespace(register=lambda _: None)}
    yield from _in(
        f"{agents}.local_elastic_agent", start_processes=functools.partial(start_processes, nodes, around.kernel)
    )
    yield from _in("torch.distributed.elastic.metrics.api", put_metric=_nothing)
    yield from _in(f"{agents}.api", record=_nothing, put_metric=_nothing, _get_fq_hostname=str)
    yield from _in(
        "rendezvous.torchelastic.restart_handler",
        EtcdStore=client,
        Compaction=Uncompacted,
        machine_name=lambda: stdlib.host_of(around.kernel.process.node),
        own_address=lambda given, *_: given,
        _bind_gloo=_nothing,
        **mine,
    )
    yield from _in("rendezvous.context", os=_Launcher(host))
    stores = {"TCPStore": functools.partial(agent_store, around.net), "PrefixStore": lambda _, store: store}
    yield from _in(
        "elastic_train.parallel.group",
        os=_Launcher(host),
        Group=functools.partial(SimGroup, look_s=around.shape.look_s),
        **stores,
    )


def _track(tracking: Tracking | None) -> Iterable[tuple[ModuleType, str, object]]:
    """Replace the folder of metrics, and the run in the tracker; without one there is none of both."""
    if tracking is None:
        yield from _in("elastic_train.training.open_session", start_tracker=_nothing)
        return
    yield from _in("elastic_train.training.open_session", Path=lambda _: tracking.folder)
    yield from _in("elastic_train.tracking.delivery", MlflowRun=functools.partial(TrackedRun, tracking.server))
    yield from _in(
        "elastic_train.tracking.tracker", MetricsWriter=tracking.writer, code_tags=dict, bound_requests=_nothing
    )
    yield from _in("elastic_train.tracking.mlflow_sync", bound_requests=_nothing)


def _nothing(*_: object) -> None: ...


def _undelayed(store: StorageClient, on_progress: object) -> StorageClient:
    """Return the store itself: simulated calls have deadlines of their own."""
    return store


def _tensors(host: Host) -> Iterable[tuple[ModuleType, str, object]]:
    """Replace what computes, and the format of tensors in files."""

    coverage_of_lane = _memory_of(training.sums_of, NUM_LANES_READ)

    def gradient_sum(
        kind: str, parameters: list[training.Weights], group: SimGroup, lanes: int
    ) -> training.ModelledSum:
        if host.shape.vectors:
            return training.VectorSum(parameters[0], group, lanes)
        return training.ModelledSum(parameters[0], group)

    def run_lane(session: Session, batch: LaneBatch) -> LaneSums:
        if batch.lane == session.lanes.start:
            reach("forward")
            host.compute(len(session.lanes))
            reach("backward")
        if batch.tensors is None:
            return LaneSums()
        sums = session.gradients
        assert isinstance(sums, training.ModelledSum)
        sums.add(batch.ids)
        coverage = coverage_of_lane(batch.ids)
        loss = float(coverage.sum_a % 65521 + session.state.step)
        return LaneSums(loss, float(coverage.count))

    def coverage_of(lanes: Sequence[LaneBatch]) -> CoverageSums:
        return sum((coverage_of_lane(batch.ids) for batch in lanes), CoverageSums())

    yield from _in(
        "elastic_train.training.open_session", make_gradient_sum=gradient_sum, differing_kernels=lambda *_: []
    )
    yield from _in(
        "elastic_train.training.step", _run_lane=run_lane, _coverage_of=coverage_of, fold=_memory_of(step_sums.fold)
    )
    yield from _in("elastic_train.parallel.step_tables", _read_tables=_memory_of(step_tables._read_tables))
    yield from _in("elastic_train.world.handover", _read_places=_memory_of(handover._read_places))
    yield from _in(
        "elastic_train.checkpoint.format.layout",
        LEAST_PART_BYTES=host.shape.least_part_bytes,
        plan_attempt=commit_files.plan_attempt,
    )
    written = {"write_part": commit_files.write_part, "finish_attempt": commit_files.finish_attempt}
    yield from _in("elastic_train.checkpoint.commits.writer", **written, library_versions=dict)
    snapshot = functools.partial(commit_files.SlowSnapshot, host.copy)
    yield from _in("elastic_train.checkpoint.saving.background_saves", Snapshot=snapshot)
    yield from _in("elastic_train.checkpoint.saving.save_thread", write_part=commit_files.write_part)
    yield from _in(
        "elastic_train.checkpoint.commits.reader",
        read_leaves=commit_files.read_leaves,
        decode=functools.lru_cache(64)(record.decode),
    )


def _planted(bug: Mapping[str, object]) -> Iterator[tuple[ModuleType, str, object]]:
    for path, stand_in in bug.items():
        module, _, name = path.partition(":")
        owner: object = importlib.import_module(module)
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        yield owner, last, stand_in  # type: ignore[misc]  # a class, where the bug is in a method


def _in(path: str, **stand_ins: object) -> Iterator[tuple[ModuleType, str, object]]:
    module = importlib.import_module(path)
    for name, stand_in in stand_ins.items():
        assert hasattr(module, name), f"{path} has no {name} any more: the simulator's table is out of date"
        yield module, name, stand_in


def _memory_of(work_out: Callable[[X, *Ys], Y], size: int = 8) -> Callable[[X, *Ys], Y]:
    """Remember what was worked out of the last objects: every process of a simulation does it of the same ones."""
    known: dict[int, tuple[X, Y]] = {}  # by identity, which nothing loses while it is here

    def remembered(found: X, *rest: *Ys) -> Y:
        held = known.get(id(found))
        if held is None:
            if len(known) == size:
                del known[next(iter(known))]
            held = known[id(found)] = found, work_out(found, *rest)
        return held[1]

    return remembered


class _Launcher:
    """The `os` of a process, as far as it is an environment: of a worker it is what its agent gave it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def environ(self) -> dict[str, str]:
        return self._host.environ_of(self._host.kernel.process)


class SimHistory(History):
    """A history whose lines go to the evidence, stamped by a clock of its node that no fault moves."""

    def __init__(self, host: Host, files: BackgroundFiles, run_dir: str, term: int, rank: int, most_bytes: int) -> None:
        self.term, self._rank = term, rank
        self._host = host
        process = host.kernel.process
        self._name = f"{term:08d}-{rank:05d}-{process.pid}-{process.node}-{process.born:.6f}"

    def prune(self, keep_terms: int) -> None:
        """The evidence is kept whole."""

    def last_applied(self) -> None:
        """Banners are not shown."""

    def stagnation(self, most: int) -> Stagnation:
        """Nothing in a simulated job keeps it at one step."""
        return Stagnation()

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, op: str, **fields: object) -> None:
        self._host.kernel.check(self._host.kernel.current)
        at = stdlib.SteadyTime(self._host.kernel).time()
        self._host.record.write(self._name, op, at=at, term=self.term, rank=self._rank, **fields)


class SimUnformedWorlds(UnformedWorlds):
    """What did not form, noted in the evidence."""

    def __init__(self, host: Host, *_: object) -> None:
        process = host.kernel.process
        self._host, self._name = host, f"unformed-{process.pid}-{process.node}-{process.born:.6f}"
        self._who = {"pid": process.pid, **host.identity()}

    def note(self, term: int, rank: int, world: int, why: str) -> None:
        at = stdlib.SteadyTime(self._host.kernel).time()
        place = {"term": term, "rank": rank, "world": world, "why": why}
        self._host.record.write(self._name, "unformed", at=at, **place, **self._who)
