"""The TCP connections of gloo: where it listens, and what ends a collective whose peer is frozen.

gloo's `abort()` unblocks nothing, and a group's destructor waits for its collectives, so a world that was given up kept
its threads, its connections and a gradient's worth of memory until its timeout, and a peer that froze again and again
kept them for each of its worlds. Shutting its connections down has the effect of a peer's death: every call ends.
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

from elastic_train.errors import ConfigError

_FDS = "/proc/self/fd"
_INTERFACES = "GLOO_SOCKET_IFNAME"
LOOK_EVERY_S = 0.2
"""How often connections are asked for their round trips: what a slow link adds is to be seen within some steps."""
MOST_ASKED = 16
_ROUND_TRIP_AT = 68
"""Where linux' `struct tcp_info` has the smoothed round trip, in microseconds."""


class Connections:
    """The connections that appear in this process from now until `note`; there are none where there is no /proc.

    One that another thread opens in between is among them: a client of etcd or of a store, which connects again.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._opened: dict[int, int] = {}
        self._round_trip_s, self._asked_at = 0.0, 0.0

    def note(self) -> None:
        """Remember what has been opened by now."""
        self._opened = {fd: inode for fd, inode in _sockets().items() if self._before.get(fd) != inode}

    def round_trip_s(self) -> float:
        """Return the seconds to the nearest peer and back, as the kernel measures them; 0 where it does not say.

        The nearest one's, because a slow link spoils all connections of the rank that has it, and one of each other's.
        A few connections are asked, and not at every step.
        """
        now = time.monotonic()
        if now - self._asked_at >= LOOK_EVERY_S:
            self._asked_at = now
            known = [seconds for fd in list(self._opened)[:MOST_ASKED] if (seconds := _round_trip_s(fd)) > 0]
            self._round_trip_s = min(known, default=0.0)
        return self._round_trip_s

    def shut_down(self) -> None:
        """End those that are still open, as a peer's death would; a descriptor of another file now is left alone."""
        now = _sockets()
        for fd, inode in self._opened.items():
            if now.get(fd) == inode:
                _shut_down(fd)
        self._opened = {}


def _sockets() -> dict[int, int]:
    """Return the descriptors of this process that are sockets, and which sockets."""
    found = {}
    try:
        names = os.listdir(_FDS)  # noqa: PTH208 - a Path for each of thousands costs more
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


def _shut_down(fd: int) -> None:
    """Shut a TCP connection down. Not a listener: gloo's thread would end the process."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it listens, or is closed already


def _round_trip_s(fd: int) -> float:
    """Ask the kernel for a connection's round trip; 0 for a socket that has none, or is closed by now."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                return 0.0
            connection.getpeername()
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP_AT + 4)
    except (OSError, AttributeError):  # it listens or is closed, or this is not Linux
        return 0.0
    return float(struct.unpack_from("I", state, _ROUND_TRIP_AT)[0]) / 1e6


def gloo_options(timeout: timedelta, address: str | None) -> Any:
    """Return options that bind an address, unless the user has chosen interfaces; raises ConfigError if it cannot.

    By itself gloo binds what the machine's name resolves to: on Debian, 127.0.1.1.
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
    options._threads = 2 * len(options._devices)  # as gloo's own default
    return options
