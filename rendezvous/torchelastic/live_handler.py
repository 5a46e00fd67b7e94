"""The handler of `live` mode: a rendezvous of this node alone, whose workers form their worlds themselves."""

from __future__ import annotations

import logging
import os
import uuid

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from rendezvous.agent.identity import IdentityPort
from rendezvous.context import LIVE_VARIABLE, LiveContext
from rendezvous.errors import StoreError
from rendezvous.etcd.store import EtcdStore, check_permission
from rendezvous.live_member import member_prefix
from rendezvous.membership.records import Keys
from rendezvous.torchelastic.addresses import machine_name, own_address
from rendezvous.torchelastic.conf import BACKEND, Conf
from rendezvous.torchelastic.standby import Standby

_log = logging.getLogger("rendezvous")


class LiveRendezvousHandler(RendezvousHandler):
    """TorchElastic's view of a node in `live` mode: one rendezvous, which never ends."""

    standby: Standby | None = None

    def __init__(self, params: RendezvousParameters, conf: Conf) -> None:
        self._run_id = params.run_id
        self._etcd = EtcdStore(conf.etcd)
        self._keys = Keys(params.run_id)
        check_permission(self._etcd, self._keys)
        self._address = own_address(params.local_addr, conf.etcd, params.max_nodes)
        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self.node = f"{machine_name()}-{uuid.uuid4().hex[:8]}"
        self._identity = IdentityPort(self._address, self.node)
        self.context = LiveContext(
            endpoints=conf.etcd.endpoints,
            run_id=params.run_id,
            node=self.node,
            host=machine_name(),
            address=self._address,
            agent=self._identity.endpoint,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            ttl_s=conf.ttl_s,
            last_call_s=conf.last_call_s,
            timeout_s=conf.timeout_s,
            options=conf.etcd.secrets(),
            compacts=conf.compacts,
        )

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        os.environ[LIVE_VARIABLE] = self.context.encode()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(self._address, self._store.port))

    def num_nodes_waiting(self) -> int:
        """Return 0: no agent waits, because the workers admit others by themselves."""
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: the workers close the job when they have finished."""

    def shutdown(self) -> bool:
        if self.standby is not None:
            self.standby.end()
        self._identity.close()
        self._etcd.close()
        return True

    def remove_dead_member(self, local_rank: int) -> None:
        """Remove the members of a dead or stopped worker; a stopped one joins again when it continues."""
        prefix = self._keys.member(member_prefix(self.node, local_rank)) + "-"
        try:
            for key in self._etcd.get(prefix).entries:
                self._etcd.swap({key: None}, {})
        except StoreError as error:
            _log.warning("could not remove the member of a lost worker, its lease will expire: %s", error)
