"""Measure a laid cable: the round trip of a connection, and the bytes that one connection carries."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from chaos.services.network.namespace import Cable

_CLOSED_PORT, _NUM_TRIPS = 9, 21
_TIMEOUT_S, _SENDING_S = 10.0, 1.0
_SINK = """
import socket, sys
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
connection, room = listening.accept()[0], bytearray(1 << 20)
num_bytes = 0
while got := connection.recv_into(room):
    num_bytes += got
connection.sendall(str(num_bytes).encode())
"""


@dataclass(frozen=True, slots=True)
class Link:
    """The median round trip in seconds, and the bytes per second towards the inside node."""

    round_trip_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{8e-9 * self.bytes_per_s:.2f} Gbit/s, round trip {1e3 * self.round_trip_s:.2f} ms"


def measure(laid: Cable) -> Link:
    """Return what the cable does to connections between the nodes."""
    return Link(statistics.median(_round_trip_s(laid) for _ in range(_NUM_TRIPS)), _bytes_per_s(laid))


def _round_trip_s(laid: Cable) -> float:
    """Return the seconds until the inside node refuses a connection."""
    began = time.monotonic()
    with contextlib.suppress(ConnectionRefusedError):
        _connect(laid, _CLOSED_PORT).close()
    return time.monotonic() - began


def _bytes_per_s(laid: Cable) -> float:
    """Return the rate of one connection; its bytes have arrived when the inside node says how many there were."""
    sink = laid.command([sys.executable, "-I", "-S", "-c", _SINK, laid.address("inside")])
    with subprocess.Popen(sink, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with _connect(laid, int(process.stdout.readline())) as connection:
            data, began = bytes(1 << 18), time.monotonic()
            while time.monotonic() < began + _SENDING_S:
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            num_bytes = int(connection.recv(64))
            return num_bytes / (time.monotonic() - began)


def _connect(laid: Cable, port: int) -> socket.socket:
    return socket.create_connection((laid.address("inside"), port), _TIMEOUT_S, (laid.address("nodes"), 0))
