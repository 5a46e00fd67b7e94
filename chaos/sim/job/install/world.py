"""Connections to etcd, storage, peers and the tracker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

from chaos.sim.job.host import Host
from chaos.sim.job.install.stand_ins import (
    Launcher,
    Replacement,
    SimHistory,
    SimUnformedWorlds,
    client_of,
    note_unfit,
    nothing,
    prove,
    undelayed,
    within,
)
from chaos.sim.job.live_node import Node, here, kill, start_worker
from chaos.sim.job.restart_node import start_processes
from chaos.sim.machine import stdlib
from chaos.sim.machine.meeting import MeetingStore, agent_store
from chaos.sim.machine.object_store import StorageClient
from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.machine.tracker import TrackedRun, Tracking
from chaos.sim.modelled.memory import Silent, Uncompacted, memory_of
from elastic_train.checkpoint.saving.cadence import Faults
from rendezvous.context import RendezvousContext
from rendezvous.membership.fence import EtcdFence
from rendezvous.membership.reachability import SELDOM_S
from rendezvous.membership.records import read_view

WATCHED_EVERY_S = 5.0
"""Seconds between a watchdog's checks: a quarter of the shortest hang limit."""
DEVICE_EVERY_S = 0.02
"""Seconds between a rank's polls of its device: fifty times as long as on a real one."""
NUM_VIEWS = 256
"""Cached snapshots in flight, with a thousand nodes writing at once."""


def world(host: Host, reach: Callable[[str], None]) -> Iterable[Replacement]:
    """Yield replacements for etcd, storage, peers and the launcher."""
    around = host.around
    yield from within(
        "rendezvous.live_member",
        EtcdStore=client_of(around),
        etcd_options=lambda *_: None,
        Compaction=Uncompacted,
        os=Launcher(host),
    )
    yield from within("rendezvous.membership.known_agents", ask=around.net.ask, refuses=around.net.refuses)
    seldom_s = SELDOM_S * around.shape.look_s
    yield from within("rendezvous.membership.reachability", ThreadPoolExecutor=around.net.at_once, SELDOM_S=seldom_s)
    for path in ("rendezvous.waiting", "elastic_train.tracking.background_files"):
        yield from within(path, SimpleQueue=functools.partial(stdlib.Queue, around.kernel))
    yield from within("rendezvous.membership.dead_agents", LOOK_S=around.shape.look_s)
    yield from within("rendezvous.membership.participant", LOOK_S=around.shape.look_s)
    yield from within("rendezvous.membership.latest_view", read_view=memory_of(read_view, NUM_VIEWS))
    yield from within("rendezvous.meeting_point", TCPStore=functools.partial(MeetingStore, around.net))
    group = functools.partial(SimGroup, look_s=around.shape.look_s, has_device=around.shape.device)
    yield from within("elastic_train.world.forming", Group=group)
    device_time = stdlib.SeldomTime(around.kernel, DEVICE_EVERY_S)
    yield from within("elastic_train.parallel.devices.device", time=device_time)
    yield from within("elastic_train.world.forming", live_context=host.context, os=Launcher(host))
    yield from _entering(host)
    yield from _training(host)
    yield from within("elastic_train.system.failpoints", _folder="simulated", _look=lambda _, name: reach(name))


def _entering(host: Host) -> Iterable[Replacement]:
    """Yield replacements for storage, and for what a rank compares with others when it enters a world."""
    around = host.around

    def storage(url: str, near_dir: str | None = None) -> StorageClient:
        return StorageClient(around.storage, around.kernel.process)

    def fence(context: RendezvousContext, *, give_up_after_s: float) -> EtcdFence:
        return EtcdFence(client_of(around)(give_up_after_s=give_up_after_s), context.run_id, world_term=context.term)

    # Nobody removes or unmounts a simulated store.
    yield from within("elastic_train.world.world", StoreKeeper=nothing, location_of=lambda url: None)
    yield from within("elastic_train.world.world", open_store=storage, DeadlineStore=undelayed, open_fence=fence)
    yield from within("elastic_train.world.world", History=functools.partial(SimHistory, host), Progress=Silent)
    yield from within(
        "elastic_train.tracking.history", process_identity=host.identity, process_usage=dict, slurm_job=dict
    )
    yield from within("elastic_train.training.opening.resources", open_store=storage, DeadlineStore=undelayed)
    # No simulated node has a copy of the job's store.
    yield from within("elastic_train.world.one_store", open_store=storage, DeadlineStore=undelayed, check_first=nothing)
    yield from within("elastic_train.checkpoint.saving.store_health", open_store=storage, DeadlineStore=undelayed)
    yield from within("elastic_train.world.claims", process_identity=host.identity)
    yield from within(
        "elastic_train.world.agreement",
        _version=lambda _: "other" if around.kernel.process.node in around.other_code else "ours",
    )


