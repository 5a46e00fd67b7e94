"""Proof that a fault bit: what can be seen of it on the machine, in words; None as long as nothing can."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from rendezvous.process_table import is_alive, is_stopped

Effect = Callable[[], str | None]
"""Looks once, and returns the proof; asked again until the fault is over."""
_ANSWER_S = 0.3


def gone(pids: Sequence[int]) -> Effect:
    """See that processes have ended."""
    return lambda: f"{len(pids)} processes have ended" if pids and not any(map(is_alive, pids)) else None


def stopped(pids: Sequence[int]) -> Effect:
    """See that processes are stopped."""
    return lambda: f"{len(pids)} processes are stopped" if pids and all(map(_is_still, pids)) else None


def running(pids: Sequence[int]) -> Effect:
    """See that processes run that were started."""
    return lambda: f"{len(pids)} processes were started" if pids and all(map(is_alive, pids)) else None


def _is_still(pid: int) -> bool:
    return is_stopped(pid) or not is_alive(pid)


def came_there(point: str) -> Effect:
    """Take a failpoint's own mark, which the process that comes there leaves just before it is hit."""
    return lambda: f"a process came to {point}"


def counted(what: str, count: Callable[[], int]) -> Effect:
    """See that a counter of what was spoilt has moved since now."""
    before = count()
    return lambda: f"{count() - before} {what}" if count() > before else None


def unreachable(address: str) -> Effect:
    """See that an address, which would refuse a connection at once, does not even answer."""

    def look() -> str | None:
        try:
            socket.create_connection((address, 9), _ANSWER_S).close()
        except ConnectionRefusedError:
            return None
        except OSError as error:
            return f"{address} does not answer: {error}"
        return None

    return look


def differs(path: Path, before: bytes) -> Effect:
    """See that a file, read again, holds other bytes than before."""

    def look() -> str | None:
        if not path.exists():
            return f"{path.name} is not there any more"
        return f"{path.name} reads otherwise" if path.read_bytes() != before else None

    return look
