"""Faults that only a real etcd can cause for a client: it is down, returns, loses data, refuses."""

from __future__ import annotations

import importlib
import logging
import queue
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pyetcd
import pytest
from pyetcd import watch as streams

from chaos.services.authority import Authority
from chaos.services.etcd_cluster import EtcdCluster, frozen
from rendezvous import EtcdServer, EtcdStore, OptionError, StoreUnavailableError, etcd_options
from rendezvous.errors import StoreDeniedError
from rendezvous.etcd import watch as mirror
from rendezvous.etcd.connection import Connection, await_etcd, list_prefix
from rendezvous.etcd.data_loss import DataLossDetector
from rendezvous.etcd.options import too_old
from rendezvous.etcd.store import EtcdLease
from rendezvous.etcd.tally import Tally
from rendezvous.membership.store import Put, Snapshot
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.rendezvous_sides import client_of, patient

pytestmark = pytest.mark.slow


LAST = {"/last": Put("")}
"""Written before an etcd of one member is killed: before 3.5.5 it answers when its log has the writes before, but not
yet this one (issue 14370 of etcd)."""


def test_watch_and_lease_survive_a_killed_etcd() -> None:
    """After SIGKILL and a restart on the same data, the watch shows new writes and the lease still holds."""
    with EtcdServer() as server:
        store = patient(server.endpoint)
        lease, watch = store.lease(PATIENCE_S), store.watch("/a/")
        store.swap({"/a/leased": Put("1", lease)}, {})
        store.swap(LAST, {})
        server.kill()
        server.start()
        written = store.swap({"/a/new": Put("2")}, {})
        assert written is not None
        seen = watch.wait(Snapshot(written - 1, {}), timeout_s=PATIENCE_S)
        assert seen is not None and sorted(seen.entries) == ["/a/leased", "/a/new"]
        lease.abandon()
        watch.close()
        store.close()


def test_a_loss_of_data_is_detected_by_an_older_revision() -> None:
    """Only the watch has seen the missing revisions: an etcd that restarted empty is not mistaken for a lagging one."""
    with EtcdServer() as server:
        store, other = (patient(server.endpoint) for _ in range(2))
        watch = store.watch("/a/")
        for number in range(10):
            written = other.swap({f"/a/{number}": Put("")}, {})
        assert watch.wait(Snapshot((written or 0) - 1, {}), timeout_s=PATIENCE_S) is not None
        server.kill()
        shutil.rmtree(server.data_dir / "member")
        server.start()
        younger = other.swap({"/a/new": Put("")}, {})
        assert younger is not None and written is not None and younger < written
        seen = watch.wait(Snapshot(younger - 1, {}, 1), timeout_s=PATIENCE_S)
        assert seen is not None and (sorted(seen.entries), store.get("/a/").life) == (["/a/new"], 1)
        watch.close()
        for each in (store, other):
            each.close()


def test_changes_that_have_arrived_are_applied_at_once() -> None:
    """A thousand members that leave a world together cost a member one view, not a thousand."""
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    for number in range(3):
        said.put(streams.WatchResponse(SimpleNamespace(), [f"event {number}"]))
    assert mirror._arrived(said) == (["event 0", "event 1", "event 2"], False)  # type: ignore[arg-type]
    said.put(streams.WatchResponse(SimpleNamespace(), ["the last event"]))
    said.put(None)
    assert mirror._arrived(said) == (["the last event"], True)  # type: ignore[arg-type]


def test_watch_survives_a_compaction_it_slept_through(etcd_store: EtcdStore) -> None:
    """A watch whose start revision was compacted lists again."""
    watch = etcd_store.watch("/compacted/")
    for number in range(3):
        written = etcd_store.swap({"/compacted/a": Put(str(number))}, {})
    assert written is not None
    client_of(etcd_store).compact(written)
    late = etcd_store.swap({"/compacted/a": Put("late")}, {})
    seen = watch.wait(Snapshot((late or 0) - 1, {}), timeout_s=PATIENCE_S)
    watch.close()
    assert seen is not None and seen.entries["/compacted/a"].value == "late"


