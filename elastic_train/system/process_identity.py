"""Which process this is, among those of all machines and of all times, and what it holds of its machine.

A process id alone is used again: containers each count their processes from 1, and a machine gives the number of a
process that has ended to another. What grows with every world would end a job of a thousand of them.
"""

from __future__ import annotations

import socket
from pathlib import Path

_KIB = 1024
_STARTED = 19  # the place in /proc/<pid>/stat after the program's name


def process_identity() -> dict[str, object]:
    """Return, beside a process id: `host`, the machine's `boot` id, and `born`, in clock ticks since that boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "born": _born("self")}


def pid_space() -> str:
    """Return within what a pid and a birth tell a process from all others: the machine's boot, and the container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def is_alive(pid: int, born: int) -> bool:
    """Say whether the process of this machine that began at a moment, in clock ticks since the boot, still runs."""
    try:
        fields = _fields(str(pid))
    except OSError:
        return False
    return int(fields[_STARTED]) == born and fields[0] not in "ZX"  # one that nobody has reaped yet has ended


def _born(pid: str) -> int:
    return int(_fields(pid)[_STARTED])


def _fields(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def process_usage() -> dict[str, int]:
    """Return the number of open file descriptors and of threads, and the resident bytes."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text(errors="replace").splitlines() if ":" in line
    )
    num_fds = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # one is the listing's own
    return {"fds": num_fds, "threads": int(status["Threads"]), "rss": int(status["VmRSS"].split()[0]) * _KIB}
