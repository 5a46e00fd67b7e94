"""Whether a process or a machine elsewhere still answers, asked by opening a TCP connection to it."""

from __future__ import annotations

import contextlib
import socket

PROBE_TIMEOUT_S = 0.2
REACH_TIMEOUT_S = 1.0


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; raises ValueError if the port is not a number."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def is_refused(endpoint: str) -> bool:
    """Say whether HOST:PORT refuses a connection, which means that nothing listens there any more.

    A machine that is gone or cut off does not refuse. No connection can detect that; leases do.
    """
    with contextlib.suppress(OSError, ValueError):
        try:
            socket.create_connection(split_endpoint(endpoint), timeout=PROBE_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
    return False


def is_reachable(endpoint: str) -> bool:
    """Say whether the machine of HOST:PORT answers, if only by refusing the connection."""
    try:
        socket.create_connection(split_endpoint(endpoint), timeout=REACH_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        return False
    return True