@pytest.mark.parametrize("left_s", [0.0, None])
def test_a_lease_that_is_revoked_while_it_is_renewed_is_not_mourned(
    left_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """At a job's end etcd does not know the lease any more, or its connection is closed: no error."""

    class Revoked:
        def call(self, function: object, give_up_after_s: float) -> float:
            lease._stopped.set()
            if left_s is None:
                raise StoreUnavailableError("closed")
            return left_s

    lease = EtcdLease(Revoked(), 7, 0.03, renew=False)  # type: ignore[arg-type]
    lease._renew()
    assert caplog.text == "" and not lease.is_lost


class Renewals:
    """Counts the renewals of all leases."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._refresh, self._num = EtcdLease._refresh, 0
        monkeypatch.setattr(EtcdLease, "_refresh", lambda lease, client: self._count(lease, client))

    def _count(self, lease: EtcdLease, client: pyetcd.MultiEndpointEtcd3Client) -> float:
        left_s = self._refresh(lease, client)
        self._num += left_s > 0
        return left_s

    def await_next(self) -> None:
        before = self._num
        eventually(lambda: self._num > before, "the next renewal")


def test_leases_and_watches_survive_a_frozen_member_and_a_lost_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the etcd member in use hangs, and when the leader dies, leases are renewed and watches continue.

    A watch on a prefix without changes notices it as well, because it polls.
    """
    with EtcdCluster() as cluster:
        follower, endpoint = cluster.follower(), cluster.endpoint
        others = patient([member.endpoint for member in cluster.members if member is not follower])
        monkeypatch.setattr(
            "random.choice", lambda choices: follower.endpoint if follower.endpoint in choices else choices[0]
        )
        store, renewals = patient(endpoint), Renewals(monkeypatch)
        lease, watch = store.lease(15), store.watch("/a/")
        leased = store.swap({"/a/leased": Put("1", lease)}, {})
        assert leased is not None and watch.wait(Snapshot(leased - 1, {}), timeout_s=PATIENCE_S) is not None
        with frozen(follower):
            written = others.swap({"/a/frozen": Put("1")}, {})
            assert written is not None
            seen = watch.wait(Snapshot(written - 1, {}), timeout_s=PATIENCE_S)
            assert seen is not None and sorted(seen.entries) == ["/a/frozen", "/a/leased"]
            renewals.await_next()
        cluster.leader().kill()
        written = others.swap({"/a/lost": Put("1")}, {})
        assert written is not None
        seen = watch.wait(Snapshot(written - 1, {}), timeout_s=PATIENCE_S)
        assert seen is not None and sorted(seen.entries) == ["/a/frozen", "/a/leased", "/a/lost"]
        renewals.await_next()
        assert not lease.is_lost
        lease.abandon()
        for each in (watch, store, others):
            each.close()


def test_a_watch_outlives_a_long_silence_of_etcd(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The only etcd member hangs until the client gives up: the watch continues once it answers.

    Its old stream is abandoned by then, and the stream's end is not logged.
    """
    monkeypatch.setattr(mirror, "PROBE_S", 0.1)
    monkeypatch.setattr(mirror, "GIVE_UP_AFTER_S", 0.1)
    caplog.set_level(logging.DEBUG, mirror.__name__)
    with EtcdServer() as server:
        store = patient(server.endpoint)
        watch = store.watch("/a/")
        written = store.swap({"/a/before": Put("1")}, {})
        assert written is not None and watch.wait(Snapshot(written - 1, {}), timeout_s=PATIENCE_S) is not None
        with frozen(server):
            deadline = time.monotonic() + PATIENCE_S
            while not any("waits for etcd" in record.message for record in caplog.records):
                assert time.monotonic() < deadline, "the watch has not found out"
                time.sleep(0.01)
        written = store.swap({"/a/after": Put("1")}, {})
        assert written is not None
        seen = watch.wait(Snapshot(written - 1, {}), timeout_s=PATIENCE_S)
        assert seen is not None and sorted(seen.entries) == ["/a/after", "/a/before"]
        watch.close()
        store.close()


def test_keys_are_listed_again_only_if_any_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream tells nothing here, as one that has died silently: what was written is found by the revision."""
    lists, calls, list_in_life, call = list[int](), list[int](), mirror.list_in_life, Connection.call

    def counted(*args: Any, **options: Any) -> Snapshot:
        lists.append(len(calls))
        return list_in_life(*args, **options)

    def called(connection: Connection, *args: Any, **options: Any) -> Any:
        calls.append(len(lists))
        return call(connection, *args, **options)

    def await_probes() -> None:
        so_far = len(calls)
        eventually(lambda: len(calls) > so_far + 10, "ten more calls")

    monkeypatch.setattr(mirror, "PROBE_S", 0.02)
    monkeypatch.setattr(mirror, "RELIST_S", 0.0)
    monkeypatch.setattr(mirror, "list_in_life", counted)
    monkeypatch.setattr(Connection, "call", called)
    monkeypatch.setattr(mirror, "_applied", lambda snapshot, events: snapshot)
    with EtcdServer() as server:
        store = patient(server.endpoint)
        watch = store.watch("/a/")
        await_probes()
        assert len(lists) == 1
        written = store.swap({"/a/key": Put("1")}, {})
        assert written is not None and watch.wait(Snapshot(written - 1, {}), PATIENCE_S) is not None
        assert list(watch.snapshot.entries) == ["/a/key"]
        await_probes()
        assert len(lists) == 2
        watch.close()
        store.close()


def test_an_error_of_etcd_does_not_end_a_lease(etcd_store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals that etcd could not do (no leader, too many requests) are retried: the lease is still valid."""

    class UnableError(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            code: grpc.StatusCode = self.args[0]
            return code

    failures = [UnableError(code) for code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED)]
    refresh, renewed = EtcdLease._refresh, threading.Event()

    def fail_first(lease: EtcdLease, client: pyetcd.MultiEndpointEtcd3Client) -> float:
        if failures:
            raise failures.pop()
        left_s = refresh(lease, client)
        renewed.set()
        return left_s

    monkeypatch.setattr(EtcdLease, "_refresh", fail_first)
    lease = etcd_store.lease(15)
    assert renewed.wait(PATIENCE_S) and not lease.is_lost
    lease.abandon()


def test_every_endpoint_is_tried(etcd: EtcdServer) -> None:
    """A dead endpoint costs little if another is live, in either order."""
    for endpoints in (f"127.0.0.1:1,{etcd.endpoint}", f"{etcd.endpoint},127.0.0.1:1"):
        store = patient(endpoints)
        assert store.get("/nothing/").entries == {}
        store.close()


def test_a_client_is_closed_by_nobody_while_another_thread_uses_it(etcd: EtcdServer) -> None:
    """One thread may find that a new client is needed while another is about to send; gRPC would crash."""

    class NobodyLeadsError(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNKNOWN

    connection, clients, failures = Connection(etcd_options(etcd.endpoint)), [], [NobodyLeadsError()]

    def fail_first(client: pyetcd.MultiEndpointEtcd3Client) -> None:
        clients.append(client)
        if failures:
            raise failures.pop()

    def ask_again(client: pyetcd.MultiEndpointEtcd3Client) -> int:
        connection.call(fail_first, give_up_after_s=PATIENCE_S)
        return int(client.get_response("/nothing").header.revision)

    assert connection.call(ask_again, give_up_after_s=PATIENCE_S) > 0
    assert clients[0] is not clients[1], "the first is not asked again"
    assert connection.client() is clients[1], "who used the first to its end leaves the second alone"
    connection.close()


def test_an_abandoned_lease_leaves_no_client(etcd: EtcdServer) -> None:
    """A member abandons a lease that etcd could not end, and may train on for weeks."""
    store = patient(etcd.endpoint)
    lease = store.lease(15)
    lease._connection.call(lease._refresh, give_up_after_s=PATIENCE_S)
    assert lease._connection._current is not None
    lease.abandon()
    assert lease._connection._current is None
    with pytest.raises(StoreUnavailableError, match="is closed"):
        lease._connection.call(lease._refresh, give_up_after_s=PATIENCE_S)
    store.close()


def test_a_lease_that_etcd_could_not_end_is_revoked_again() -> None:
    """Until then it may hold keys, and counts as not lost."""

    class Connected:
        def __init__(self) -> None:
            self.answers: list[Exception | None] = [StoreUnavailableError("no answer"), None]
            self.is_closed = False

        def call(self, function: object, give_up_after_s: float) -> None:
            if (error := self.answers.pop(0)) is not None:
                raise error

        def close(self) -> None:
            self.is_closed = True

    connection = Connected()
    lease = EtcdLease(connection, 7, 15.0, renew=False)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailableError):
        lease.revoke()
    assert not lease.is_lost and not connection.is_closed
    lease.revoke()
    assert lease.is_lost and connection.is_closed


def test_a_closed_connection_opens_no_client(etcd: EtcdServer) -> None:
    """A thread may still write, and then list what its watch no longer brings, while another leaves the job."""
    store = patient(etcd.endpoint)
    assert store.get("/nothing/").revision > 0
    store.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        store.get("/nothing/")


def test_a_clock_that_is_set_back_hides_no_endpoint(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that has just failed is skipped for a moment, measured by a monotonic clock."""
    connection = Connection(etcd_options(etcd.endpoint))
    connection.client().endpoint_in_use.fail()
    clock = SimpleNamespace(time=lambda: time.time() - 3600.0)
    monkeypatch.setattr(importlib.import_module("pyetcd.client"), "time", clock)
    assert list_prefix(connection, "/nothing", give_up_after_s=PATIENCE_S).revision > 0
    connection.close()


def test_a_process_knows_how_quickly_etcd_answers_it(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time covers all of its connections; calls without an answer count separately."""
    tally = Tally()
    monkeypatch.setattr("rendezvous.etcd.connection.TALLY", tally)
    for _ in range(2):
        store = patient(etcd.endpoint)
        store.get("/nothing/")
        store.close()
    assert tally.num_answers >= 2 and tally.answer_s > 0
    before = tally.num_failures
    with pytest.raises(StoreUnavailableError):
        EtcdStore(etcd_options("127.0.0.1:1"), give_up_after_s=0.5).get("/")
    assert tally.num_failures > before


def test_an_etcd_that_is_too_old_is_refused_at_once(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own etcd as well, and before a call that it does not support."""
    assert [too_old(text) for text in ("3.3.25", "2.3", "v3.3.0+git", "3.4.0", "3.10.1", "4.0", "unknown")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    options = etcd_options(etcd.endpoint)
    await_etcd(options, "/nothing", 5.0)
    monkeypatch.setattr("rendezvous.etcd.options.LEAST_VERSION", (99, 0))
    with pytest.raises(OptionError, match=r"is version 3\.\d+\.\d+, and .* or newer is needed"):
        await_etcd(options, "/nothing", 60.0)


def test_a_thread_that_cannot_be_started_does_not_end_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its member saw no change any more, and kept its lease: the others waited for it."""
    begun: list[int] = []

    def stream(self: mirror.Mirror) -> None:
        begun.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(mirror.Mirror, "_stream", stream)
    watch = mirror.Mirror(etcd_options("127.0.0.1:1"), "/a", "", first=Snapshot(1, {}), data_loss=DataLossDetector())
    eventually(lambda: len(begun) > 1, "another try", 30.0)
    watch.close()


def test_a_missing_etcd_is_reported() -> None:
    """Without an etcd a call ends with an error that names the endpoint and says what to do."""
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1 .*refused.*Start etcd there"):
        EtcdStore(etcd_options("127.0.0.1:1"), give_up_after_s=1.0).get("/")


def test_a_transaction_whose_answer_was_lost_counts(etcd_store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the answer to a successful creation is lost, the retry finds its own write and reports success."""
    client = etcd_store._connection.client()
    transact, losses = client.transaction, ["the first answer"]

    class LostError(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

    def lose_first(**arguments: object) -> object:
        answer = transact(**arguments)
        if losses:
            losses.pop()
            raise LostError
        return answer

    monkeypatch.setattr(client, "transaction", lose_first)
    assert etcd_store.swap({"/lost/a": Put("mine")}, {"/lost/a": 0}) is not None
    assert etcd_store.swap({"/lost/a": Put("other")}, {"/lost/a": 0}) is None


@pytest.mark.parametrize("said", ["etcdserver: too many requests", "etcdserver: mvcc: database space exceeded"])
def test_an_etcd_that_cannot_write_for_a_moment_is_asked_again(
    etcd_store: EtcdStore, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Too many requests and a full database share a code; both may pass before the call's timeout."""
    client = etcd_store._connection.client()
    transact, failures = client.transaction, [said, said]

    class ExhaustedError(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.RESOURCE_EXHAUSTED

        def details(self) -> str:
            return str(self)

    def fail_first(**arguments: object) -> object:
        if failures:
            raise ExhaustedError(failures.pop())
        return transact(**arguments)

    monkeypatch.setattr(client, "transaction", fail_first)
    assert etcd_store.swap({"/busy/a": Put("1")}, {}) is not None and not failures


def test_users_and_expired_tokens() -> None:
    """A wrong password is refused; a token that etcd lost in a restart is renewed silently."""
    with EtcdServer() as server:
        admin = patient(server.endpoint)
        client = admin._connection.client()
        rpc = pyetcd.etcdrpc
        client.authstub.UserAdd(rpc.AuthUserAddRequest(name="root", password="right"), PATIENCE_S)
        client.authstub.RoleAdd(rpc.AuthRoleAddRequest(name="root"), PATIENCE_S)
        client.authstub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), PATIENCE_S)
        client.authstub.AuthEnable(rpc.AuthEnableRequest(), PATIENCE_S)
        store = patient(server.endpoint, {"user": "root", "password": "right"})
        store.swap({"/a": Put("1")}, {})
        store.swap(LAST, {})
        server.kill()
        server.start()
        assert store.get("/a").entries["/a"].value == "1"
        with pytest.raises(StoreDeniedError, match="refused the user 'root'"):
            patient(server.endpoint, {"user": "root", "password": "wrong"}).get("/a")
        with pytest.raises(StoreDeniedError, match="refused a client without a user"):
            admin.get("/a")


def test_mutual_tls(tmp_path: Path) -> None:
    """With the right certificates everything works, including watches; without a client certificate nothing does."""
    files = Authority(tmp_path).issue("etcd")
    with EtcdServer(tls=files) as server:
        store = patient(server.endpoint, files)
        watch = store.watch("/a")
        written = store.swap({"/a": Put("1")}, {})
        assert written is not None and watch.wait(Snapshot(written - 1, {}), timeout_s=PATIENCE_S) is not None
        watch.close()
        for incomplete in ({}, {"ca_cert": files["ca_cert"]}):
            with pytest.raises(StoreUnavailableError):
                EtcdStore(etcd_options(server.endpoint, incomplete), give_up_after_s=0.5).get("/a")


def test_options_report_everything_that_is_wrong(tmp_path: Path) -> None:
    """All invalid TLS and user options are reported at once."""
    conf = {"cert": str(tmp_path / "missing.pem"), "user": "me"}
    with pytest.raises(OptionError) as caught:
        etcd_options("host:2379", conf)
    assert len(caught.value.problems) == 4
    with pytest.raises(OptionError, match="not HOST:PORT"):
        etcd_options("host:port")
    for bare in ("::1", "fd00::5:2379"):
        with pytest.raises(OptionError, match=rf"{bare}' is not HOST:PORT; write an IPv6 address in brackets"):
            etcd_options(bare)
    with pytest.raises(OptionError, match=r"'https://b:2379': https needs ca_cert"):
        etcd_options("a:2379, https://b:2379")
    authority = tmp_path / "ca.pem"
    authority.touch()
    assert etcd_options("https://b", {"ca_cert": str(authority)}).endpoints == ("b:2379",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ("a:2379",)), ("http://a:1,b:2/", ("a:1", "b:2")), ("[::1]:5", ("[::1]:5",)), ("[::1]", ("[::1]:2379",))],
)
def test_endpoints_are_read(text: str, expected: tuple[str, ...]) -> None:
    """Endpoints with or without scheme, port and brackets are accepted."""
    assert etcd_options(text).endpoints == expected
