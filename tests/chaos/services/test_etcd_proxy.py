"""The proxies before etcd: bytes pass, are held back in one or both directions, are delayed, and connections end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from chaos.services.etcd_proxy import Proxies, Way
from tests.conftest import PATIENCE_S


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets, with a mark."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    def answer(client: socket.socket) -> None:
        with client:
            while content := client.recv(1000):
                client.sendall(b"<" + content)

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    listening.close()


@pytest.fixture
def proxies(echo: str) -> Iterator[Proxies]:
    made = Proxies("127.0.0.1", [echo], [Way(), Way()])
    made.start()
    yield made
    made.close()


def connect(proxies: Proxies, node: int = 0) -> socket.socket:
    host, _, port = proxies.endpoint(node, "127.0.0.1").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_bytes_and_ends_of_connections_are_forwarded(proxies: Proxies) -> None:
    with connect(proxies) as client:
        client.sendall(b"a")
        assert client.recv(10) == b"<a"
        client.shutdown(socket.SHUT_WR)
        assert client.recv(10) == b""


@pytest.mark.parametrize("held", ["requests_are_held", "answers_are_held"])
def test_held_bytes_arrive_late_and_other_nodes_are_unaffected(proxies: Proxies, held: str) -> None:
    """A held direction keeps the sent bytes, and delivers them in order when released."""
    setattr(proxies.ways[0], held, True)
    with connect(proxies) as client, connect(proxies, 1) as other:
        client.sendall(b"a")
        other.sendall(b"b")
        assert other.recv(10) == b"<b"
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(10)
        client.settimeout(PATIENCE_S)
        setattr(proxies.ways[0], held, False)
        assert client.recv(10) == b"<a"


def test_a_missing_target_ends_the_connection() -> None:
    """If nobody listens, a connection ends at once, as it would without a proxy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{free.getsockname()[1]}"
    made = Proxies("127.0.0.1", [target], [Way()])
    made.start()
    try:
        with connect(made) as client, contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b""
    finally:
        made.close()
