"""What /proc shows as the environment of a fork.

It is the memory in which the program that was started found its variables; a fork has a copy, whatever environment it
has been given since. A value that is written there is what others find, also in whatever is forked from here.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from rendezvous.process_table import environ_of

_BEGINS = 47
"""The place of the environment's address in /proc/PID/stat after the program's name."""


def show(name: str, value: str) -> None:
    """Let /proc show another value of a variable that this process, or what it was forked from, was started with.

    Raises ValueError if the variable is not there, or its first value was shorter.
    """
    before, room = environ_of(os.getpid()).get(name, ""), value.encode()
    if len(room) > len(before.encode()):
        raise ValueError(f"there is no room for {name}={value} in what this process was started with: '{before}'")
    shown = b"\0" + Path("/proc/self/environ").read_bytes()
    place = shown.index(f"\0{name}=".encode()) + len(name) + 1
    stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ctypes.memmove(int(stat[_BEGINS]) + place, room.ljust(len(before.encode()), b"\0"), len(before.encode()))
