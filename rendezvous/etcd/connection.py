"""A connection to etcd over pyetcd, with deadlines, retries and fail-over that pyetcd lacks.

Every call has a deadline and is retried with jitter until then; a member of etcd that failed is skipped for a moment,
not for five minutes, by the monotonic clock; an expired token is renewed.

Invariant: a client is closed only when no call uses it. gRPC ends the *process* that uses a closed channel.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc  # type: ignore[import-untyped]
import pyetcd
import tenacity
from pyetcd import exceptions as failures
from pyetcd import utils

from rendezvous.errors import StoreRefusedError, StoreUnavailableError
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.etcd.options import EtcdOptions
from rendezvous.identity import split_endpoint
from rendezvous.membership.store import Entry, Snapshot

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
    # The control plane is never reached through the proxy that a cluster sets for downloads.
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


@dataclass(slots=True)
class _Lent:
    """A client, and how many calls have it."""

    client: pyetcd.MultiEndpointEtcd3Client
    num_calls: int = 0


class Connection:
    """One pyetcd client to all endpoints, made when it is first needed and replaced when its token expires.

    Threads may share it.
    """

    def __init__(self, options: EtcdOptions, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.options = options
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._current: _Lent | None = None
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
            return attempts(lambda: self._ask(ask))
        except (grpc.RpcError, failures.Etcd3Exception) as error:
            raise self._explain(error, give_up_after_s) from error

    def client(self) -> pyetcd.MultiEndpointEtcd3Client:
        """Return the present client without counting a use of it: only for a connection that one thread uses."""
        with self._lock:
            return self._lend().client

    def close(self) -> None:
        """Release the client; if calls are using it, the last of them closes it."""
        with self._lock:
            lent, self._current = self._current, None
        if lent is not None and lent.num_calls == 0:
            lent.client.close()

    def _ask(self, ask: Callable[[pyetcd.MultiEndpointEtcd3Client], T]) -> T:
        with self._lock:
            lent = self._lend()
            lent.num_calls += 1
        is_done_with = False
        try:
            return ask(lent.client)
        except (grpc.RpcError, failures.Etcd3Exception) as error:
            is_done_with = _code(error) in _NEEDS_NEW_CLIENT
            raise
        finally:
            with self._lock:
                lent.num_calls -= 1
                if is_done_with and self._current is lent:
                    self._current = None
                is_left = self._current is not lent and lent.num_calls == 0
            if is_left:
                lent.client.close()

    def _lend(self) -> _Lent:
        if self._current is None:
            self._current = _Lent(_make_client(self.options, self._call_timeout_s))
        return self._current

    def _is_transient(self, error: BaseException) -> bool:
        code = _code(error)
        if code is not None:
            # Once every endpoint has just failed, pyetcd says only that there is none to ask.
            self._last_words = _details(error)
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


def list_prefix(connection: Connection, prefix: str, give_up_after_s: float = GIVE_UP_AFTER_S) -> Snapshot:
    """Read all keys below `prefix` at one revision."""
    range_end = utils.prefix_range_end(prefix.encode())
    response = connection.call(
        lambda client: client.get_response(prefix, range_end=range_end), give_up_after_s=give_up_after_s
    )
    entries = {kv.key.decode(): Entry(kv.value.decode(), kv.mod_revision, kv.create_revision) for kv in response.kvs}
    return Snapshot(response.header.revision, entries)


def list_in_life(
    connection: Connection, prefix: str, data_loss: DataLossDetector, give_up_after_s: float = GIVE_UP_AFTER_S
) -> Snapshot:
    """Read all keys below `prefix`, and note in which of etcd's lives that was."""
    asked = data_loss.ask()
    listed = list_prefix(connection, prefix, give_up_after_s)
    return replace(listed, life=data_loss.heard(asked, listed.revision))


class _Endpoint(pyetcd.Endpoint):  # type: ignore[misc]
    """A member of etcd; pyetcd's own skips one that failed by the wall clock, which may be set back by an hour."""

    _failed_at = -math.inf

    def fail(self) -> None:
        super().fail()
        self._failed_at = time.monotonic()

    def is_failed(self) -> bool:
        return time.monotonic() - self._failed_at < float(self.time_retry)


def _make_client(options: EtcdOptions, call_timeout_s: float) -> pyetcd.MultiEndpointEtcd3Client:
    credentials = None
    if options.ca_cert is not None:
        credentials = pyetcd.MultiEndpointEtcd3Client.get_secure_creds(options.ca_cert, options.key, options.cert)
    endpoints = [
        _Endpoint(
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


def _code(error: BaseException) -> grpc.StatusCode | None:
    """The gRPC status behind an error; pyetcd raises its own classes from the original."""
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    return cause.code() if isinstance(cause, grpc.RpcError) and hasattr(cause, "code") else None


def _details(error: BaseException) -> str:
    cause = error if isinstance(error, grpc.RpcError) else error.__context__
    text = cause.details() if isinstance(cause, grpc.RpcError) and hasattr(cause, "details") else str(error)
    return (text or type(error).__name__).splitlines()[0]
