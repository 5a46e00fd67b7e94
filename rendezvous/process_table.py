"""The kernel's table of this machine's processes, in /proc (Linux).

A process that has ended stays in the table, as a zombie, until its parent has read its exit code; in a container
without an init that may be never. So a listed process need not be running, which `is_alive` checks. Process ids are
also reused: `born` distinguishes two processes with one id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _BORN = 0, 1, 11, 12, 19
"""Field indices in /proc/PID/stat after the program's name, which may itself contain blanks and brackets."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of the table.

    `state` is the kernel's letter, such as R, S, D, T (stopped by a signal), t (by a debugger) and Z (a zombie); `born`
    is in clock ticks since boot, and `cpu_ticks` is the time used, user and system.
    """

    state: str
    parent: int
    born: int
    cpu_ticks: int

    @property
    def has_ended(self) -> bool:
        """True if it is a zombie or dead."""
        return self.state in "ZX"


def pids() -> Iterator[int]:
    """Yield the ids of all processes, including ended ones."""
    return (int(path.name) for path in _PROC.iterdir() if path.name.isdigit())


def stat_of(pid: int) -> ProcessStat | None:
    """Return a process's entry in the table; None if there is none."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    cpu_ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessStat(fields[_STATE].decode(), int(fields[_PARENT]), int(fields[_BORN]), cpu_ticks)


def is_alive(pid: int, born: int | None = None) -> bool:
    """Return True if a process runs, or is stopped; with `born`, only if it is the one that began then."""
    stat = stat_of(pid)
    return stat is not None and not stat.has_ended and born in (None, stat.born)


def is_stopped(pid: int) -> bool:
    """Return True if a signal or a debugger has stopped a process."""
    stat = stat_of(pid)
    return stat is not None and stat.state in "Tt"


def children_of(parent: int | None) -> list[int]:
    """Return the children of a process that have not ended."""
    return [pid for pid in pids() if (stat := stat_of(pid)) and stat.parent == parent and not stat.has_ended]


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is gone, or another user's."""
    pairs = (item.decode(errors="replace").partition("=") for item in _read(pid, "environ").split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def name_of(pid: int) -> str:
    """Return a process's own name, as `ps` shows it, of at most 15 bytes; empty if it is gone."""
    return _read(pid, "comm").decode(errors="replace").rstrip("\n")


def boot_id() -> str:
    """Return the unique id of this boot of this machine; empty if the kernel has none."""
    try:
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return ""


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
