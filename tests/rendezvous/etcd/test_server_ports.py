"""Ports for servers on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rendezvous import EtcdServer
from rendezvous.errors import ServerError
from rendezvous.etcd import server
from rendezvous.etcd.server import free_ports, is_answered_by
from tests.conftest import PATIENCE_S


def test_ports_are_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server starts to listen some time after its port was chosen; no port is chosen if in use, or twice."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(port < first for port in ports)
    (tmp_path / "range").write_text("11100 60999\n")
    monkeypatch.setattr(server, "_PORT_RANGE", tmp_path / "range")
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in free_ports(20)
    monkeypatch.setattr(server, "_PORT_RANGE", tmp_path / "none")
    assert all(port > 0 for port in free_ports(3)), "the system chooses where it does not say"


@pytest.mark.slow
def test_a_servers_ports_are_nobody_elses_also_while_it_is_down() -> None:
    """Another etcd that chose a port of one that had not begun, or was killed, kept it from starting."""
    with EtcdServer() as server:
        ports = [int(server.endpoint.partition(":")[2]), *server._peer_ports.values()]
        server.kill()
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        server.start()
    for port in ports:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections linger
            other.bind(("127.0.0.1", port))


@pytest.mark.slow
def test_an_etcd_on_a_port_that_another_holds_is_refused() -> None:
    """Otherwise it would be mistaken for the new one, and end when its owner ends."""
    with EtcdServer() as first:
        port = int(first.endpoint.partition(":")[2])
        with pytest.raises(ServerError, match=rf"port {port} of this machine is taken.*--endpoint"):
            EtcdServer(port=port).start()
        command = [sys.executable, "-m", "rendezvous", "--port", f"{port}"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 1 and ended.stderr.startswith(f"error: port {port} of this machine is taken")
        late = EtcdServer(port=port)
        late._refuse_taken_port = lambda: None  # type: ignore[method-assign]  # the other was quicker
        with pytest.raises(ServerError, match=rf"port {port} of this machine is taken|ended with code 1"):
            late.start()
        late.close()
        assert first.pid is not None


@pytest.mark.slow
def test_a_machine_without_loopback_is_told_what_an_etcd_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is started; this address exists on no machine."""
    monkeypatch.setattr(server, "LOOPBACK", "203.0.113.1")
    with pytest.raises(ServerError, match=r"does not reach itself at 203\.0\.113\.1 .*ip link set lo up"):
        EtcdServer().begin()


@pytest.mark.slow
def test_a_node_tells_its_jobs_etcd_from_another() -> None:
    """The name identifies it; if no etcd answers, the check passes, since one may start later."""
    with EtcdServer(name="job-a") as server:
        assert is_answered_by(server.endpoint, "job-a", give_up_after_s=PATIENCE_S)
        with pytest.raises(ServerError, match=r"job-a instead of job-b.*--endpoint"):
            is_answered_by(server.endpoint, "job-b", give_up_after_s=PATIENCE_S)
    assert not is_answered_by("127.0.0.1:1", "job-a", give_up_after_s=0.2)


@pytest.mark.parametrize("said", ["etcd Version: 3.3.25", "usage: etcd", ""])
def test_an_etcd_that_is_too_old_is_refused_before_it_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    """It would exit because of an unknown option, while the caller waits for it."""
    old = tmp_path / "etcd"
    old.write_text(f"#!/bin/sh\necho '{said}'\n")
    old.chmod(0o755)
    monkeypatch.setattr(server, "find_binary", lambda: str(old))
    with pytest.raises(ServerError, match=r"not an etcd of version 3\.4 or newer"):
        EtcdServer().begin()