def _training(host: Host) -> Iterable[Replacement]:
    """Yield replacements for what a process does with its machine, before and while it trains."""
    around = host.around
    yield from within("elastic_train.training.open_session", hazards=lambda _: iter(()))
    # A simulated task has no source, and its configuration does not change.
    yield from within("elastic_train.training.open_session", say_changes=nothing, versions_of=lambda plan: {})
    # Its warnings depend on real seconds only, and decide nothing.
    yield from within("elastic_train.training.open_session", open_watch=nothing)
    yield from within("elastic_train.training.opening.resources", faults_before=lambda *_: Faults(0, 0.0))
    yield from within(
        "elastic_train.training.supervisor",
        os=Launcher(host),
        make_repeatable=nothing,
        make_plan=lambda _: host.plan,
        UnformedWorlds=functools.partial(SimUnformedWorlds, host),
    )
    # Nothing needs opening or loading, and healthy machines are not examined.
    yield from within("elastic_train.training.opening.resources", warm_up=nothing)
    proofs = {"begin_proof": functools.partial(prove, host), "note_unfit": functools.partial(note_unfit, host)}
    yield from within("elastic_train.training.supervisor", **proofs)
    yield from within("elastic_train.health.precheck", tell_mates=lambda unfit: unfit)  # each finds the same
    yield from within(
        "elastic_train.training.supervisor", sys=SimpleNamespace(stderr=SimpleNamespace(write=lambda _: None))
    )
    yield from within(
        "elastic_train.system.watchdog",
        time=stdlib.SeldomTime(around.kernel, WATCHED_EVERY_S * around.shape.look_s),
        _work_done=lambda: (0.0, 0),
        MOST_LOOK_S=2 * WATCHED_EVERY_S * around.shape.look_s,
        faulthandler=SimpleNamespace(dump_traceback=lambda **_: None),
        Observer=lambda: None,  # needed only for a lock that is never held here
        os=SimpleNamespace(_exit=host.end),
        sys=SimpleNamespace(stderr=SimpleNamespace(write=lambda _: None, flush=nothing)),
    )
    yield from within("elastic_train.training.result", write_atomically=host.record.take_file)


def track(tracking: Tracking | None) -> Iterable[Replacement]:
    """Yield replacements for the metrics folder and the tracker's run; a job without a tracker has neither."""
    if tracking is None:
        yield from within("elastic_train.training.open_session", start_tracker=nothing)
        return
    yield from within("elastic_train.training.opening.resources", Path=lambda _: tracking.folder)
    yield from within("elastic_train.tracking.delivery", MlflowRun=functools.partial(TrackedRun, tracking.server))
    yield from within(
        "elastic_train.tracking.tracker", MetricsWriter=tracking.writer, code_tags=dict, bound_requests=nothing
    )
    yield from within("elastic_train.tracking.mlflow_sync", bound_requests=nothing)


def launch(host: Host, nodes: Sequence[Node]) -> Iterable[Replacement]:
    """Yield the replacements for agents, and for the workers of `restart` mode."""
    around, client, kernel = host.around, client_of(host.around), host.kernel
    agents = "torch.distributed.elastic.agent.server"
    mine = {"os": Launcher(host), "atexit": SimpleNamespace(register=lambda _: None)}
    yield from within(
        f"{agents}.local_elastic_agent", start_processes=functools.partial(start_processes, nodes, around.kernel)
    )
    for path in ("rendezvous.torchelastic.bound_agent", "torch.distributed.elastic.multiprocessing.api"):
        yield from within(path, get_subprocess_handler=functools.partial(start_worker, nodes, kernel))
    yield from within(
        "rendezvous.torchelastic.live_agent",
        stopped_by=lambda pid: here(nodes, kernel).stopped_by(pid),
        os=SimpleNamespace(kill=functools.partial(kill, nodes, kernel)),
    )
    yield from within("torch.distributed.elastic.metrics.api", put_metric=nothing)
    yield from within(f"{agents}.api", record=nothing, put_metric=nothing, _get_fq_hostname=str)
    yield from within(
        "rendezvous.torchelastic.restart_handler",
        EtcdStore=client,
        Compaction=Uncompacted,
        machine_name=lambda: stdlib.host_of(around.kernel.process.node),
        own_address=lambda given, *_: given,
        _bind_gloo=nothing,
        **mine,
    )
    yield from within("rendezvous.context", os=Launcher(host))
    stores = {"TCPStore": functools.partial(agent_store, around.net), "PrefixStore": lambda _, store: store}
    yield from within(
        "elastic_train.parallel.group",
        os=Launcher(host),
        Group=functools.partial(SimGroup, look_s=around.shape.look_s, has_device=around.shape.device),
        **stores,
    )
