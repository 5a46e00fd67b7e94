"""Identify this process across machines and time, and measure its use of resources.

Process ids are reused: containers count from 1, and machines reassign numbers of ended processes. Resources that grow
with every world would end a job of a thousand worlds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rendezvous.process_table import boot_id, stat_of

_KIB = 1024


def process_identity() -> dict[str, object]:
    """Return `host`, `boot` id, and `born`, in clock ticks since that boot: they identify a process beyond its pid.

    `space` is the `pid_space` in which it has its pid.
    """
    stat = stat_of(os.getpid())
    born = stat.born if stat else 0
    return {"host": socket.gethostname(), "boot": boot_id(), "born": born, "space": pid_space()}


def pid_space() -> str:
    """Return the scope in which pid and birth time are unique: the machine's boot, and the container."""
    try:
        return f"{boot_id()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # a sandbox without namespaces
        return boot_id()


def slurm_job() -> dict[str, object]:
    """Return the number of this process's job on Slurm; empty elsewhere."""
    number = os.environ.get("SLURM_JOB_ID")
    return {"slurm_job": number} if number else {}


class Resident(NamedTuple):
    """Resident bytes of this process: now, and the peak since it began."""

    now: int
    peak: int


def process_usage() -> dict[str, int]:
    """Return the numbers of open file descriptors and threads, and the resident bytes."""
    num_fds = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # one is the listing's own
    status = _status()
    return {"fds": num_fds, "threads": int(status["Threads"]), "rss": _resident(status).now}


def resident() -> Resident:
    """Return this process's resident bytes.

    Not `getrusage`: a program inherits `ru_maxrss` from the process that started it, which may have been larger.
    """
    return _resident(_status())


def _resident(status: Mapping[str, str]) -> Resident:
    now, peak = (int(status.get(key, "0").split()[0]) * _KIB for key in ("VmRSS", "VmHWM"))
    return Resident(now, max(now, peak))


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
