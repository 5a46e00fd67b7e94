"""A connection to etcd over pyetcd, with deadlines, retries and fail-over that pyetcd lacks.

Every call has a deadline and is retried with jitter until then. A failed etcd member is skipped for a moment of the
monotonic clock, not for five minutes. Expired tokens, certificates, and addresses from a file are renewed. `answers`
interprets etcd's errors.

Invariant: a client is closed only when no call uses it. gRPC ends the *process* that uses a closed channel.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc  # type: ignore[import-untyped]
import pyetcd
import tenacity
from pyetcd import exceptions as failures
from pyetcd import utils

from rendezvous.agent.identity import split_endpoint
from rendezvous.errors import OptionError, StoreDeniedError, StoreError, StoreUnavailableError, TooFewNodesError
from rendezvous.etcd.answers import (
    Meaning,
    code_of,
    details_of,
    explained,
    meaning_of,
    needs_new_client,
    says_without_users,
)
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.etcd.options import FILE, LEAST, EtcdOptions, too_old
from rendezvous.etcd.tally import TALLY
from rendezvous.membership.store import Entry, Snapshot
from rendezvous.outage_log import WaitingLog
from rendezvous.pauses import RandomExponential, between
from rendezvous.waiting import Call, GivenUp, begin

T = TypeVar("T")

CALL_TIMEOUT_S = 2.0
GIVE_UP_AFTER_S = 4.0
TRY_S = 2.0
ENDPOINT_RETRY_S = 0.2
DENIED_S = (2.0, 6.0)
"""Range of seconds before a failed login is retried: checking a password costs etcd a tenth of a second, and all
workers of a job may log in at once.
"""
LOGIN_TIMEOUT_S = 10.0
DISK_S = 2.0
"""Seconds to wait for reads from disk."""

_log = logging.getLogger("rendezvous")

_CHANNEL = {
    # etcd drops clients that ping more often than every 5 s; without pings, a dead connection looks idle.
    "grpc.keepalive_time_ms": 6000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 50,
    "grpc.min_reconnect_backoff_ms": 50,
    "grpc.max_reconnect_backoff_ms": 500,
    # The control plane is never behind a cluster's proxy for downloads.
    "grpc.enable_http_proxy": 0,
    # The records of 8,400 workers exceed gRPC's limit of 4 MiB per answer; we only list our own data.
    "grpc.max_receive_message_length": -1,
}


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """etcd's addresses, and the certificates of both sides, as read from files; () without TLS."""

    addresses: tuple[str, ...]
    certificates: tuple[bytes, ...]


@dataclass(slots=True)
class _Lent:
    """A client, its configuration from disk, and its number of running calls."""

    client: pyetcd.MultiEndpointEtcd3Client
    made_from: _OnDisk
    num_calls: int = 0


