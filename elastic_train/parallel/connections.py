"""gloo's TCP connections: the listening address, and shutdown of collectives with frozen peers.

gloo's `abort()` unblocks nothing, and a group's destructor waits for its collectives. So an abandoned world would keep
its threads, connections and a gradient's memory until its timeout. Shutting its connections down acts like the peer's
death: every call ends.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elastic_train.errors import ConfigError

_FDS = "/proc/self/fd"
_INTERFACES = "GLOO_SOCKET_IFNAME"
LOOK_EVERY_S = 0.2
"""Seconds between measurements of round trips: a slow link should show within a few steps."""
MOST_ASKED = 16
_ROUND_TRIP_AT = 68
"""Offset of the smoothed round trip, in microseconds, in Linux's `struct tcp_info`."""


class Connections:
    """The connections opened in this process between creation and `note`; empty without /proc.

    Connections that other threads open in between, e.g. clients of etcd, are included; they reconnect. Those of the
    `store` are not: peers read there why a world ended.
    """

    def __init__(self, store: Store | None = None) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._before, self._store_port = _sockets(), store.port if isinstance(store, TCPStore) else None
        self._opened: dict[int, int] = {}
        self._round_trip_s, self._asked_at = 0.0, 0.0

    def note(self) -> None:
        """Record the connections opened so far."""
        opened = {fd: inode for fd, inode in _sockets().items() if self._before.get(fd) != inode}
        self._opened = {fd: inode for fd, inode in opened.items() if self._store_port not in _ports_of(fd)}

    def round_trip_s(self) -> float:
        """Return the round trip to the nearest peer in seconds, as measured by the kernel; 0 if unknown.

        It is the minimum, because a slow link affects all connections of its own rank, but only one of each other rank.
        Asks a few connections, not at every step.
        """
        now = time.monotonic()
        if now - self._asked_at >= LOOK_EVERY_S:
            self._asked_at = now
            known = [seconds for fd in list(self._opened)[:MOST_ASKED] if (seconds := _round_trip_s(fd)) > 0]
            self._round_trip_s = min(known, default=0.0)
        return self._round_trip_s

    def shut_down(self) -> None:
        """Shut down the recorded connections that are still open; reused descriptors are left alone."""
        now = _sockets()
        for fd, inode in self._opened.items():
            if now.get(fd) == inode:
                _shut_down(fd)
        self._opened = {}


def _sockets() -> dict[int, int]:
    """Return this process's socket descriptors and their inodes."""
    found = {}
    try:
        names = os.listdir(_FDS)  # noqa: PTH208 - faster than thousands of Paths
    except OSError:
        return {}
    for name in names:
        try:
            status = os.fstat(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _ports_of(fd: int) -> tuple[int, ...]:
    """Return a TCP connection's ports, its own and its peer's; none for other sockets."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return connection.getsockname()[1], connection.getpeername()[1]
    except OSError:
        pass  # a listener, or already closed
    return ()


def _shut_down(fd: int) -> None:
    """Shut a TCP connection down, unless it is a listener: gloo's thread would abort the process."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # a listener, or already closed


def _round_trip_s(fd: int) -> float:
    """Return a connection's round trip in seconds; 0 for a socket without one, or a closed one."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                return 0.0
            connection.getpeername()
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_AT + 4)
    except (OSError, AttributeError):  # a listener, closed, or not Linux
        return 0.0
    return float(struct.unpack_from("I", state, _ROUND_TRIP_AT)[0]) / 1e6


def gloo_options(timeout: timedelta, address: str | None) -> Any:
    """Return options that bind an address, unless the user has chosen interfaces; raise ConfigError if binding fails.

    By default gloo binds the address of the machine's name: on Debian, 127.0.1.1.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs name another class
    options._timeout = timeout
    gloo, names = dist.ProcessGroupGloo, os.environ.get(_INTERFACES)
    try:
        if names:
            options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
        else:
            options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
    except RuntimeError as error:
        where = f"{_INTERFACES}={names}" if names else address or "what this machine's name means"
        raise ConfigError(f"gloo cannot listen at {where}: {str(error).splitlines()[0]}") from error
    options._threads = 2 * len(options._devices)  # gloo's own default
    return options
