"""What the kernel says of the processes of this machine, in /proc (Linux).

A process that has ended stays in the table, as a zombie, until its parent has asked for its exit code; in a container
without an init that may be never. So a number in the table is not a running process, and `is_alive` says the
difference. A number is also given away again: `born` tells two processes of one number apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT, _USER_TICKS, _SYSTEM_TICKS, _BORN = 0, 1, 11, 12, 19
"""Places in /proc/PID/stat after the program's name, which may itself hold blanks and brackets."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of the table.

    `state` is the kernel's letter, such as R, S, D, T (stopped by a signal), t (by a debugger) and Z (a zombie); `born`
    is in clock ticks since the boot, `cpu_ticks` what it has used, user and system.
    """

    state: str
    parent: int
    born: int
    cpu_ticks: int

    @property
    def has_ended(self) -> bool:
        """Whether it is a zombie: nothing of it runs any more."""
        return self.state in "ZX"


def pids() -> Iterator[int]:
    """Yield the numbers of all processes, of ended ones as well."""
    return (int(path.name) for path in _PROC.iterdir() if path.name.isdigit())


def stat_of(pid: int) -> ProcessStat | None:
    """Return what the table says of a process; None if it is not there."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    cpu_ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessStat(fields[_STATE].decode(), int(fields[_PARENT]), int(fields[_BORN]), cpu_ticks)


def is_alive(pid: int, born: int | None = None) -> bool:
    """Say whether a process runs, or is stopped; with `born`, whether it is still the one that began then."""
    stat = stat_of(pid)
    return stat is not None and not stat.has_ended and born in (None, stat.born)


def is_stopped(pid: int) -> bool:
    """Say whether a signal or a debugger has stopped a process."""
    stat = stat_of(pid)
    return stat is not None and stat.state in "Tt"


def children_of(parent: int | None) -> list[int]:
    """Return the processes that have a parent and have not ended."""
    return [pid for pid in pids() if (stat := stat_of(pid)) and stat.parent == parent and not stat.has_ended]


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is gone, or another user's."""
    pairs = (item.decode(errors="replace").partition("=") for item in _read(pid, "environ").split(b"\0"))
    return {name: value for name, _, value in pairs if name}


def name_of(pid: int) -> str:
    """Return a process's own name, as `ps` shows it, of 15 bytes at most; empty if it is gone."""
    return _read(pid, "comm").decode(errors="replace").rstrip("\n")


def boot_id() -> str:
    """Return what tells this boot of this machine from all others; empty where the kernel does not say."""
    try:
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return ""


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
