"""Faults of etcd: members killed or frozen, outages with or without data loss, a lease that ends early."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc  # type: ignore[import-untyped]
import pyetcd

from chaos.real.acts.job_view import JobView, Struck, targets
from chaos.scenario.kinds import ALIEN_RECORDS
from chaos.services.etcd_cluster import CORRUPT, NOSPACE, clear_alarms, has_alarm, raise_alarm
from chaos.services.torchrun_node import signal_all
from rendezvous.errors import StoreError
from rendezvous.etcd.options import etcd_options
from rendezvous.etcd.server import EtcdServer
from rendezvous.etcd.store import EtcdStore
from rendezvous.membership.lenient_json import read_record
from rendezvous.membership.records import Keys
from rendezvous.membership.store import Put
from rendezvous.membership.worlds import World
from rendezvous.process_table import is_alive, is_stopped

if TYPE_CHECKING:
    from chaos.scenario.schedule import Due
    from chaos.services.etcd_cluster import EtcdCluster

_CALL_S, _ANSWER_S = 2.0, 0.3
_MARK = b"/elastic-chaos/was-here"


def kill_etcd_member(job: JobView, fault: Due) -> Struck | None:
    return _kill(_members(job, leads=False)[:1])


def kill_etcd_leader(job: JobView, fault: Due) -> Struck | None:
    return _kill(_members(job, leads=True)[:1])


def etcd_outage(job: JobView, fault: Due) -> Struck | None:
    """Kill all members once all of them run: one killed before is restarted when that fault is undone."""
    assert job.around.etcd is not None, "every job has one"
    members = job.around.etcd.members
    return _kill(members) if all(_runs(member) and _answers(member) for member in members) else None


def lose_etcd_data(job: JobView, fault: Due) -> Struck | None:
    """Kill all members and delete their data, as where etcd's pods have no volumes.

    The loss is proven by a key written before, which an outage alone would keep.
    """
    assert job.around.etcd is not None, "every job has one"
    members = job.around.etcd.members
    if not _mark(members) or (done := etcd_outage(job, fault)) is None:
        return None
    job.around.etcd.delete_data()
    return replace(done, effect=lambda: _has_forgotten(members))


def etcd_refuses(job: JobView, fault: Due) -> Struck | None:
    """Raise an alarm: no member of etcd writes until it is cleared."""
    assert job.around.etcd is not None, "every job has one"
    members = job.around.etcd.members
    if not all(_runs(member) and _answers(member) for member in members):
        return None
    endpoint, alarm = job.around.etcd.endpoint, job.draws.choice((NOSPACE, CORRUPT))
    try:
        raise_alarm(endpoint, alarm)
    except StoreError:
        return None

    def clear() -> list[int] | None:
        try:
            clear_alarms(endpoint)
        except StoreError:
            return None  # members are down: try again once they answer
        return []

    def look() -> str | None:
        with contextlib.suppress(StoreError):
            return f"etcd lists the alarm {name}" if has_alarm(endpoint, alarm) else None
        return None

    name = "NOSPACE" if alarm == NOSPACE else "CORRUPT"
    pids = [member.pid for member in members if member.pid is not None]
    return Struck(pids, [], None, clear, {"alarm": name}, look)


def rotate_cert(job: JobView, fault: Due) -> Struck | None:
    """Reissue all certificates under another authority, and restart etcd with them; the old ones become invalid.

    Clients find new files in place of the old ones, without notice.
    """
    etcd = job.around.etcd
    assert etcd is not None and etcd.authority is not None, "the scenario has it, since the kind needs it"
    before = etcd.authority.certificate
    etcd.authority.replace()
    pids = [member.pid for member in etcd.members if member.pid is not None]
    etcd.kill()
    etcd.start()
    return Struck(pids, effect=lambda: _has_changed_sides(etcd, before))


def _has_changed_sides(etcd: EtcdCluster, before: bytes) -> str | None:
    """Return a proof that etcd's certificate is the new authority's, not the old one's."""
    address, _, port = etcd.members[0].endpoint.rpartition(":")
    assert etcd.authority is not None, "it has been replaced"
    try:
        for authority in (etcd.authority.certificate, before):
            context = ssl.create_default_context(cadata=authority.decode())
            context.load_cert_chain(etcd.tls["cert"], etcd.tls["key"])
            with socket.create_connection((address, int(port)), _CALL_S) as plain:
                context.wrap_socket(plain, server_hostname=address).close()
    except ssl.SSLCertVerificationError as error:
        is_known = authority != before  # unknown to the new authority too: no proof
        return None if is_known else f"who trusts the authority from before alone is refused: {error.verify_message}"
    except OSError:
        return None
    return None


