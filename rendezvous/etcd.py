"""The store on etcd v3, over pyetcd, with what that client leaves out.

Every call has a deadline and a bounded number of retries with jitter; a member of etcd that failed is skipped for a
moment, not for five minutes; an expired token is renewed; a transaction whose answer was lost is looked up instead of
being reported as refused. Leases are renewed at a third of their time to live on a thread and connection of their
own. Watches live in `mirror.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import grpc  # type: ignore[import-untyped]
import pyetcd
import tenacity
from pyetcd import exceptions as failures
from pyetcd import utils

from rendezvous.errors import StoreError, StoreRefusedError, StoreUnavailableError
from rendezvous.lives import Lives
from rendezvous.options import EtcdOptions, split_endpoint
from rendezvous.store import Entry, Guards, Lease, Put, Snapshot, Watch, Writes

T = TypeVar("T")

CALL_TIMEOUT_S = 2.0
GIVE_UP_AFTER_S = 4.0
ENDPOINT_RETRY_S = 0.2

_CHANNEL = {
    # etcd drops clients that ping more often than every 5 s; without pings, a black-holed connection looks idle.
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 50,
    "grpc.min_reconnect_backoff_ms": 50,
    "grpc.max_reconnect_backoff_ms": 500,
    # The control plane is never behind the proxy that a cluster sets for downloads.
    "grpc.enable_http_proxy": 0,
}
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNAUTHENTICATED,
    # What etcd has no code for, above all its own "context deadline exceeded" while no member leads.
    grpc.StatusCode.UNKNOWN,
}
# pyetcd would ask the same member again, with the same token.
_NEEDS_NEW_CLIENT = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNKNOWN}
_log = logging.getLogger(__name__)


class Connection:
    """One pyetcd client to all endpoints, made when it is first needed and made anew when its token expires."""

    def __init__(self, options: EtcdOptions, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.options = options
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._client: pyetcd.MultiEndpointEtcd3Client | None = None
        self._last_words = "no answer"

    def call(self, ask: Callable[[pyetcd.MultiEndpointEtcd3Client], T], *, give_up_after_s: float) -> T:
        """Run `ask`, again after transient failures, until it answers or the time is over."""
        attempts = tenacity.Retrying(
            stop=tenacity.stop_after_delay(give_up_after_s),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            retry=tenacity.retry_if_exception(self._is_transient),
            reraise=True,
        )
        try:
            return attempts(lambda: ask(self.client()))
        except (grpc.RpcError, failures.Etcd3Exception) as error:
            raise self._explain(error, give_up_after_s) from error

    def client(self) -> pyetcd.MultiEndpointEtcd3Client:
        with self._lock:
            if self._client is None:
                self._client = _make_client(self.options, self._call_timeout_s)
            return self._client

    def close(self) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _is_transient(self, error: BaseException) -> bool:
        code = _code(error)
        if code is not None:
            # Once every endpoint has just failed, pyetcd says only that there is none to ask.
            self._last_words = _details(error)
        if code in _NEEDS_NEW_CLIENT:
            self.close()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # a full database, too, which asking again does not empty
            return "too many requests" in _details(error)
        return code in _TRANSIENT or isinstance(error, failures.NoServerAvailableError | failures.WatchTimedOut)

    def _explain(self, error: Exception, waited_s: float) -> StoreUnavailableError | StoreRefusedError:
        where = self.options.where
        if _code(error) is grpc.StatusCode.UNAUTHENTICATED or not self._is_transient(error):
            return StoreRefusedError(f"etcd at {where} refused: {_details(error)}")
        return StoreUnavailableError(
            f"no etcd answers at {where} (tried for {waited_s:.0f} s; {self._last_words}). "
            "Start etcd there, or correct the endpoint (--rdzv_endpoint=HOST:PORT) or its TLS options."
        )


class EtcdStore:
    """Keys, leases and watches on a real etcd; safe to share between threads."""

    def __init__(self, options: EtcdOptions, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._connection = Connection(options)
        self._give_up_after_s = give_up_after_s
        self._lives = Lives()

    def get(self, prefix: str) -> Snapshot:
        return list_in_life(self._connection, prefix, self._lives, self._give_up_after_s)

    def swap(self, writes: Writes, guards: Guards) -> int | None:
        tries = 0

        def transact(client: pyetcd.MultiEndpointEtcd3Client) -> int | None:
            nonlocal tries
            tries += 1
            compare = [_comparison(client, key, revision) for key, revision in guards.items()]
            operations = [_operation(client, key, put) for key, put in writes.items()]
            succeeded, responses = client.transaction(compare=compare, success=operations, failure=[])
            return _revision(responses) if succeeded else None

        asked = self._lives.ask()
        revision = self._connection.call(transact, give_up_after_s=self._give_up_after_s)
        if revision is None and tries > 1:
            return self._written_before(writes)
        if revision is not None:
            self._lives.heard(asked, revision)
        return revision

    def lease(self, ttl_s: float, *, renew: bool = True) -> EtcdLease:
        granted = self._connection.call(
            lambda client: client.lease(max(1, math.ceil(ttl_s))), give_up_after_s=self._give_up_after_s
        )
        ttl_s = float(granted.ttl)
        # A member of etcd that says nothing must not cost a lease: there has to be time left to ask another.
        connection = Connection(self._connection.options, call_timeout_s=min(CALL_TIMEOUT_S, ttl_s / 4))
        return EtcdLease(connection, granted.id, ttl_s, renew=renew)

    def watch(self, prefix: str) -> Watch:
        from rendezvous.mirror import Mirror

        return Mirror(self._connection.options, prefix, first=self.get(prefix), lives=self._lives)

    def close(self) -> None:
        self._connection.close()

    def _written_before(self, writes: Writes) -> int | None:
        """Return the revision that wrote exactly `writes`: an earlier try whose answer was lost."""
        revisions = set()
        for key, put in writes.items():
            entry = self.get(key).entries.get(key)
            if put is None or entry is None or entry.value != put.value:
                return None
            revisions.add(entry.mod_revision)
        return revisions.pop() if len(revisions) == 1 else None


class EtcdLease:
    """A lease that a thread renews at a third of its time to live, until etcd itself says that it is over."""

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
            _log.debug("lease %x was over before it was revoked", self.id)
        finally:
            self._lost.set()
            self._connection.close()

    def abandon(self) -> None:
        self._stopped.set()

    def _renew(self) -> None:
        pause_s = self.ttl_s / 3
        is_silent, renewed_s = False, time.monotonic()
        while not self._stopped.wait(pause_s):
            started = time.monotonic()
            try:
                left_s = self._connection.call(self._refresh, give_up_after_s=self.ttl_s / 3)
            except StoreError as error:
                # Etcd keeps leases over its own outage, so only its word ends this one; "too many requests" is not it.
                if not is_silent:
                    _log.warning("cannot renew the lease, trying on: %s", error)
                is_silent = True
            else:
                if left_s <= 0:
                    ago_s = time.monotonic() - renewed_s
                    _log.warning("the lease of %.0f s is over, last renewed %.1f s ago", self.ttl_s, ago_s)
                    self._lost.set()
                    self._connection.close()
                    return
                is_silent, renewed_s = False, time.monotonic()
            pause_s = max(0.0, self.ttl_s / 3 - (time.monotonic() - started))

    def _refresh(self, client: pyetcd.MultiEndpointEtcd3Client) -> float:
        """Return the seconds that the lease has left; 0 if etcd does not know it any more."""
        return max((float(answer.TTL) for answer in client.refresh_lease(self.id)), default=0.0)


def list_prefix(connection: Connection, prefix: str, give_up_after_s: float = GIVE_UP_AFTER_S) -> Snapshot:
    """Read all keys below `prefix` at one revision."""
    range_end = utils.prefix_range_end(prefix.encode())
    response = connection.call(
        lambda client: client.get_response(prefix, range_end=range_end), give_up_after_s=give_up_after_s
    )
    entries = {kv.key.decode(): Entry(kv.value.decode(), kv.mod_revision, kv.create_revision) for kv in response.kvs}
    return Snapshot(response.header.revision, entries)


def list_in_life(
    connection: Connection, prefix: str, lives: Lives, give_up_after_s: float = GIVE_UP_AFTER_S
) -> Snapshot:
    """Read all keys below `prefix`, and tell in which of etcd's lives."""
    asked = lives.ask()
    listed = list_prefix(connection, prefix, give_up_after_s)
    return replace(listed, life=lives.heard(asked, listed.revision))


