"""Other programs on a node's machine: they take its core, or its memory, from those who train there.

They do nothing else, and end with the process that started them, whatever ends that. What they take is seen in the
kernel's own figures: how long others waited for a core, and how much memory is left.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_LEAST_WAITED_S, _LEAST_SHARE = 0.1, 0.05
"""Who shares its core waits for it for longer than any busy machine makes a process wait now and then."""
_PART, _MOST_BYTES = 4, 1 << 30
"""A program that is hungry takes a fourth of what is free, and no more than a gigabyte."""
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
_HUNGRY = """
import ctypes, os, sys
parent, size, value = os.getppid(), int(sys.argv[1]), 0
held = ctypes.create_string_buffer(size)
while os.getppid() == parent:
    value = (value + 1) % 256
    ctypes.memset(held, value, size)
"""


def _begun(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own: Linux may share cores out among sessions, not among processes."""
    command = [sys.executable, "-I", "-S", "-c", program, *arguments]
    return subprocess.Popen(command, env={}, stdin=subprocess.DEVNULL, start_new_session=True)


class Crowd:
    """Busy programs on one core, and processes that may use no other while they are there."""

    def __init__(self, pids: Sequence[int], num_programs: int) -> None:
        self._waited_s = {pid: waited_s(pid) for pid in pids}
        self._cores = {task: cores for pid in pids for task in _tasks(pid) if (cores := _cores(task))}
        core = {min(set.intersection(*self._cores.values()) or os.sched_getaffinity(0))} if self._cores else set()
        for task in self._cores:
            _confine(task, core)
        self._began = time.monotonic()
        self._programs = [_begun(_BUSY) for _ in range(num_programs)]
        for program in self._programs:
            _confine(program.pid, core)

    def has_bitten(self) -> str | None:
        """See that a process waited for its core for a good part of the time."""
        passed_s = time.monotonic() - self._began
        for pid, before_s in self._waited_s.items():
            spent_s = waited_s(pid) - before_s
            if spent_s > max(_LEAST_WAITED_S, _LEAST_SHARE * passed_s):
                return f"the threads of process {pid} waited {spent_s:.2f} s for a core within {passed_s:.2f} s"
        return None

    def leave(self) -> None:
        """End the programs, and give the processes their cores back, with the threads that they have begun since."""
        _end(self._programs)
        for pid in self._waited_s:
            usual = self._cores.get(pid, set(range(os.cpu_count() or 1)))
            for task in _tasks(pid):
                _confine(task, self._cores.get(task, usual))


class Hungry:
    """A program that takes a part of the machine's free memory and writes to all of it, over and over."""

    def __init__(self) -> None:
        self._free = free_bytes()
        self.num_bytes = min(_MOST_BYTES, self._free // _PART)
        self._program = _begun(_HUNGRY, str(self.num_bytes))
        self._proof: str | None = None

    def has_bitten(self) -> str | None:
        """See that the program holds its memory; once it did, it has bitten."""
        held = _resident_bytes(self._program.pid)
        if held >= self.num_bytes:
            free = f"{self._free / 1e6:.0f} MB that were free"
            self._proof = f"process {self._program.pid} holds {held / 1e6:.0f} MB, of {free}"
        return self._proof

    @property
    def is_there(self) -> bool:
        return self._program.poll() is None

    def leave(self) -> None:
        """End the program."""
        _end([self._program])


def waited_s(pid: int) -> float:
    """Return how long the threads of a process were ready to run and had no core; 0 of one that has ended."""
    total_ns = 0
    for task in _tasks(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
            total_ns += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
    return total_ns / 1e9


def free_bytes() -> int:
    """Return how much memory the kernel has to give without taking it from anybody."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _tasks(pid: int) -> list[int]:
    """Return the threads of a process, itself among them; none if it has ended."""
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return []


def _cores(task: int) -> set[int]:
    with contextlib.suppress(ProcessLookupError):
        return os.sched_getaffinity(task)
    return set()


def _confine(task: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(task, cores)


def _end(programs: Sequence[subprocess.Popen[bytes]]) -> None:
    for program in programs:
        program.kill()
    for program in programs:
        program.wait()
