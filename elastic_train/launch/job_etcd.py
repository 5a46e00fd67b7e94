"""The etcd that a job starts for itself on its first node, running until the job's last worker has left.

A scheduler signals all processes of a job, including this etcd, just when the workers need it to commit and leave. So
it is restarted on its data whenever it ends, and its node waits for the others' workers.

Its name and port derive from the run id: several jobs may share a first node without sharing an etcd.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

from elastic_train.errors import TooFewNodesError
from elastic_train.launch import departure
from elastic_train.launch.options import Launch
from rendezvous.errors import ServerError, StoreError
from rendezvous.etcd.options import etcd_options
from rendezvous.etcd.server import EtcdServer, is_answered_by
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.records import Keys
from rendezvous.outage_log import WaitingLog

ETCD_PORTS = range(20_000, 30_000)
"""Ports for a job's etcd on its first node, selected by run id."""
LOOK_EVERY_S = 0.1
MOST_TRIES = 20
"""Consecutive restarts of an etcd before giving up."""

_log = logging.getLogger("elastic_train")


class JobEtcd:
    """The job's etcd endpoint and, on its own node, its supervisor."""

    def __init__(self, endpoint: str, server: EtcdServer | None = None) -> None:
        self.endpoint = endpoint
        self._server = server
        self._is_over = threading.Event()
        self.is_lost = False
        """True once it has ended and cannot be started again."""
        # Processes that the thread starts die with it, so it lives as long.
        self._keeper = threading.Thread(target=self._keep, name="etcd", daemon=True)

    def keep(self) -> None:
        """Restart it whenever it ends, from now on; not earlier: a process with threads must not fork."""
        if self._server is not None:
            self._keeper.start()

    def close(self) -> None:
        self._is_over.set()
        if self._keeper.ident is not None:
            self._keeper.join()
        if self._server is not None:
            self._server.close()

    def _keep(self) -> None:
        assert self._server is not None, "it is here"
        num_tries = 0
        while not self._is_over.wait(LOOK_EVERY_S * 2 ** min(num_tries, 6)) and num_tries < MOST_TRIES:
            # After a failed restart there is no process that could have ended.
            if num_tries == 0 and not self._server.has_ended:
                continue
            _log.warning("the job's etcd has ended, perhaps by a signal to the whole job: it is started again")
            try:
                self._server.start_again()
                num_tries = 0
            except (ServerError, StoreError, OSError) as error:
                num_tries += 1
                _log.warning("the job's etcd could not be started again: %s", error)
        self.is_lost = not self._is_over.is_set()
        self._is_over.wait()


@contextlib.contextmanager
def job_etcd(plan: Launch) -> Iterator[JobEtcd]:
    """Yield the job's etcd: the given one, one started here, or another node's, once it answers.

    Raise ServerError if none can be started or the port belongs to another job, TooFewNodesError if the node that
    starts it does not come in time.
    """
    if plan.endpoint is not None:
        yield JobEtcd(plan.endpoint)
        return
    digest = hashlib.sha256(plan.run_id.encode()).hexdigest()
    name, port = f"job-{digest[:12]}", ETCD_PORTS[int(digest, 16) % len(ETCD_PORTS)]
    if not (plan.max_nodes == 1 or plan.is_etcd_host):
        endpoint = f"{plan.etcd_address}:{port}"
        _await_etcd(endpoint, name, plan.timeout_s)
        yield JobEtcd(endpoint)
        return
    is_alone = plan.max_nodes == 1
    server = EtcdServer() if is_alone else EtcdServer(port=port, host="0.0.0.0", name=name)
    etcd = JobEtcd(server.endpoint if is_alone else f"{socket.gethostname()}:{port}", server)
    try:
        server.start()
        yield etcd
        if not is_alone:
            _await_others(etcd, server.endpoint, plan)
    except departure.AskedToLeave:
        if not is_alone and not server.has_ended:
            _await_others(etcd, server.endpoint, plan)
        raise
    finally:
        etcd.close()


def _await_etcd(endpoint: str, name: str, timeout_s: float) -> None:
    """Return once the job's etcd answers: its node may boot or queue longer than this one."""
    log, deadline = WaitingLog(_log, timeout_s), time.monotonic() + timeout_s
    while not is_answered_by(endpoint, name, give_up_after_s=1.0):
        log.waits(
            lambda left_s: (
                f"waiting for the first node, which starts the job's etcd at {endpoint}: giving up in "
                f"{left_s:.0f} s (--timeout-s)"
            )
        )
        if time.monotonic() > deadline:
            raise TooFewNodesError(
                f"no etcd answered at {endpoint} within {timeout_s:.0f} s: the first node of the job starts it, and it "
                "has not come. Look at that node's log, or give all nodes an etcd of yours (--endpoint HOST:PORT)."
            )


def _await_others(etcd: JobEtcd, endpoint: str, plan: Launch) -> None:
    """Return once no worker of the job is left, or its etcd is lost; after a request to leave, at the latest when the
    grace period ends."""
    keys, log = Keys(plan.run_id), WaitingLog(_log)
    with contextlib.closing(EtcdStore(etcd_options(endpoint))) as store:
        while (asked_s := departure.asked_s()) is None or asked_s < plan.grace_s:
            try:
                num_left = len(store.get(keys.members).entries)
            except StoreError:
                if etcd.is_lost:
                    break
                continue  # it is being restarted
            except departure.AskedToLeave:
                continue  # the grace period starts now
            if not num_left:
                return
            log.waits(lambda _: "workers of other nodes still run: this node keeps the job's etcd for them")
            with contextlib.suppress(departure.AskedToLeave):
                time.sleep(LOOK_EVERY_S)
    _log.warning("workers of other nodes still run, and lose the job's etcd with this node")