def _make_client(options: EtcdOptions, call_timeout_s: float) -> pyetcd.MultiEndpointEtcd3Client:
    credentials = None
    if options.ca_cert is not None:
        credentials = pyetcd.MultiEndpointEtcd3Client.get_secure_creds(options.ca_cert, options.key, options.cert)
    endpoints = [
        pyetcd.Endpoint(
            *split_endpoint(endpoint),
            secure=credentials is not None,
            creds=credentials,
            time_retry=ENDPOINT_RETRY_S,
            opts=list(_CHANNEL.items()),
        )
        for endpoint in options.endpoints
    ]
    client = pyetcd.MultiEndpointEtcd3Client(
        endpoints, timeout=call_timeout_s, user=options.user, password=options.password, failover=True
    )
    # The token travels as metadata already; as call credentials, too, gRPC refuses it on a channel without TLS.
    client.call_credentials = None
    return client


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
    """The revision of a transaction; every write in it answers with the same one."""
    first = responses[0]
    return int(getattr(first, first.WhichOneof("response")).header.revision)  # type: ignore[attr-defined]


def _code(error: BaseException) -> grpc.StatusCode | None:
    """The gRPC status behind an error; pyetcd raises its own classes from the original."""
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    return cause.code() if isinstance(cause, grpc.RpcError) and hasattr(cause, "code") else None


def _details(error: BaseException) -> str:
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    text = cause.details() if isinstance(cause, grpc.RpcError) and hasattr(cause, "details") else str(error)
    return (text or type(error).__name__).splitlines()[0]
