"""Set what /proc shows as the environment of a fork.

/proc shows the memory of the variables with which the program was started; a fork has a copy, whatever its environment
has become. A value written there is what others read, also for forks of this process.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from rendezvous.process_table import environ_of

_BEGINS = 47
"""Index of the environment's address in /proc/PID/stat after the program's name."""


def show(name: str, value: str) -> None:
    """Make /proc show another value of a variable with which this process, or the one it was forked from, started.

    Raise ValueError if the variable is missing, or its first value was shorter.
    """
    before, room = environ_of(os.getpid()).get(name, ""), value.encode()
    if len(room) > len(before.encode()):
        raise ValueError(f"there is no room for {name}={value} in what this process was started with: '{before}'")
    shown = b"\0" + Path("/proc/self/environ").read_bytes()
    place = shown.index(f"\0{name}=".encode()) + len(name) + 1
    stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ctypes.memmove(int(stat[_BEGINS]) + place, room.ljust(len(before.encode()), b"\0"), len(before.encode()))
