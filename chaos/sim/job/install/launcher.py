"""Replacements for agents, and for the workers of `restart` mode."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from chaos.sim.job.host import Host
from chaos.sim.job.install.replacement import Replacement, nothing, within
from chaos.sim.job.install.stand_ins import Launcher, client_of
from chaos.sim.job.live_node import Node, here, kill, start_worker
from chaos.sim.job.restart_node import start_processes
from chaos.sim.machine import stdlib
from chaos.sim.machine.meeting import agent_store
from chaos.sim.machine.rank_group import SimGroup
from chaos.sim.modelled.silenced import Uncompacted


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
