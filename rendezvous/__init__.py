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
from rendezvous.etcd import EtcdStore
from rendezvous.fence import EtcdFence
from rendezvous.memory import MemoryStore
from rendezvous.options import EtcdOptions, etcd_options
from rendezvous.orphans import die_with_parent
from rendezvous.records import Head
from rendezvous.server import EtcdServer
from rendezvous.store import Store

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
