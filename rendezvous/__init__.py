"""Membership and fencing over etcd v3; independent of training.

It has the handler of `torchrun --rdzv_backend=etcd`, the fence for trainers, and an etcd for demos. `__all__` is the
public interface. Modules that need etcd's client are imported at first use, so that error classes stay cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rendezvous.context import RendezvousContext, context, open_fence
from rendezvous.errors import (
    FencedError,
    OptionError,
    RendezvousError,
    ServerError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
    TooFewNodesError,
)
from rendezvous.etcd.options import EtcdOptions, etcd_options
from rendezvous.membership.fence import EtcdFence
from rendezvous.membership.memory_store import MemoryStore
from rendezvous.membership.records import Head
from rendezvous.membership.store import Store
from rendezvous.orphans import die_with_parent

if TYPE_CHECKING:
    from rendezvous.etcd.server import EtcdServer
    from rendezvous.etcd.store import EtcdStore

__all__ = [
    "EtcdFence",
    "EtcdOptions",
    "EtcdServer",
    "EtcdStore",
    "FencedError",
    "Head",
    "MemoryStore",
    "OptionError",
    "RendezvousContext",
    "RendezvousError",
    "ServerError",
    "Store",
    "StoreError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "TooFewNodesError",
    "context",
    "die_with_parent",
    "etcd_options",
    "open_fence",
]

_LATE = {"EtcdServer": "rendezvous.etcd.server", "EtcdStore": "rendezvous.etcd.store"}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
