"""The description of their world that a node passes to its workers in one environment variable.

A worker reads `context()`, and opens the fence of its job with `open_fence(context)`. The variable contains etcd's
credentials, if there are any, and is as private as the process's environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rendezvous.etcd.options import etcd_options
from rendezvous.membership.fence import EtcdFence
from rendezvous.membership.worlds import Cause

VARIABLE = "ELASTIC_RENDEZVOUS"
LIVE_VARIABLE = "ELASTIC_LIVE"


@dataclass(frozen=True, slots=True)
class RendezvousContext:
    """The world that a worker was started for; times are seconds since the epoch."""

    endpoints: tuple[str, ...]
    run_id: str
    term: int
    member_id: str
    joined_at: float
    sealed_at: float
    cause: Cause
    num_nodes: int
    options: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class LiveContext:
    """The settings with which a worker forms worlds itself (`recovery=live`); the same for all of its worlds."""

    endpoints: tuple[str, ...]
    run_id: str
    node: str
    host: str
    address: str
    agent: str
    min_nodes: int
    max_nodes: int
    ttl_s: float
    last_call_s: float
    timeout_s: float
    options: Mapping[str, str] = field(default_factory=dict)
    compacts: bool = True
    """True if the leader compacts etcd's history."""

    def encode(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def live_context() -> LiveContext | None:
    """Return the launcher's settings for a worker in `live` mode; None in any other mode."""
    text = os.environ.get(LIVE_VARIABLE)
    if not text:
        return None
    fields = json.loads(text)
    return LiveContext(endpoints=tuple(fields.pop("endpoints")), **fields)


def context() -> RendezvousContext | None:
    """Return our launcher's context; None under another launcher or without one."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    fields = json.loads(text)
    return RendezvousContext(endpoints=tuple(fields.pop("endpoints")), **fields)


def open_fence(context: RendezvousContext, *, give_up_after_s: float = 10.0) -> EtcdFence:
    """Connect to the job's etcd as one of its workers; the fence knows the term of the worker's world.

    Its calls survive an etcd election, and raise StoreUnavailableError after `give_up_after_s`.
    """
    from rendezvous.etcd.store import EtcdStore  # only here, because etcd's client is slow to import

    store = EtcdStore(etcd_options(context.endpoints, context.options), give_up_after_s=give_up_after_s)
    return EtcdFence(store, context.run_id, world_term=context.term)
