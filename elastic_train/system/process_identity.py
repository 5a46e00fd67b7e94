"""Which process this is, among those of all machines and of all times: a process id alone is used again.

Containers each count their processes from 1, and a machine gives the number of a process that has ended to another.
"""

from __future__ import annotations

import socket
from pathlib import Path

_STARTED = 19  # the place in /proc/<pid>/stat after the program's name


def process_identity() -> dict[str, object]:
    """Return, beside a process id: `host`, the machine's `boot` id, and `born`, in clock ticks since that boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "born": _born("self")}


def is_alive(pid: int, born: int) -> bool:
    """Say whether the process of this machine that began at a moment, in clock ticks since the boot, still runs."""
    try:
        return _born(str(pid)) == born
    except OSError:
        return False


def _born(pid: str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_STARTED])
