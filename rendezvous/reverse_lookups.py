"""Keeping torch's stores from asking DNS for the names of peers.

torch looks up a name for the address of every connection to a store, at both ends, only to have it for messages; the
store's host does so for one connection after another. Where DNS answers late, or loses some of many questions that
come at once, a world forms seconds later: 5 s for each that is lost. torch asks no more once a lookup has failed, so
one is made to fail here: on a thread of its own, whose resolver asks a port of this machine at which nobody listens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

_NAMELESS = "127.83.67.1"
"""An address of every machine that has no name, so that DNS is asked for one."""
_PATIENCE = timedelta(seconds=2)
_NOBODY = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 1) + socket.inet_aton("127.0.0.1") + bytes(8)
"""A `struct sockaddr_in`."""


class _Resolver(ctypes.Structure):
    """The beginning of a thread's `struct __res_state`, as <resolv.h> has it."""

    _fields_ = [
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
        ("nsaddr", ctypes.c_ubyte * len(_NOBODY)),
    ]


def switch_off() -> None:
    """Let no store of this process, or of its forks, look up names; without effect where libc is not glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state") or not hasattr(libc, "__res_init"):
        return
    thread = threading.Thread(target=_fail_once, args=(libc,), name="reverse lookups")
    with _silenced():
        thread.start()
        thread.join()


def _fail_once(libc: ctypes.CDLL) -> None:
    libc.__res_init()
    libc.__res_state.restype = ctypes.c_void_p
    resolver = _Resolver.from_address(libc.__res_state())
    resolver.retry, resolver.nscount, resolver.nsaddr[:] = 1, 1, _NOBODY
    with contextlib.suppress(DistError, OSError):  # no such address here, or no socket: lookups stay as they are
        TCPStore(_NAMELESS, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep torch's warning of the lookup that failed from standard error."""
    try:
        before = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
