"""Membership and fencing over etcd v3; knows nothing of training.

`torchrun --rdzv_backend=etcd` finds its handler here, a trainer its fence, a demo its etcd.
"""

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
from rendezvous.etcd.server import EtcdServer
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.fence import EtcdFence
from rendezvous.membership.memory_store import MemoryStore
from rendezvous.membership.records import Head
from rendezvous.membership.store import Store
from rendezvous.orphans import die_with_parent

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