def alien_record(job: JobView, fault: Due) -> Struck | None:
    """Write an invalid record below the job's prefix, as anybody with etcdctl could."""
    assert job.around.etcd is not None, "every job has one"
    key, text = job.draws.choice(ALIEN_RECORDS)
    store = EtcdStore(etcd_options(job.around.etcd.endpoint), give_up_after_s=_CALL_S)
    try:
        revision = store.swap({Keys(job.around.run_id).prefix + key: Put(text)}, {})
    except StoreError:
        return None
    finally:
        store.close()
    pids = [member.pid for member in job.around.etcd.members if member.pid is not None]
    return Struck(pids, recorded={"key": key}, effect=lambda: f"etcd has written {key} at revision {revision}")


def _mark(members: list[EtcdServer]) -> bool:
    """Write a key that nobody else uses; return False while etcd accepts none."""
    with grpc.insecure_channel(members[0].endpoint) as channel:
        try:
            pyetcd.etcdrpc.KVStub(channel).Put(pyetcd.etcdrpc.PutRequest(key=_MARK, value=b"1"), _CALL_S)
        except grpc.RpcError:
            return False
        return True


def _has_forgotten(members: list[EtcdServer]) -> str | None:
    """Return a proof that etcd answers and lacks the mark."""
    with grpc.insecure_channel(members[0].endpoint) as channel:
        try:
            found = pyetcd.etcdrpc.KVStub(channel).Range(pyetcd.etcdrpc.RangeRequest(key=_MARK), _ANSWER_S)
        except grpc.RpcError:
            return None
        return None if found.kvs else "etcd does not have a key any more that it had before"


def _kill(members: list[EtcdServer]) -> Struck | None:
    pids = [member.pid for member in members if member.pid is not None]
    for member in members:
        member.kill()

    def begin() -> list[int] | None:
        """Restart the members; done once they answer, which takes seconds on a busy machine."""
        for member in members:
            if member.pid is None:
                member.begin()
        return [] if all(_answers(member) for member in members) else None

    return Struck(pids, [], "SIGKILL", begin) if pids else None


def _answers(member: EtcdServer) -> bool:
    """Return True if a member serves reads, hence knows its leader."""
    with grpc.insecure_channel(member.endpoint) as channel:
        try:
            pyetcd.etcdrpc.KVStub(channel).Range(pyetcd.etcdrpc.RangeRequest(key=b"/"), _ANSWER_S)
        except grpc.RpcError:
            return False
        return True


def freeze_etcd_member(job: JobView, fault: Due) -> Struck | None:
    pids = [member.pid for member in _members(job, leads=False)[:1] if member.pid is not None]
    signal_all(pids, signal.SIGSTOP)

    def thaw() -> list[int]:
        signal_all(pids, signal.SIGCONT)
        return []

    return Struck(pids, [], "SIGSTOP", thaw) if pids else None


def _members(job: JobView, *, leads: bool) -> list[EtcdServer]:
    """Return the running members that lead, or do not; none while one is down, since a majority must stay up."""
    assert job.around.etcd is not None, "every job has one"
    cluster = job.around.etcd
    up = [member for member in cluster.members if _runs(member)]
    if len(up) < len(cluster.members):
        return []  # losing one more would be an outage
    leader = cluster.leader()
    return [leader] if leads or len(up) == 1 else [member for member in up if member is not leader]


def _runs(member: EtcdServer) -> bool:
    return member.pid is not None and is_alive(member.pid) and not is_stopped(member.pid)


def lose_lease(job: JobView, fault: Due) -> Struck | None:
    """Revoke the lease of a worker of the current world: the target's highest rank."""
    assert job.around.etcd is not None, "every job has one"
    nodes = targets(job, fault)
    own = {pid for node in nodes for pid in node.pids()}
    ranks = [rank for rank, pid in sorted(job.followed.pids.items()) if pid in own]
    keys = Keys(job.around.run_id)
    if not ranks:
        return None
    with grpc.insecure_channel(job.around.etcd.members[0].endpoint) as channel:
        try:
            stub = pyetcd.etcdrpc.KVStub(channel)
            found = stub.Range(pyetcd.etcdrpc.RangeRequest(key=keys.world.encode()), _CALL_S).kvs
            world = read_record(World, found[0].value.decode()) if found else None
            if world is None or len(world.seats) <= ranks[-1] or world.sealed_at != job.followed.sealed_at:
                return None
            member = keys.member(world.seats[ranks[-1]].member)
            held = stub.Range(pyetcd.etcdrpc.RangeRequest(key=member.encode()), _CALL_S).kvs
            if not held:
                return None
            revoke = pyetcd.etcdrpc.LeaseRevokeRequest(ID=held[0].lease)
            pyetcd.etcdrpc.LeaseStub(channel).LeaseRevoke(revoke, _CALL_S)
        except (grpc.RpcError, ValueError):
            return None  # etcd is down, the lease has ended by itself, or another fault wrote an alien world
    return Struck([job.followed.pids[ranks[-1]]], nodes, effect=lambda: "etcd has confirmed the lease's end")
