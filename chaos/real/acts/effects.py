"""Proof that a fault took effect: what can be observed on the machine, in words; None while there is nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rendezvous.process_table import is_alive, is_stopped

Effect = Callable[[], str | None]
"""Looks once and returns the proof; called until the fault is over."""
_ANSWER_S = 0.3
_SELDOM_S = 0.2
"""Seconds between searches for a node's processes and their open files, which take milliseconds."""
_REMOTE, _STATE, _INODE = 2, 3, 9
"""Columns of /proc/PID/net/tcp."""
_ESTABLISHED = "01"
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EINVAL)
"""Kernel errors for an address without a route; EINVAL where a rule drops packets."""


def gone(pids: Sequence[int]) -> Effect:
    return lambda: f"{len(pids)} processes have ended" if pids and not any(map(is_alive, pids)) else None


def stopped(pids: Sequence[int]) -> Effect:
    def look() -> str | None:
        num_stopped = sum(map(is_stopped, pids))
        return f"{num_stopped} processes are stopped" if num_stopped and all(map(_is_still, pids)) else None

    return look


def running(pids: Sequence[int]) -> Effect:
    return lambda: f"{len(pids)} processes were started" if pids and all(map(is_alive, pids)) else None


def _is_still(pid: int) -> bool:
    return is_stopped(pid) or not is_alive(pid)


def came_there(point: str) -> Effect:
    """Return an effect that is immediate: the process leaves a mark at its failpoint just before it is hit."""
    return lambda: f"a process came to {point}"


def counted(what: str, count: Callable[[], int]) -> Effect:
    before = count()
    return lambda: f"{count() - before} {what}" if count() > before else None


def unreachable(address: str) -> Effect:
    """Return an effect: an address, which would refuse a connection at once, does not answer."""

    def look() -> str | None:
        try:
            socket.create_connection((address, 9), _ANSWER_S).close()
        except OSError as error:
            is_silent = isinstance(error, TimeoutError) or error.errno in _NO_WAY
            return f"{address} does not answer: {error}" if is_silent else None
        return None

    return look


def while_last(is_last: Callable[[], bool], effect: Effect) -> Effect:
    """Count only what is seen before a later fault of this kind replaces this one."""
    return lambda: effect() if is_last() else None


def differs(path: Path, before: bytes, owner: Path) -> Effect:
    """Return an effect, checked now: a file's content has changed, or it is gone while its owner exists.

    Later would be too late: files are also deleted in normal operation.
    """
    try:
        proof = f"{path.name} reads otherwise" if path.read_bytes() != before else None
    except FileNotFoundError:
        proof = f"{path.name} is not there any more" if owner.exists() else None
    return lambda: proof


def refuses(folder: Path, why: int) -> str | None:
    """Return a proof that a folder accepts no bytes for this reason (an errno); None otherwise."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(bytes(1 << 16))
    except OSError as error:
        return f"writing there fails: {error.strerror}" if error.errno == why else None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


class HeldWrite:
    """Writes to a file system that is about to freeze: one before, and one on a thread, which may block.

    The file has no name, so nothing is left of it. Raise OSError if the first write fails.
    """

    def __init__(self, folder: Path) -> None:
        self._name, self._took_s = folder.name, 0.0
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - the thread closes it
        self._write()
        self._thread = threading.Thread(target=self._write_and_close, name="held write", daemon=True)
        self._ended_at: float | None = None

    def begin(self) -> None:
        """Start the second write, without waiting for it."""
        self._thread.start()

    def ended_after(self, moment: float) -> str | None:
        """Return how long the write took, if it ended at or after `moment` (monotonic clock); else None."""
        if self._ended_at is None or self._ended_at < moment:
            return None
        return f"a write to {self._name} took {self._took_s:.1f} s, until the thaw"

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _write(self) -> None:
        began = time.monotonic()
        self._file.write(b"x")
        self._took_s = time.monotonic() - began

    def _write_and_close(self) -> None:
        with contextlib.suppress(OSError), self._file:
            self._write()
            self._ended_at = time.monotonic()


def connected(pids: Callable[[], Collection[int]], ports: Collection[int]) -> Effect:
    """Return an effect: a process holds a connection to one of these ports."""

    looked_at = 0.0

    def look() -> str | None:
        nonlocal looked_at
        if time.monotonic() < looked_at + _SELDOM_S:
            return None
        looked_at = time.monotonic()
        pid = next((pid for pid in pids() if _is_connected(pid, ports)), None)
        return f"process {pid} is connected to etcd" if pid is not None else None

    return look


def _is_connected(pid: int, ports: Collection[int]) -> bool:
    process = Path(f"/proc/{pid}")
    own = set()
    with contextlib.suppress(OSError):  # the process has ended
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                own.add(link.readlink().name)
        for name in ("tcp", "tcp6"):
            for row in map(str.split, (process / "net" / name).read_text().splitlines()[1:]):
                is_there = row[_STATE] == _ESTABLISHED and int(row[_REMOTE].split(":")[1], 16) in ports
                if is_there and f"socket:[{row[_INODE]}]" in own:
                    return True
    return False
