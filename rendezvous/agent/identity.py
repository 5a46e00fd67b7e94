"""Identify the listener at an address: a node's agent tells anyone its node.

One line each way, `elastic? NONCE` and `elastic! NODE NONCE`. An address that leads elsewhere (another machine has it,
too; the port was given to another process) answers with another node or not at all; a machine that refuses says nothing
about the node, which may be alive elsewhere. The agent also serves link measurements there (`link_speed`).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from typing import Literal

from rendezvous.agent.link_speed import MEASURE, LinkServer

ASK_TIMEOUT_S = 1.0
SERVE_TIMEOUT_S = 0.5
PAUSE_S = 0.1
"""Seconds until the next try to accept, e.g. if this process has too many open files."""
_QUESTION, _ANSWER = "elastic?", "elastic!"
_MOST_BYTES = 512

Answer = Literal["itself", "other", "refused", "mute", "silent"]
"""`other`: another node or program. `mute`: connected, no answer: a frozen or busy agent, or a relay without target.
`silent`: not connected, and not refused.
"""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; raise ValueError if the port is not a number."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def ask(endpoint: str, node: str, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
    """Ask the listener at HOST:PORT for its node, and classify the answer."""
    nonce = secrets.token_hex(8)
    try:
        connection = socket.create_connection(split_endpoint(endpoint), timeout=timeout_s)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, ValueError):
        return "silent"
    with connection:
        try:
            connection.sendall(f"{_QUESTION} {nonce}\n".encode())
            line = _read_line(connection)
        except OSError:
            return "mute"
    if not line.endswith(b"\n"):
        return "mute" if not line else "other"
    return "itself" if line == f"{_ANSWER} {node} {nonce}\n".encode() else "other"


def refuses(endpoint: str, timeout_s: float) -> bool:
    """Return True if HOST:PORT refuses connections; faster than `ask`, as no program has to answer."""
    try:
        socket.create_connection(split_endpoint(endpoint), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass
    return False


class IdentityPort:
    """A port of this process at which a thread answers for a node, until the process ends."""

    def __init__(self, address: str, node: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.endpoint = f"{address}:{self._listener.getsockname()[1]}"
        self._node, self._links, self._is_closed = node, LinkServer(), threading.Event()
        threading.Thread(target=self._serve, name="identity", daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread from accept()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed.wait(PAUSE_S):
                    return
                continue
            with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
                stack.enter_context(connection)
                connection.settimeout(SERVE_TIMEOUT_S)
                question, nonce = _read_line(connection).decode().split()
                answer = f"{_ANSWER} {self._node} {nonce}"
                if question == _QUESTION:
                    connection.sendall(f"{answer}\n".encode())
                elif question == MEASURE:
                    stack.pop_all()  # the connection stays open
                    self._links.serve(connection, answer)


def _read_line(connection: socket.socket) -> bytes:
    """Read up to the end of a line, the connection or the timeout."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
        read = connection.recv(_MOST_BYTES)
        if not read:
            break
        line += read
    return line
