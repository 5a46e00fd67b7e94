"""The store on etcd v3: calls go through a `Connection`, a watch is a `Mirror`.

If the answer to a transaction was lost, its keys are read to find out if it succeeded. Each lease is renewed at a third
of its time to live, on its own thread and connection.
"""

from __future__ import annotations

import logging
import math
import threading
import time

import pyetcd
from pyetcd import utils

from rendezvous.errors import StoreDeniedError, StoreError, StoreRefusedError, StoreUnavailableError
from rendezvous.etcd.connection import (
    CALL_TIMEOUT_S,
    GIVE_UP_AFTER_S,
    Connection,
    list_in_life,
)
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.etcd.options import EtcdOptions
from rendezvous.etcd.watch import Mirror
from rendezvous.membership.records import Keys
from rendezvous.membership.store import (
    Guards,
    Lease,
    Put,
    Snapshot,
    Store,
    Watch,
    Writes,
)

NEVER = (1 << 62) - 1
"""A revision that no key will have."""

_log = logging.getLogger(__name__)


class EtcdStore:
    """Keys, leases and watches on a real etcd; safe to share between threads."""

    def __init__(self, options: EtcdOptions, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._connection = Connection(options)
        self._give_up_after_s = give_up_after_s
        self._data_loss = DataLossDetector()

    def get(self, prefix: str) -> Snapshot:
        return list_in_life(self._connection, prefix, self._data_loss, self._give_up_after_s)

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        if len(writes) == 1 and not guards and None in writes.values():
            return self._delete(next(iter(writes)))
        tries = 0

        def transact(client: pyetcd.MultiEndpointEtcd3Client) -> int | None:
            nonlocal tries
            tries += 1
            compare = [_comparison(client, key, revision) for key, revision in guards.items()]
            operations = [_operation(client, key, put) for key, put in writes.items()]
            succeeded, responses = client.transaction(compare=compare, success=operations, failure=[])
            return _revision(responses) if succeeded else None

        asked = self._data_loss.ask()
        revision = self._connection.call(transact, give_up_after_s=self._give_up_after_s)
        if revision is None and tries > 1:
            return self._written_before(writes)
        if revision is not None:
            self._data_loss.heard(asked, revision)
        return revision

    def lease(self, ttl_s: float, *, renew: bool = True) -> EtcdLease:
        granted = self._connection.call(
            lambda client: client.lease(max(1, math.ceil(ttl_s))), give_up_after_s=self._give_up_after_s
        )
        ttl_s = float(granted.ttl)
        # An unresponsive etcd member must not cost a lease: leave time to ask another.
        connection = Connection(self._connection.options, call_timeout_s=min(CALL_TIMEOUT_S, ttl_s / 4))
        return EtcdLease(connection, granted.id, ttl_s, renew=renew)

    def watch(self, prefix: str, end: str = "") -> Watch:
        first = list_in_life(self._connection, prefix, self._data_loss, self._give_up_after_s, end)
        return Mirror(self._connection.options, prefix, end, first=first, data_loss=self._data_loss)

    def close(self) -> None:
        self._connection.close()

    def _delete(self, key: str) -> int:
        """Delete a key by the only request that a full etcd carries out; it refuses all transactions."""
        asked = self._data_loss.ask()
        answer = self._connection.call(
            lambda client: client.delete(key, return_response=True), give_up_after_s=self._give_up_after_s
        )
        self._data_loss.heard(asked, answer.header.revision)
        return int(answer.header.revision)

    def _written_before(self, writes: Writes) -> int | None:
        """Return the revision of an earlier try that wrote exactly `writes` although its answer was lost, else None."""
        revisions = set()
        for key, put in writes.items():
            entry = self.get(key).entries.get(key)
            if put is None or entry is None or entry.value != put.value:
                return None
            revisions.add(entry.mod_revision)
        return revisions.pop() if len(revisions) == 1 else None


def check_permission(store: Store, keys: Keys) -> None:
    """Raise StoreDeniedError if this process may not write a job's keys, before anything depends on it.

    The write is guarded by a revision that etcd never reaches, so it never happens. Alarms and outages are only logged:
    workers wait for their end.
    """
    probe = keys.member("probe")
    try:
        store.swap({probe: Put("")}, {probe: NEVER})
    except StoreDeniedError:
        raise
    except StoreUnavailableError as error:
        _log.warning("a world cannot form yet: %s", error)


class EtcdLease:
    """A lease that a thread renews every third of its time to live, until etcd says that it has ended.

    After a failed renewal, the next follows after a twelfth, so that all leases are renewed in time after an etcd
    outage.
    """

    def __init__(self, connection: Connection, lease_id: int, ttl_s: float, *, renew: bool) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self._connection = connection
        self._lost = threading.Event()
        self._stopped = threading.Event()
        if renew:
            threading.Thread(target=self._renew, name=f"lease-{lease_id:x}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    def revoke(self) -> None:
        self._stopped.set()
        if self.is_lost:
            return
        try:
            self._connection.call(lambda client: client.revoke_lease(self.id), give_up_after_s=CALL_TIMEOUT_S)
        except StoreRefusedError:
            _log.debug("lease %x had ended before it was revoked", self.id)
        except StoreUnavailableError:
            if not self.is_lost:  # else its last renewal, which ran meanwhile, has found its end
                raise
        self._lost.set()
        self._connection.close()

    def abandon(self) -> None:
        self._stopped.set()
        self._connection.close()

    def _renew(self) -> None:
        wait_s, started = self.ttl_s / 3, time.monotonic()
        is_silent, renewed_s = False, started
        while not self._stopped.wait(max(0.0, started + wait_s - time.monotonic())):
            started, wait_s = time.monotonic(), self.ttl_s / 3
            try:
                left_s = self._connection.call(self._refresh, give_up_after_s=self.ttl_s / 3)
            except (StoreError, RuntimeError) as error:  # the latter if no thread can be started
                if self._stopped.is_set():
                    return  # revoked meanwhile
                # Etcd keeps leases across its own outage: only its explicit answer ends this one.
                if not is_silent:
                    _log.warning("etcd does not answer; workers continue until one is lost: %s", error)
                is_silent, wait_s = True, self.ttl_s / 12
            else:
                if self._stopped.is_set():
                    return
                if left_s <= 0:
                    ago_s = time.monotonic() - renewed_s
                    _log.warning("the lease of %.0f s has expired; it was last renewed %.1f s ago", self.ttl_s, ago_s)
                    self._lost.set()
                    self._connection.close()
                    return
                is_silent, renewed_s = False, time.monotonic()

    def _refresh(self, client: pyetcd.MultiEndpointEtcd3Client) -> float:
        """Return the lease's remaining seconds; 0 if etcd no longer knows it."""
        return max((float(answer.TTL) for answer in client.refresh_lease(self.id)), default=0.0)


def _comparison(client: pyetcd.MultiEndpointEtcd3Client, key: str, revision: int) -> object:
    if key.endswith("/"):
        return client.transactions.mod(key, range_end=utils.prefix_range_end(key.encode())) < revision + 1
    return client.transactions.mod(key) == revision


def _operation(client: pyetcd.MultiEndpointEtcd3Client, key: str, put: Put | None) -> object:
    if put is None:
        return client.transactions.delete(key)
    return client.transactions.put(key, put.value, lease=None if put.lease is None else _lease_id(put.lease))


def _lease_id(lease: Lease) -> int:
    assert isinstance(lease, EtcdLease), "a key of etcd hangs on a lease of etcd"
    return lease.id


def _revision(responses: list[object]) -> int:
    """Return the revision of a transaction; a delete before its first change has the revision before it."""
    answers = (getattr(each, each.WhichOneof("response")) for each in responses)  # type: ignore[attr-defined]
    return max(int(answer.header.revision) for answer in answers)
