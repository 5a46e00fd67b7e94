"""The job's etcd, as this node reaches it: every member, TLS, room, speed, leases, permission and the clock."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from elastic_train.health.clock import Greeting, greeted, judged
from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.wording import counted, first_line, size
from rendezvous.agent.identity import split_endpoint
from rendezvous.errors import OptionError, ServerError, StoreError
from rendezvous.etcd.connection import Connection, list_prefix
from rendezvous.etcd.options import EtcdOptions
from rendezvous.etcd.server import find_binary
from rendezvous.etcd.store import EtcdStore, check_permission
from rendezvous.membership.records import Keys
from rendezvous.torchelastic.addresses import is_loopback

ANSWER_S = 3.0
NUM_CALLS = 10
SLOW_S = 0.1
"""A lease of 3 s is renewed each second; a call that takes so long leaves room for few tries."""
DEFAULT_QUOTA, FULL = 2 << 30, 0.8
"""etcd's own limit to its database; the API does not say which one is set."""
SOON_S = 14 * 86400.0


def examine_own_etcd() -> Iterator[Finding]:
    """Say whether a job without an etcd of yours could start one here."""
    try:
        yield ok("etcd", f"none named; a job of one node starts {find_binary()}")
    except ServerError as error:
        yield warn("etcd", f"none named, and none can be started here: {error}", "name one: --etcd HOST:2379")


def examine_etcd(options: EtcdOptions, run_id: str, ttl_s: float) -> Iterator[Finding]:
    """Say whether etcd serves a job of that run id, whose leases are to last `ttl_s`."""
    try:
        addresses = options.addresses()
    except OptionError as error:
        yield fail("etcd", str(error), "etcd.sbatch writes it once etcd answers")
        return
    answering = []
    for endpoint in addresses:
        with contextlib.closing(Connection(replace(options, endpoints=(endpoint,)))) as one:
            try:
                list_prefix(one, Keys(run_id).prefix + "doctor/", ANSWER_S)
                answering.append(endpoint)
            except StoreError as error:
                yield fail("etcd", f"{endpoint}: {first_line(error)}", "is it up, and is the way to it open?")
    if not answering:
        return
    with contextlib.closing(Connection(replace(options, endpoints=tuple(answering)))) as connection:
        yield from _members(connection, answering)
        yield from _room(connection)
        yield from _speed(connection, run_id)
    yield from _leases(options, run_id, ttl_s)
    yield from _greetings(options, answering[0])


def _members(connection: Connection, answering: list[str]) -> Iterator[Finding]:
    number = connection.call(lambda client: len(list(client.members)), give_up_after_s=ANSWER_S)
    said = f"{', '.join(answering)}: {counted(number, 'member')}"
    if number < 3:
        yield warn("etcd", f"{said}, of which none may be lost", "for jobs that matter, operate three members")
    else:
        yield ok("etcd", f"{said}, of which {(number - 1) // 2} may be lost")


def _room(connection: Connection) -> Iterator[Finding]:
    """Judge alarms and the size of the database; who may read it only needs a user that may."""
    try:
        alarms = connection.call(lambda client: [a.alarm_type for a in client.list_alarms()], give_up_after_s=ANSWER_S)
        status = connection.call(lambda client: client.status(), give_up_after_s=ANSWER_S)
    except StoreError as error:
        yield warn("etcd's room", f"cannot be asked for: {first_line(error)}", "ask who operates it")
        return
    names = [{1: "NOSPACE", 2: "CORRUPT"}.get(alarm, str(alarm)) for alarm in alarms]
    taken = f"{size(status.db_size)} of a database of {size(DEFAULT_QUOTA)} by default; version {status.version}"
    if names:
        yield fail(
            "etcd's room", f"alarm: {', '.join(names)}; {taken}", "docs/operations/recover.md says how to clear it"
        )
    elif status.db_size > FULL * DEFAULT_QUOTA:
        yield warn("etcd's room", taken, "set --auto-compaction-retention, and defragment it (etcdctl defrag)")
    else:
        yield ok("etcd's room", taken)


def _speed(connection: Connection, run_id: str) -> Iterator[Finding]:
    took = []
    for _ in range(NUM_CALLS):
        began = time.monotonic()
        list_prefix(connection, Keys(run_id).prefix + "doctor/", ANSWER_S)
        took.append(time.monotonic() - began)
    said = f"{1e3 * statistics.median(took):.1f} ms a call, the slowest {1e3 * max(took):.0f} ms"
    if statistics.median(took) > SLOW_S:
        yield warn("etcd's latency", said, "give it disks of its own, nearer to the nodes; or a longer --ttl-s")
    else:
        yield ok("etcd's latency", said)


def _leases(options: EtcdOptions, run_id: str, ttl_s: float) -> Iterator[Finding]:
    try:
        with contextlib.closing(EtcdStore(options, give_up_after_s=ANSWER_S)) as store:
            check_permission(store, Keys(run_id))
            lease = store.lease(ttl_s, renew=False)
            granted_s = lease.ttl_s
            lease.revoke()
    except StoreError as error:
        yield fail("etcd's leases", f"none to be had: {first_line(error)}", "no node can join until that is fixed")
        return
    if granted_s > ttl_s:
        yield warn(
            "etcd's leases",
            f"it grants {granted_s:.0f} s where {ttl_s:.0f} s are wanted: a lost node is noticed that much later",
            "a shorter election timeout of etcd (--election-timeout) allows shorter leases",
        )
    else:
        yield ok("etcd's leases", f"{granted_s:.0f} s; this user may write the keys of {run_id!r}")


def _greetings(options: EtcdOptions, endpoint: str) -> Iterator[Finding]:
    host = split_endpoint(endpoint)[0]
    if options.ca_cert is None and not is_loopback(host):
        yield warn("etcd's TLS", "the connection is in plain text", "give etcd certificates, and nodes ca_cert=FILE")
    greeting = greeted(options, endpoint)
    if isinstance(greeting, Greeting) and greeting.expires_at is not None:
        left_s = greeting.expires_at - time.time()
        said = f"its certificate holds for {left_s / 86400:.0f} days"
        yield warn("etcd's TLS", said, "renew it") if left_s < SOON_S else ok("etcd's TLS", said)
    yield judged(endpoint, greeting)
