"""A network with faults between a client and an S3 server, as a TCP proxy."""

from __future__ import annotations

import re
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

CONFLICT = (
    b"HTTP/1.1 409 Conflict\r\nContent-Type: application/xml\r\nContent-Length: 89\r\nConnection: close\r\n\r\n"
    b"<Error><Code>ConditionalRequestConflict</Code><Message>a rival is at it</Message></Error>"
)
_PIECE = 1 << 16


Server = TypeVar("Server", bound=socketserver.BaseServer)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Run a server on a thread until the context ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class FaultyNetwork(socketserver.ThreadingTCPServer):
    """Forwards requests to a server, one connection each, and breaks those that its settings select.

    `cut_after` resets a connection after so many bytes of its request. Of the requests whose first line matches
    `matching`, the next `num_unanswered` arrive but their answers are lost, and the next `num_conflicts` are answered
    by 409 and do not arrive.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        parts = urlsplit(server)
        self.target = (parts.hostname or "", parts.port or 0)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.cut_after: int | None = None
        self.matching = re.compile(rb"$^")
        self.num_unanswered = 0
        self.num_conflicts = 0

    def serving(self) -> AbstractContextManager[FaultyNetwork]:
        """Run until the context ends."""
        return serving(self)


class _Connection(socketserver.BaseRequestHandler):
    server: FaultyNetwork

    def handle(self) -> None:
        client: socket.socket = self.request
        request = _read_head(client)
        network, is_matching = self.server, self.server.matching.match(request) is not None
        if is_matching and network.num_conflicts:
            network.num_conflicts -= 1
            for _ in _rest_of(client, request):
                pass
            client.sendall(CONFLICT)
        elif request:
            with socket.create_connection(network.target) as server:
                self._forward(client, server, request, is_matching)

    def _forward(self, client: socket.socket, server: socket.socket, request: bytes, is_matching: bool) -> None:
        network, num_passed = self.server, 0
        server.sendall(request)
        for piece in _rest_of(client, request):
            server.sendall(piece)
            num_passed += len(piece)
            if network.cut_after is not None and num_passed > network.cut_after:
                _reset(client)
                return
        if is_matching and network.num_unanswered:
            network.num_unanswered -= 1
            server.recv(_PIECE)
            _reset(client)
            return
        while piece := server.recv(_PIECE):
            client.sendall(piece)


def _read_head(client: socket.socket) -> bytes:
    """Read a request's head, with the part of the body that came with it; ask the server to close after its answer."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = client.recv(_PIECE)
        if not piece:
            return b""
        received += piece
    if b"expect: 100-continue" in received.lower():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        received = re.sub(rb"(?i)expect: 100-continue\r\n", b"", received)
    return received.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


def _rest_of(client: socket.socket, request: bytes) -> Iterator[bytes]:
    """Yield the rest of a request's body."""
    head, _, body = request.partition(b"\r\n\r\n")
    match = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    left = int(match[1]) - len(body) if match else 0
    while left > 0 and (piece := client.recv(_PIECE)):
        left -= len(piece)
        yield piece


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
