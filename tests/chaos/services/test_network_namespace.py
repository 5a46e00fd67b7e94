"""The cable to a network namespace: loss, delay and cuts between nodes, while etcd remains reachable."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from chaos.services.network.namespace import Cable, NoNamespacesError, cable
from chaos.services.network.packet_relay import Impairment
from tests.conftest import PATIENCE_S

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("network")]  # one cable, and one left behind, at a time

_ECHO = """
import socket, sys, threading
def answer(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
while True:
    threading.Thread(target=answer, args=listening.accept()[:1], daemon=True).start()
"""


LONG_S = 15.0
"""The delay of some packets while others must be fast, however busy the machine is."""
LEFT = "elastic-99999"
"""Left behind by a killed process, unless a process with that pid is alive."""


@pytest.fixture(scope="module")
def laid() -> Iterator[Cable]:
    if shutil.which("ip"):
        subprocess.run(["ip", "netns", "add", LEFT], capture_output=True, check=False)
    try:
        with cable() as laid:
            yield laid
    except NoNamespacesError as error:
        pytest.skip(str(error))


@pytest.fixture
def connect(laid: Cable) -> Iterator[object]:
    """Return a function that connects the outside addresses to an echo process inside."""
    command = laid.command([sys.executable, "-c", _ECHO, laid.address("inside")])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        port = int(echo.stdout.readline())
        opened: list[socket.socket] = []

        def connect(whose: str) -> socket.socket:
            target, own = (laid.address("inside"), port), (laid.address(whose), 0)
            opened.append(socket.create_connection(target, timeout=PATIENCE_S, source_address=own))
            return opened[-1]

        yield connect
        laid.mend()
        for connection in opened:
            connection.close()
        echo.kill()


def seconds_of(connection: socket.socket, num_bytes: int = 2000) -> float:
    """Send bytes and receive them back; return the duration."""
    data, began = bytes(range(250)) * (num_bytes // 250), time.monotonic()
    connection.sendall(data)
    received = b""
    while len(received) < len(data):
        received += connection.recv(1 << 16)
    assert received == data
    return time.monotonic() - began


def test_a_namespace_of_a_killed_process_is_removed(laid: Cable) -> None:
    """Another cable may then have its addresses."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert laid.namespace in namespaces and LEFT not in namespaces


def test_packets_are_late_both_ways_and_those_to_etcd_are_not(laid: Cable, connect: object) -> None:
    """An open connection continues, delayed in each direction; without the delay it is as before."""
    assert callable(connect)
    if laid.relay is None:
        pytest.skip("no TUN interfaces here")
    nodes, etcd = connect("nodes"), connect("etcd")
    seconds_of(nodes)
    laid.worsen(delay_s=1.5)
    assert seconds_of(nodes) >= 3.0
    laid.worsen(delay_s=LONG_S)
    late = threading.Thread(target=seconds_of, args=(nodes,))
    late.start()
    seconds_of(etcd)
    assert late.is_alive(), "etcd's way is another"
    laid.mend()
    late.join()
    while laid.relay.num_held:  # the last packets in flight
        seconds_of(etcd)
    passed = laid.relay.num_passed
    seconds_of(nodes)
    assert laid.relay.num_passed == passed


def test_lost_packets_are_sent_again(laid: Cable, connect: object) -> None:
    """A fifth of the packets is lost, but no byte; if all are lost, the bytes arrive afterwards."""
    assert callable(connect)
    if laid.relay is None:
        pytest.skip("no TUN interfaces here")
    nodes = connect("nodes")
    laid.worsen(loss=0.2)
    lost, passed = laid.relay.num_lost, laid.relay.num_passed
    while laid.relay.num_passed < passed + 100:
        seconds_of(nodes)
    share = (lost := laid.relay.num_lost - lost) / (lost + laid.relay.num_passed - passed)
    assert 0.05 < share < 0.5
    laid.mend()
    laid.worsen(loss=1.0)
    lost, again = laid.relay.num_lost, threading.Thread(target=seconds_of, args=(nodes,))
    again.start()
    deadline = time.monotonic() + PATIENCE_S
    while laid.relay.num_lost == lost:
        assert time.monotonic() < deadline, "nothing is lost"
        time.sleep(0.01)
    assert again.is_alive()
    laid.mend()
    again.join(PATIENCE_S)
    assert not again.is_alive()


@pytest.mark.parametrize("spoil", [Cable.part, Cable.silence])
def test_a_cut_off_node_reaches_only_etcd(laid: Cable, connect: object, spoil: object) -> None:
    """Bytes sent meanwhile arrive once the cut is repaired."""
    assert callable(connect) and callable(spoil)
    nodes, etcd = connect("nodes"), connect("etcd")
    spoil(laid)
    cut = threading.Thread(target=seconds_of, args=(nodes,))
    cut.start()
    seconds_of(etcd)
    assert cut.is_alive()
    laid.mend()
    cut.join(PATIENCE_S)
    assert not cut.is_alive()


def test_etcds_packets_can_be_impaired_too(laid: Cable, connect: object) -> None:
    """By a delay with jitter, both ways."""
    assert callable(connect)
    if laid.relay is None:
        pytest.skip("no TUN interfaces here")
    etcd = connect("etcd")
    laid.impair(Impairment(delay_s=0.5, jitter_s=0.1))
    assert seconds_of(etcd) >= 1.0


def test_bandwidth_limits_each_direction(laid: Cable, connect: object) -> None:
    """Bytes that are sent and received take their share of a second."""
    assert callable(connect)
    if laid.relay is None:
        pytest.skip("no TUN interfaces here")
    nodes = connect("nodes")
    laid.impair(Impairment(bytes_per_s=100_000.0))
    assert seconds_of(nodes, 100_000) >= 1.0
