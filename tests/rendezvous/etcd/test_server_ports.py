"""Ports for servers of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rendezvous.etcd import server
from rendezvous.etcd.server import free_ports


def test_ports_are_outside_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server listens some time after its port was chosen; one that is taken is not chosen, nor one twice."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(port < first for port in ports)
    (tmp_path / "range").write_text("11100 60999\n")
    monkeypatch.setattr(server, "_PORT_RANGE", tmp_path / "range")
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in free_ports(20)
    monkeypatch.setattr(server, "_PORT_RANGE", tmp_path / "none")
    assert all(port > 0 for port in free_ports(3)), "the system chooses where it does not say"
