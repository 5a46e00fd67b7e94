"""A real etcd that answers with errors: it is full, corrupt, or does not know the user any more."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pyetcd
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from chaos.services.authority import Authority
from chaos.services.etcd_cluster import CORRUPT, NOSPACE, clear_alarms, raise_alarm
from rendezvous import EtcdServer, EtcdStore, etcd_options
from rendezvous.errors import StoppedWaiting, StoreBlockedError, StoreDeniedError, StoreUnavailableError
from rendezvous.etcd import connection
from rendezvous.etcd.store import EtcdLease, check_permission
from rendezvous.membership.own_record import Place
from rendezvous.membership.participant import Participant
from rendezvous.membership.records import Keys
from rendezvous.membership.rules.admission import Policy
from rendezvous.membership.store import Put, Snapshot, Watch
from rendezvous.membership.worlds import World
from tests.conftest import PATIENCE_S, eventually
from tests.rendezvous.rendezvous_sides import client_of, patient

pytestmark = pytest.mark.process

QUOTA = {"quota-backend-bytes": "3000000"}


def fill(server: EtcdServer) -> None:
    """Write foreign keys until etcd is full."""
    store = patient(server.endpoint)
    client = client_of(store)
    with pytest.raises(grpc.RpcError, match="database space exceeded"):
        for number in range(1000):
            client.put(f"/foreign/{number}", "x" * 60_000)
    store.close()


def make_room(server: EtcdServer) -> None:
    """Follow the message: delete, compact, defragment, disarm.

    Without `physical`, the compaction may still run when the file is defragmented, and the next write finds no room.
    """
    store = patient(server.endpoint)
    client = client_of(store)
    client.delete_prefix("/foreign/")
    client.compact(store.get("/foreign/").revision, physical=True)
    client.defragment()
    store.close()
    clear_alarms(server.endpoint)


def member(server: EtcdServer, run_id: str, conf: dict[str, str] | None = None, *, nodes: int = 2) -> Participant:
    """Return one of the nodes that the first world waits for; no lease expires on a busy machine."""
    store = EtcdStore(etcd_options(server.endpoint, conf), give_up_after_s=0.5)
    return Participant(store, run_id, Policy(1, nodes, PATIENCE_S), Place("host", "127.0.0.1", 1), ttl_s=PATIENCE_S)


def enter(node: Participant, timeout_s: float = PATIENCE_S) -> World | None:
    node.join(timeout_s)
    return node.next_world(lambda seal: ("127.0.0.1", 1), timeout_s)


def test_a_full_etcd_is_waited_for(run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    """Losing a member meanwhile ends nobody: the others meet again once the alarm is cleared.

    The dead member is removed and leases are renewed although nothing can be written; the log has one line for it.
    """
    caplog.set_level(logging.WARNING)
    with EtcdServer(flags=QUOTA) as server, ThreadPoolExecutor(4) as pool:
        nodes = [member(server, run_id, nodes=3) for _ in range(3)]
        assert len({world.term for world in pool.map(enter, nodes) if world}) == 1
        fill(server)
        undertaker = patient(server.endpoint)
        undertaker.swap({nodes[2].keys.member(nodes[2].id): None}, {})
        eventually(lambda: all(node.is_broken() for node in nodes[:2]), "the loss")
        again = [pool.submit(enter, node) for node in nodes[:2]]
        eventually(lambda: "etcdctl alarm disarm" in caplog.text, "the alarm in the log")
        threading.Event().wait(2.0)
        assert not any(entering.done() for entering in again)
        for node in nodes[:2]:
            assert isinstance(lease := node._own.lease, EtcdLease) and renewed_s(lease) > PATIENCE_S - 1
        make_room(server)
        worlds = [entering.result(PATIENCE_S) for entering in again]
        assert worlds[0] == worlds[1] and worlds[0] is not None and len(worlds[0].seats) == 2
        assert caplog.text.count("NOSPACE") <= len(nodes)
        undertaker.close()
        for node in nodes:
            node.leave()


def renewed_s(lease: EtcdLease) -> float:
    """Renew a lease, and return its remaining time."""
    return lease._connection.call(lease._refresh, give_up_after_s=PATIENCE_S)


@pytest.mark.parametrize("alarm", [NOSPACE, CORRUPT])
def test_an_alarm_is_named_with_what_clears_it(alarm: int, run_id: str) -> None:
    """Every kind of write fails after its timeout with a transient error; reads continue."""
    with EtcdServer() as server:
        store, patiently = EtcdStore(etcd_options(server.endpoint), give_up_after_s=0.3), patient(server.endpoint)
        lease = patiently.lease(PATIENCE_S)
        raise_alarm(server.endpoint, alarm)
        name = "NOSPACE" if alarm == NOSPACE else "CORRUPT"
        for write in (lambda: store.swap({"/a": Put("1")}, {}), lambda: store.lease(5)):
            with pytest.raises(StoreBlockedError, match=rf"{server.endpoint}.*{name}.*`etcdctl alarm disarm`"):
                write()
        assert patiently.get("/").entries == {}
        check_permission(store, Keys(run_id))  # ignores alarms: a node may start and wait
        clear_alarms(server.endpoint)
        assert patiently.swap({"/a": Put("1", lease)}, {}) is not None and not lease.is_lost
        lease.abandon()
        for each in (store, patiently):
            each.close()


def test_one_asked_to_leave_during_an_alarm_leaves(run_id: str) -> None:
    """It has its state to save, and the alarm may last for hours."""
    with EtcdServer() as server:
        node = member(server, run_id)
        raise_alarm(server.endpoint, NOSPACE)
        with pytest.raises(StoppedWaiting):
            node.join(PATIENCE_S, lambda: True)
        with pytest.raises(StoreBlockedError):
            node.join(0.0)
        node.leave()


class Users:
    """The users of an etcd, as its operator changes them."""

    def __init__(self, server: EtcdServer) -> None:
        self._server, rpc = server, pyetcd.etcdrpc
        store = patient(server.endpoint)
        auth = client_of(store).authstub
        for name, key in (("root", None), ("job", b"/elastic/"), ("reader", b"/elastic/")):
            auth.UserAdd(rpc.AuthUserAddRequest(name=name, password="right"), PATIENCE_S)
            auth.RoleAdd(rpc.AuthRoleAddRequest(name=name), PATIENCE_S)
            if key is not None:
                asked = rpc.AuthRoleGrantPermissionRequest(name=name)
                asked.perm.permType = 0 if name == "reader" else 2
                asked.perm.key, asked.perm.range_end = key, b"/elastic0"
                auth.RoleGrantPermission(asked, PATIENCE_S)
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name), PATIENCE_S)
        auth.AuthEnable(rpc.AuthEnableRequest(), PATIENCE_S)
        store.close()

    def change(self, method: str, request: object) -> None:
        """Call etcd's auth service as root."""
        root = patient(self._server.endpoint, {"user": "root", "password": "right"})
        # a token may expire before it is used; then nothing was done
        root._connection.call(
            lambda client: getattr(client.authstub, method)(request, PATIENCE_S, metadata=client.metadata),
            give_up_after_s=PATIENCE_S,
        )
        root.close()

    def set_password(self, user: str, password: str) -> None:
        self.change("UserChangePassword", pyetcd.etcdrpc.AuthUserChangePasswordRequest(name=user, password=password))


