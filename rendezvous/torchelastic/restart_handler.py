"""The handler of `restart` mode: TorchElastic's view of a node's membership.

A world is a rendezvous, its first seat is group rank 0, and each world gets its own TCPStore, hosted by that seat's
agent, so that it never meets data of an older world.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import replace

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from rendezvous.context import VARIABLE, RendezvousContext
from rendezvous.errors import OptionError, StoreError, TooFewNodesError
from rendezvous.etcd.compaction import Compaction
from rendezvous.etcd.store import EtcdStore, check_permission
from rendezvous.meeting_point import Meeting
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import CLOSED_S, Participant
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.worlds import World
from rendezvous.torchelastic.addresses import interface_of, is_loopback, machine_name, own_address
from rendezvous.torchelastic.conf import BACKEND, Conf
from rendezvous.torchelastic.standby import Standby

GROWTH_GRACE_S = 30.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_log = logging.getLogger("rendezvous")


class EtcdRendezvousHandler(RendezvousHandler):
    """TorchElastic's view of a node's membership."""

    standby: Standby | None = None

    def __init__(self, params: RendezvousParameters, conf: Conf) -> None:
        self._run_id = params.run_id
        self._conf = conf
        self._local_address = own_address(params.local_addr, conf.etcd, params.max_nodes)
        self._store = EtcdStore(conf.etcd)
        policy = Policy(params.min_nodes, params.max_nodes, conf.last_call_s)
        place = Place(machine_name(), self._local_address, num_workers=0)
        self.node = node = Participant(self._store, params.run_id, policy, place, ttl_s=conf.ttl_s)
        check_permission(self._store, node.keys)
        # These callbacks do not reference this handler: a reference cycle would keep its TCPStore until a garbage
        # collection, and a collection in a forked process joins a missing thread, which aborts it.
        self._meeting = Meeting(node, self._local_address, conf.timeout_s, lambda _: node.is_broken())
        self._is_restart_free = self._has_entered = False
        self._compaction = Compaction(conf.etcd, lambda: node.is_leading) if conf.compacts else None
        # After SIGTERM the launcher skips shutdown(); the others should not have to wait for the lease to end.
        atexit.register(node.leave)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def bring(self, num_workers: int, role: str) -> None:
        """Set the workers of this node; called by the agent before the first round."""
        self.node.place = replace(self.node.place, num_workers=num_workers, role=role)

    @property
    def use_agent_store(self) -> bool:
        """True: the agent hosts the TCPStore, and every worker connects to it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a world, and put its description into the environment of the workers.

        Raises RendezvousTimeoutError if too few nodes come, RendezvousGracefulExitError if the job is done, OptionError
        if another one has just finished under the same run id.
        """
        self._is_restart_free = False
        while True:
            try:
                self.node.join(self._conf.timeout_s)
                world = self.node.next_world(self._meeting.host, self._conf.timeout_s)
            except TooFewNodesError as error:
                raise RendezvousTimeoutError(str(error)) from None
            except StoreError as error:
                raise RendezvousConnectionError(str(error)) from None
            if world is None:
                self._check_what_is_done()
                done = (
                    f"nothing started: the job of the run id {self._run_id!r} is done. To run it again, use another "
                    f"--rdzv_id, or wait until {CLOSED_S:.0f} s after its end"
                )
                _log.warning(done)  # torchrun ends with 0 without a message
                raise RendezvousGracefulExitError(done)
            if (store := self._meeting.connect(world)) is not None:
                return self._enter(world, store)

    def num_nodes_waiting(self) -> int:
        """Return the number of changes that require a new round: joiners, losses, members that restart."""
        return 1 if self._is_restart_free else self.node.num_waiting()

    def is_restart_free(self) -> bool:
        """Return True if failed workers may be restarted without charging `max_restarts`: the fault is not theirs."""
        try:
            self._is_restart_free = not self.node.is_to_blame()
        except StoreError as error:
            _log.warning("cannot find out which node failed first, so the restart is charged to this one: %s", error)
        return self._is_restart_free

    @property
    def stop_grace_s(self) -> float:
        """Seconds that workers may take to stop: long if they can still save, short if a peer is gone."""
        return GROWTH_GRACE_S if self.node.is_only_growing() else self._conf.stop_grace_s

    def is_closed(self) -> bool:
        return self.node.view.closed is not None

    def set_closed(self) -> None:
        self.node.close(self.node.view.term)

    def shutdown(self) -> bool:
        """Leave by revoking the lease. The job continues for the others, unless its workers have finished."""
        if self.standby is not None:
            self.standby.end()
        if self._compaction is not None:
            self._compaction.close()
        self.node.leave()
        atexit.unregister(self.node.leave)
        self._meeting.close()
        return True

    def _check_what_is_done(self) -> None:
        """Raise OptionError if another program, or other arguments, finished under this run id."""
        done, mine = self.node.view.closed, self.node.job
        if done is not None and not self._has_entered and done.job.digest and done.job != mine:
            raise OptionError(
                f"the run id {self._run_id!r} was finished by another command ({done.job.folder}): nothing started. "
                f"Give this one ({mine.folder}) a run id of its own (--id, --rdzv_id), or start it {CLOSED_S:.0f} s "
                "after that one."
            )

    def _enter(self, world: World, store: Store) -> RendezvousInfo:
        rank = world.rank_of(self.node.id)
        assert rank is not None, "a node enters only a world that it has a seat in"
        self._has_entered = True
        context = RendezvousContext(
            endpoints=self._conf.etcd.endpoints,
            run_id=self._run_id,
            term=world.term,
            member_id=self.node.id,
            joined_at=self.node.joined_at,
            sealed_at=world.sealed_at,
            cause=world.cause,
            num_nodes=len(world.seats),
            options=self._conf.etcd.secrets(),
        )
        os.environ[VARIABLE] = context.encode()
        _bind_gloo(self._local_address)
        address = RendezvousStoreInfo(world.address, world.port)
        return RendezvousInfo(store, rank, len(world.seats), address)


def _bind_gloo(address: str) -> None:
    """Make gloo groups of any script bind the interface of an address, unless the user has chosen one.

    By default gloo binds the address of the machine's name, which on Debian is a loopback address.
    """
    interface = None if is_loopback(address) else interface_of(address)
    if interface is not None:
        os.environ.setdefault(GLOO_INTERFACE, interface)
