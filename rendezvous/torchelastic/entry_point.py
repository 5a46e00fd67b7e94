"""`torchrun --rdzv_backend=etcd`, against a current etcd (v3), for any script.

`load` puts our creator into TorchElastic's registry in place of the built-in one, which uses the removed v2 API. Only
this module knows all handlers and agents: it picks the pair for the mode, and none of them imports it.

TorchElastic's registry imports this module while TorchElastic itself is only partly imported. So this module imports
torch, and modules that use it, only inside its functions.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rendezvous.errors import OptionError, RendezvousError, StoreDeniedError, StoreError
from rendezvous.etcd.connection import await_etcd
from rendezvous.membership.records import Keys
from rendezvous.open_files import raise_limit
from rendezvous.orphans import keep_exit_codes
from rendezvous.torchelastic.conf import BACKEND, Conf

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator

    from rendezvous.torchelastic.standby import Standby

_log = logging.getLogger("rendezvous")
_OF_TORCH = ("torch.distributed.elastic.rendezvous", "torch.distributed.elastic.multiprocessing.errors")


def load() -> RendezvousHandlerCreator:
    """Register our creator under the name `etcd`, and return it."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    # register() refuses a name that is taken, and cannot release it.
    rendezvous_handler_registry._registry[BACKEND] = create_handler
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    return create_handler


class _Hook:
    """Shows how a rendezvous or a worker ended as its sentence, without torchrun's frames; passes on all others."""

    def __init__(self, other: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._other = other

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, RendezvousError) or kind.__module__.startswith(_OF_TORCH):
            sys.stderr.write(f"error: {error}\n")
        else:
            self._other(kind, error, where)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Check the options, connect, and return the handler of the mode; our agents replace the stock one.

    Raises OptionError with all problems of the options, including etcd's rejection of user and password,
    TooFewNodesError if etcd does not answer in time, and RendezvousConnectionError if it cannot be used.
    """
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    from rendezvous import reverse_lookups
    from rendezvous.torchelastic.live_handler import LiveRendezvousHandler
    from rendezvous.torchelastic.restart_handler import EtcdRendezvousHandler

    reverse_lookups.switch_off()
    keep_exit_codes()
    with contextlib.ExitStack() as undone:
        try:
            conf = Conf.read(params)
            raise_limit()  # workers inherit it
            standby = _standby() if conf.has_standby else None
            if standby is not None:
                undone.callback(standby.end)
            # A missing etcd is reported here, not by every worker; but wait as a running job does in an outage.
            await_etcd(conf.etcd, Keys(params.run_id).world, conf.timeout_s)
            handler = (LiveRendezvousHandler if conf.is_live else EtcdRendezvousHandler)(params, conf)
        except StoreDeniedError as error:
            raise OptionError(str(error)) from None
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from None
        undone.pop_all()
    handler.standby = standby
    install()
    return handler


def _standby() -> Standby | None:
    """Start the node's standby process, before this process has connections and their threads."""
    from rendezvous.torchelastic.standby import Standby

    try:
        return Standby(forks=True)
    except OSError as error:
        _log.warning("no standby process, workers are started the ordinary way: %s", error)
        return None


def install() -> None:
    """Make the launcher use our agents; it looks the name up right after it has made the handler."""
    import torch.distributed.launcher.api as launcher

    launcher.LocalElasticAgent = make_agent  # type: ignore[attr-defined, assignment]


def make_agent(spec: WorkerSpec, **options: Any) -> LocalElasticAgent:
    """Return our agents for our handlers, the stock one for any other."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from rendezvous.torchelastic.live_agent import LiveAgent
    from rendezvous.torchelastic.live_handler import LiveRendezvousHandler
    from rendezvous.torchelastic.restart_agent import ElasticAgent
    from rendezvous.torchelastic.restart_handler import EtcdRendezvousHandler

    if isinstance(spec.rdzv_handler, LiveRendezvousHandler):
        return LiveAgent(spec=spec, **options)
    kind = ElasticAgent if isinstance(spec.rdzv_handler, EtcdRendezvousHandler) else LocalElasticAgent
    return kind(spec=spec, **options)