JOB = {"user": "job", "password": "right"}


def test_credentials_that_are_wrong_from_the_start_are_refused_at_once(run_id: str) -> None:
    """A wrong password, a read-only user, and no user: each is an error that says what to correct."""
    keys = Keys(run_id)
    with EtcdServer() as server:
        Users(server)
        for conf in ({**JOB, "password": "wrong"}, {"user": "reader", "password": "right"}, {}):
            store = patient(server.endpoint, conf)
            with pytest.raises(StoreDeniedError, match=r"Correct `user` and `password`.*below /elastic/"):
                check_permission(store, keys)
            store.close()
        store = patient(server.endpoint, JOB)
        check_permission(store, keys)
        assert store.get(keys.prefix).entries == {}, "the check writes nothing"
        store.close()


def test_users_that_are_changed_while_a_job_runs_are_waited_for(run_id: str) -> None:
    """A password that is changed and restored, and authentication that is switched off, end no member."""
    with EtcdServer() as server, ThreadPoolExecutor(2) as pool:
        users = Users(server)
        nodes = [member(server, run_id, JOB) for _ in range(2)]
        list(pool.map(enter, nodes))
        users.set_password("job", "other")
        again = [pool.submit(enter, node) for node in nodes]
        threading.Event().wait(2.0)
        assert not any(entering.done() for entering in again)
        users.set_password("job", "right")
        worlds = [entering.result(PATIENCE_S) for entering in again]
        assert worlds[0] == worlds[1] and worlds[0] is not None and len(worlds[0].seats) == 2
        users.change("AuthDisable", pyetcd.etcdrpc.AuthDisableRequest())
        late = patient(server.endpoint, JOB)
        assert late.get(nodes[0].keys.prefix).entries, "one that comes with a user where there are none any more"
        late.close()
        list(pool.map(enter, nodes))
        for node in nodes:
            node.leave()


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd with signed tokens (JWT) that last for two seconds and contain the revision of the users."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    token = f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=2s"
    with EtcdServer(flags={"auth-token": token}) as server:
        yield server


