"""The standard library's modules, wherever the product imports them."""

from __future__ import annotations

import importlib
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from types import ModuleType

from chaos.sim.job.install.stand_ins import Replacement
from chaos.sim.job.surroundings import Surroundings
from chaos.sim.machine import stdlib

PRODUCT = (
    "rendezvous.membership.participant",
    "rendezvous.live_member",
    "rendezvous.torchelastic.live_agent",
    "rendezvous.torchelastic.live_handler",
    "rendezvous.meeting_point",
    "rendezvous.membership.fence",
    "rendezvous.membership.records",
    "rendezvous.membership.reachability",
    "rendezvous.waiting",
    "rendezvous.membership.latest_view",
    "rendezvous.membership.own_record",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "elastic_train.health.result",
    "elastic_train.health.precheck",
    "elastic_train.training.supervisor",
    "elastic_train.training.loop",
    "elastic_train.insight.phases",
    "elastic_train.training.commits",
    "elastic_train.training.opening.resources",
    "elastic_train.training.opening.resources",
    "elastic_train.world.world",
    "elastic_train.world.restore",
    "elastic_train.world.forming",
    "elastic_train.world.one_store",
    "elastic_train.world.equal_weights",
    "elastic_train.world.claims",
    "elastic_train.world.fencing",
    "elastic_train.checkpoint.saving.store_health",
    "elastic_train.tracking.background_files",
    "elastic_train.tracking.history",
    "elastic_train.training.result",
    "elastic_train.system.failpoints",
    "elastic_train.parallel.group",
    "elastic_train.system.watchdog",
    "elastic_train.system.files",
    "elastic_train.tracking.metric_log",
    "elastic_train.tracking.tracker",
    "elastic_train.checkpoint.commits.writer",
    "elastic_train.checkpoint.commits.reader",
    "elastic_train.checkpoint.commits.record",
    "elastic_train.checkpoint.commits.pruning",
    "elastic_train.checkpoint.stores.store",
    "elastic_train.checkpoint.saving.background_saves",
    "elastic_train.checkpoint.saving.save_thread",
    "elastic_train.checkpoint.saving.staging",
    "elastic_train.checkpoint.commits.retention_policies",
)
MACHINE: Mapping[str, ModuleType] = {
    "time": time,
    "threading": threading,
    "uuid": uuid,
    "socket": socket,
    "random": random,
}


def machine(around: Surroundings) -> Iterator[Replacement]:
    """Yield replacements for the standard library's modules wherever the product imports them."""
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
    # Commit times are compared by the judge, so clock jumps do not affect them; it measures constant skews itself.
    yield importlib.import_module("elastic_train.checkpoint.commits.writer"), "time", stdlib.SteadyTime(around.kernel)
