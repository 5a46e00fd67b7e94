"""A local etcd of one or three members, which can be killed or frozen without notice to clients."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pyetcd

from chaos.errors import RunError
from chaos.services.authority import Authority
from rendezvous import EtcdServer
from rendezvous.etcd.connection import Connection
from rendezvous.etcd.options import EtcdOptions, etcd_options
from rendezvous.etcd.server import hold_ports
from rendezvous.process_table import is_alive

RPC_TIMEOUT_S = 1.0
_SHARED, _ROOM_BYTES, _PREFIX = Path("/dev/shm"), 2 << 30, "elastic-etcd-"


class EtcdCluster:
    """A local etcd: `with EtcdCluster() as cluster: … cluster.endpoint`, which lists all members.

    With an authority, it speaks TLS and accepts clients that the authority has signed; `tls` has a client's files by
    etcd option.
    """

    def __init__(self, num_members: int = 3, host: str = "127.0.0.1", authority: Authority | None = None) -> None:
        names = ("one", "two", "three")[:num_members]
        self._ports = contextlib.ExitStack()
        ports = dict(zip(names, hold_ports(self._ports, len(names)), strict=True))
        self._folder = tempfile.TemporaryDirectory(
            prefix=f"{_PREFIX}{os.getpid()}-", dir=_memory(), ignore_cleanup_errors=True
        )
        self.authority, self.tls = authority, authority.issue("client") if authority else {}
        own = authority.issue("etcd") if authority else None
        self.members = [
            EtcdServer(name=name, peer_ports=ports, host=host, data_dir=Path(self._folder.name) / name, tls=own)
            for name in names
        ]

    @property
    def endpoint(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    @property
    def options(self) -> EtcdOptions:
        return etcd_options(self.endpoint, self.tls)

    def start(self) -> None:
        """Start all members, or restart them on the same data; return once they answer."""
        for member in self.members:
            member.begin()
        for member in self.members:
            member.await_answer()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def delete_data(self) -> None:
        """Delete all members' data; no member may be running."""
        for member in self.members:
            assert member.pid is None, "it runs"
            shutil.rmtree(member.data_dir / "member", ignore_errors=True)

    def leader(self) -> EtcdServer:
        """Return the current leader; wait for a running election."""
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            for member in self.members:
                if member.pid is not None and _leads(member):
                    return member
            time.sleep(0.05)
        raise RunError("no member of etcd leads")

    def follower(self) -> EtcdServer:
        """Return a member that is not the leader; the only member if there is just one."""
        leader = self.leader()
        return next((member for member in self.members if member is not leader), leader)

    def __enter__(self) -> EtcdCluster:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()
        self._ports.close()
        self._folder.cleanup()


def _memory() -> Path | None:
    """Return a folder in memory if it has room for etcd's files, else None for the default location.

    etcd needs its own disk: next to other writers it stalls for seconds, a fault that the scenario did not inject.
    Files in memory still survive the death of etcd.
    """
    if not _SHARED.is_dir():
        return None
    for left in _SHARED.glob(f"{_PREFIX}*-*"):  # left by a killed process
        if not is_alive(int(left.name.removeprefix(_PREFIX).partition("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
    return _SHARED if shutil.disk_usage(_SHARED).free > _ROOM_BYTES else None


@contextlib.contextmanager
def frozen(member: EtcdServer) -> Iterator[None]:
    """Freeze a member: it accepts connections and never answers, as if its packets were lost."""
    assert member.pid is not None, "it runs"
    os.kill(member.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(member.pid, signal.SIGCONT)


def _leads(member: EtcdServer) -> bool:
    with grpc.insecure_channel(member.endpoint) as channel:
        try:
            status = pyetcd.etcdrpc.MaintenanceStub(channel).Status(pyetcd.etcdrpc.StatusRequest(), RPC_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(status.leader == status.header.member_id)


NOSPACE, CORRUPT = 1, 2
"""Etcd's alarms: the database is full; the members hold different data."""
_ACTIVATE, _DEACTIVATE = 1, 2
_WITHIN_S = 10.0


def raise_alarm(endpoint: str, alarm: int) -> None:
    """Raise an alarm as an etcd member does: all members refuse writes until it is cleared."""
    request = pyetcd.etcdrpc.AlarmRequest(action=_ACTIVATE, memberID=1, alarm=alarm)
    with _connection(endpoint) as connection:
        connection.call(lambda client: client.maintenancestub.Alarm(request, timeout=2.0), give_up_after_s=_WITHIN_S)


def has_alarm(endpoint: str, alarm: int) -> bool:
    with _connection(endpoint) as connection:
        raised = connection.call(lambda client: list(client.list_alarms()), give_up_after_s=_WITHIN_S)
        return any(each.alarm_type == alarm for each in raised)


def clear_alarms(endpoint: str) -> None:
    with _connection(endpoint) as connection:
        raised = connection.call(lambda client: list(client.list_alarms()), give_up_after_s=_WITHIN_S)
        for each in raised:
            request = pyetcd.etcdrpc.AlarmRequest(action=_DEACTIVATE, memberID=each.member_id, alarm=each.alarm_type)
            connection.call(
                lambda client, request=request: client.maintenancestub.Alarm(request, timeout=2.0),  # type: ignore[misc]
                give_up_after_s=_WITHIN_S,
            )


@contextlib.contextmanager
def _connection(endpoint: str) -> Iterator[Connection]:
    connection = Connection(etcd_options(endpoint))
    try:
        yield connection
    finally:
        connection.close()
