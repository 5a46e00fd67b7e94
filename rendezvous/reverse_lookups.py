"""Switch off reverse DNS lookups by torch's stores.

torch looks up a name for the address of every connection to a store, at both ends, only to print it in messages; the
store's host does so for one connection after another. If DNS is slow, or drops queries, a world forms seconds later: 5
s per dropped query. torch stops its lookups after the first failure, so this module makes one fail: for a moment the
resolver of the calling thread asks a closed port of this machine.

This uses no extra thread. A thread that has used the resolver takes a lock of glibc once more as it exits, after
Python's `join` has returned; a process forked at that moment can never look up a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

_NAMELESS = "127.83.67.1"
"""A loopback address for which no file has a name, so that DNS is asked."""
_PATIENCE = timedelta(seconds=2)
_NOBODY = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 1) + socket.inet_aton("127.0.0.1") + bytes(8)
"""A `struct sockaddr_in`."""


class _Resolver(ctypes.Structure):
    """The beginning of a thread's `struct __res_state`, as in <resolv.h>."""

    _fields_ = [
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("nscount", ctypes.c_int),
        ("nsaddr", ctypes.c_ubyte * len(_NOBODY)),
    ]


_is_done = False


def switch_off() -> None:
    """Stop the lookups of this process and of its later forks; no effect unless libc is glibc.

    Only the first call has an effect, also in a fork of a process that has made it.
    """
    global _is_done
    libc = ctypes.CDLL(None)
    if _is_done or not hasattr(libc, "__res_state") or not hasattr(libc, "__res_init"):
        return
    _is_done = True
    libc.__res_init()
    libc.__res_state.restype = ctypes.c_void_p
    resolver = _Resolver.from_address(libc.__res_state())
    resolver.retry, resolver.nscount, resolver.nsaddr[:] = 1, 1, _NOBODY
    try:
        # if that address or a socket is refused, lookups stay on
        with _silenced(), contextlib.suppress(DistError, OSError):
            TCPStore(_NAMELESS, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    finally:
        resolver.retry = 0  # __res_init sets it, as it reads the servers again
        libc.__res_init()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress torch's warning about the failed lookup on standard error."""
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