class Connection:
    """One pyetcd client to all endpoints, made at first use.

    It is replaced when its token has expired, or when it fails and the files on disk have changed: gRPC would keep
    using the old certificates and addresses. Threads may share a connection.
    """

    def __init__(self, options: EtcdOptions, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.options = options
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._current: _Lent | None = None
        self._is_closed = False
        self._reading: Call[_OnDisk | OSError | OptionError] | None = None
        self._last_words = "no answer"
        self._denied: Exception | None = None
        self._denied_until = -math.inf

    def call(self, ask: Callable[[pyetcd.MultiEndpointEtcd3Client], T], *, give_up_after_s: float) -> T:
        """Run `ask`, retrying temporary failures, until it answers or the time is over.

        Raises StoreDeniedError at once, any other StoreUnavailableError after `give_up_after_s`, and StoreRefusedError
        at once if the request itself cannot be carried out.
        """
        attempts = tenacity.Retrying(
            stop=tenacity.stop_after_delay(give_up_after_s),
            wait=RandomExponential(multiplier=0.05, max=0.5),
            retry=tenacity.retry_if_exception(self._may_pass),
            reraise=True,
        )
        try:
            return attempts(lambda: self._ask(ask))
        except (grpc.RpcError, failures.Etcd3Exception) as error:
            options = self.options
            raise explained(error, options.where, options.user, give_up_after_s, self._last_words) from error

    def client(self) -> pyetcd.MultiEndpointEtcd3Client:
        """Return the current client without counting a use of it: only for a connection that one thread uses."""
        with self._lock:
            return self._lend().client

    def close(self) -> None:
        """Release the client for good; if calls are using it, the last of them closes it."""
        with self._lock:
            lent, self._current, self._is_closed = self._current, None, True
        if lent is not None and lent.num_calls == 0:
            lent.client.close()

    def _ask(self, ask: Callable[[pyetcd.MultiEndpointEtcd3Client], T]) -> T:
        with self._lock:
            lent = self._lend()
            lent.num_calls += 1
        is_done_with, asked_at = False, time.monotonic()
        try:
            answer = ask(lent.client)
            TALLY.add_answer(time.monotonic() - asked_at)
            return answer
        except (grpc.RpcError, failures.Etcd3Exception) as error:
            TALLY.add_failure()
            is_done_with = needs_new_client(error) or self._is_outdated(lent)
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
        """Return the current client, or log in with a new one; a failed login is not repeated at once.

        Raises StoreUnavailableError if the connection is closed: another thread may call until then, and nobody would
        close its client.
        """
        if self._is_closed:
            raise StoreUnavailableError(f"the connection to etcd at {self.options.where} is closed")
        if self._current is None:
            if self._denied is not None and time.monotonic() < self._denied_until:
                raise self._denied
            try:
                self._current = self._make()
                self._denied = None
            except grpc.RpcError as error:  # from a login
                self._denied, self._denied_until = error, time.monotonic() + between(*DENIED_S)
                raise
        return self._current

    def _make(self) -> _Lent:
        try:
            found = self._read_from_disk()
        except OSError as error:  # the file is being replaced, or its storage hangs
            self._last_words = f"{error.filename} cannot be read: {error.strerror}"
            raise failures.NoServerAvailableError(self._last_words) from None
        except OptionError as error:  # e.g. etcd is not there yet, and will write the file
            self._last_words = str(error)
            raise failures.NoServerAvailableError(self._last_words) from None
        try:
            client = _make_client(self.options, found, self._call_timeout_s)
        except grpc.RpcError as error:
            if not says_without_users(error):
                raise
            client = _make_client(replace(self.options, user=None, password=None), found, self._call_timeout_s)
        return _Lent(client, found)

    def _is_outdated(self, lent: _Lent) -> bool:
        try:
            return self._read_from_disk() != lent.made_from
        except (OSError, OptionError):
            return False

    def _read_from_disk(self) -> _OnDisk:
        """Read the files on another thread, since their storage may hang; a hanging read is not started again."""
        if not self.options.is_on_disk:
            return _read_from_disk(self.options)
        reading = self._reading or begin("etcd's files", partial(_tried_to_read, self.options))
        self._reading = reading
        try:
            found = reading.result(DISK_S)
        except GivenUp:
            raise TimeoutError(
                errno.ETIMEDOUT, "its storage does not answer", self.options.where.removeprefix(FILE)
            ) from None
        finally:
            if reading.ended.is_set():
                self._reading = None
        if isinstance(found, Exception):  # every thread that waits for it gets it: a call raises its error once
            raise found
        return found

    def _may_pass(self, error: BaseException) -> bool:
        if code_of(error) is not None:
            self._last_words = details_of(error)
        return meaning_of(error) in (Meaning.AGAIN, Meaning.LOG_IN, Meaning.BLOCKED)


def list_prefix(
    connection: Connection, prefix: str, give_up_after_s: float = GIVE_UP_AFTER_S, end: str = ""
) -> Snapshot:
    """Read the keys below `prefix` that sort before `end`, or all of them if it is empty, at one revision."""
    range_end = range_end_of(prefix, end)
    response = connection.call(
        lambda client: client.get_response(prefix, range_end=range_end), give_up_after_s=give_up_after_s
    )
    entries = {text_of(kv.key): Entry(text_of(kv.value), kv.mod_revision, kv.create_revision) for kv in response.kvs}
    return Snapshot(response.header.revision, entries, is_whole=not end)


def range_end_of(prefix: str, end: str) -> bytes:
    """Return etcd's end of the range of keys below `prefix` that sort before `end`; of all of them if it is empty."""
    return end.encode() or bytes(utils.prefix_range_end(prefix.encode()))


def await_etcd(options: EtcdOptions, prefix: str, timeout_s: float) -> None:
    """Wait until etcd answers, since it may have failed together with this node; raise TooFewNodesError on timeout.

    A restart would not help, and a wrong address looks the same. Raises at once OptionError if etcd is too old, and
    StoreDeniedError if it denies access: it has never let this process in.
    """
    log, deadline = WaitingLog(_log, timeout_s), time.monotonic() + timeout_s
    with contextlib.closing(Connection(options)) as connection:
        while True:
            try:
                list_prefix(connection, prefix, min(TRY_S, max(0.1, deadline - time.monotonic())))
                _refuse_too_old(connection)
                return
            except StoreDeniedError:
                raise
            except StoreUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise TooFewNodesError(f"etcd did not answer within {timeout_s:g} s: {error}") from error
                why = str(error)
                log.waits(lambda left_s, why=why: f"waiting for etcd, giving up in {left_s:.0f} s: {why}")  # type: ignore[misc]


def _refuse_too_old(connection: Connection) -> None:
    """Raise OptionError for an etcd without features that jobs need: calls would fail one by one."""
    try:
        version = connection.call(lambda client: client.status().version, give_up_after_s=TRY_S)
    except StoreError as error:  # the user may lack the permission, or a proxy may not know
        _log.debug("etcd at %s does not say its version: %s", connection.options.where, error)
        return
    if too_old(version):
        raise OptionError(
            f"the etcd at {connection.options.where} is version {version}, and {LEAST} or newer is needed: update it, "
            "or give --endpoint HOST:PORT of a newer one"
        )


def text_of(found: bytes) -> str:
    """Return a key or value as text; invalid bytes, which we never write, become escapes."""
    return found.decode(errors="backslashreplace")


def list_in_life(
    connection: Connection,
    prefix: str,
    data_loss: DataLossDetector,
    give_up_after_s: float = GIVE_UP_AFTER_S,
    end: str = "",
) -> Snapshot:
    """Call `list_prefix`, and add the number of the etcd life that the keys belong to."""
    asked = data_loss.ask()
    listed = list_prefix(connection, prefix, give_up_after_s, end)
    return replace(listed, life=data_loss.heard(asked, listed.revision))


class _Endpoint(pyetcd.Endpoint):  # type: ignore[misc]
    """An etcd member; pyetcd's class times failures by the wall clock, which may be set back."""

    _failed_at = -math.inf

    def fail(self) -> None:
        super().fail()
        self._failed_at = time.monotonic()

    def is_failed(self) -> bool:
        return time.monotonic() - self._failed_at < float(self.time_retry)


def _read_from_disk(options: EtcdOptions) -> _OnDisk:
    """Read etcd's addresses, the authority's certificate, and the client's key and certificate, if given.

    Raises OSError or OptionError.
    """
    files = [path for path in (options.ca_cert, options.key, options.cert) if path is not None]
    return _OnDisk(options.addresses(), tuple(Path(path).read_bytes() for path in files))


def _tried_to_read(options: EtcdOptions) -> _OnDisk | OSError | OptionError:
    try:
        return _read_from_disk(options)
    except (OSError, OptionError) as error:
        return error


def _make_client(options: EtcdOptions, found: _OnDisk, call_timeout_s: float) -> pyetcd.MultiEndpointEtcd3Client:
    credentials = grpc.ssl_channel_credentials(*found.certificates) if found.certificates else None
    endpoints = [
        _Endpoint(
            *split_endpoint(endpoint),
            secure=credentials is not None,
            creds=credentials,
            time_retry=ENDPOINT_RETRY_S,
            opts=list(_CHANNEL.items()),
        )
        for endpoint in found.addresses
    ]
    try:
        client = pyetcd.MultiEndpointEtcd3Client(
            endpoints, timeout=LOGIN_TIMEOUT_S, user=options.user, password=options.password, failover=True
        )
        client.timeout = call_timeout_s
    except Exception:  # the login failed
        for endpoint in endpoints:
            endpoint.close()
        raise
    # The token already travels as metadata; as call credentials, gRPC refuses it on a channel without TLS.
    client.call_credentials = None
    return client