def test_tokens_that_expire_or_are_too_old_are_renewed(signed: EtcdServer) -> None:
    """Signed tokens expire, and become invalid with every change of the users."""
    users = Users(signed)
    store = patient(signed.endpoint, JOB)
    watch = store.watch("/elastic/")
    lease = store.lease(PATIENCE_S)
    for number in range(2):
        users.change("UserAdd", pyetcd.etcdrpc.AuthUserAddRequest(name=f"u{number}", password="pw"))
        assert store.swap({"/elastic/a": Put(str(number))}, {}) is not None  # the token is older than the users
        threading.Event().wait(2.5)
        written = store.swap({"/elastic/a": Put(str(number), lease)}, {})  # the token has expired
        assert written is not None and watch.wait(Snapshot(written - 1, {}), PATIENCE_S) is not None
    assert not lease.is_lost
    lease.abandon()
    watch.close()
    store.close()


def test_the_records_of_ten_thousand_workers_fit_into_an_answer(run_id: str) -> None:
    """They exceed gRPC's default of 4 MiB, but are read in one answer and seen by a watch."""
    text, keys = "x" * 497, Keys(run_id)
    with EtcdServer() as server:
        store = patient(server.endpoint)
        watch = store.watch(keys.prefix)
        for first in range(0, 10_000, 100):
            written = store.swap({keys.member(f"{number:032d}"): Put(text) for number in range(first, first + 100)}, {})
        assert written is not None and len(store.get(keys.prefix).entries) == 10_000
        seen = watch.wait(Snapshot(written - 1, {}), PATIENCE_S)
        assert seen is not None and len(seen.entries) == 10_000
        late = store.watch(keys.prefix)
        assert len(late.snapshot.entries) == 10_000
        for each in (watch, late, store):
            each.close()


def connected_for_a_moment(authority: Authority, server: EtcdServer) -> tuple[EtcdStore, EtcdLease, Watch]:
    """Return a store, a lease and a watch on a client certificate that expires soon, after a first write of /a."""
    for seconds in (4.0, 16.0, 64.0):
        options = etcd_options(server.endpoint, authority.issue("client", seconds=seconds))
        store = EtcdStore(options, give_up_after_s=seconds)
        with contextlib.ExitStack() as made, contextlib.suppress(StoreUnavailableError):
            made.callback(store.close)
            lease = store.lease(PATIENCE_S)
            made.callback(lease.abandon)
            watch = store.watch("/a")
            made.callback(watch.close)
            written = store.swap({"/a": Put("1", lease)}, {})
            assert written is not None
            if watch.wait(Snapshot(written - 1, {}), seconds) is not None:
                made.pop_all()
                return store, lease, watch
    raise AssertionError("no certificate lasts until all connections are made")


def test_a_client_certificate_is_read_again_when_it_was_renewed(tmp_path: Path) -> None:
    """Once the old one has expired, a broken connection is reopened with the certificate on disk."""
    authority = Authority(tmp_path)
    with EtcdServer(tls=authority.issue("server")) as server:
        store, lease, watch = connected_for_a_moment(authority, server)
        hasty = EtcdStore(store._connection.options, give_up_after_s=0.5)
        server.kill()
        authority.wait_for_the_end("client")
        server.start()
        with pytest.raises(StoreUnavailableError):
            hasty.get("/a")
        authority.issue("client", seconds=3600.0)
        written = None

        def works() -> bool:
            nonlocal written
            with contextlib.suppress(StoreUnavailableError):
                written = store.swap({"/a": Put("2", lease)}, {})
            return written is not None

        eventually(works, "the renewed certificate")
        assert written is not None and watch.wait(Snapshot(written - 1, {}), PATIENCE_S) is not None
        assert renewed_s(lease) > PATIENCE_S - 1
        lease.abandon()
        watch.close()
        for each in (store, hasty):
            each.close()


def test_a_login_that_was_denied_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking a password is expensive, and every worker of a job may retry for as long as it waits."""
    monkeypatch.setattr(connection, "DENIED_S", (PATIENCE_S, PATIENCE_S))
    tries = []
    with EtcdServer() as server:
        Users(server)
        store = patient(server.endpoint, {**JOB, "password": "wrong"})
        make = store._connection._make
        monkeypatch.setattr(store._connection, "_make", lambda: tries.append(1) or make())
        for _ in range(20):
            with pytest.raises(StoreDeniedError):
                store.get("/elastic/")
        assert len(tries) == 1
        store.close()
