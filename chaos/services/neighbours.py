"""Competing programs on a node's machine, which use up CPU time or memory that the training processes need.

They do nothing else, and end with the process that started them, however it ends. Their effect is read from the kernel:
how long other processes waited for a core, and how much memory is free.
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
"""Wait for a core, in seconds and as a share of the time, above which a process counts as slowed by the programs."""
_PART, _MOST_BYTES = 4, 1 << 30
"""The memory program takes a fourth of the free memory, up to 1 GiB."""
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
    """Start a program in its own session: Linux may share cores between sessions instead of processes."""
    command = [sys.executable, "-I", "-S", "-c", program, *arguments]
    return subprocess.Popen(command, env={}, stdin=subprocess.DEVNULL, start_new_session=True)


class Crowd:
    """Busy programs on one core, and the processes that are confined to that core meanwhile."""

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
        """Return a proof that a process waited for its core for a notable share of the time; None if none has."""
        passed_s = time.monotonic() - self._began
        for pid, before_s in self._waited_s.items():
            spent_s = waited_s(pid) - before_s
            if spent_s > max(_LEAST_WAITED_S, _LEAST_SHARE * passed_s):
                return f"the threads of process {pid} waited {spent_s:.2f} s for a core within {passed_s:.2f} s"
        return None

    def leave(self) -> None:
        """End the programs and restore the processes' cores, also for threads started meanwhile."""
        _end(self._programs)
        for pid in self._waited_s:
            usual = self._cores.get(pid, set(range(os.cpu_count() or 1)))
            for task in _tasks(pid):
                _confine(task, self._cores.get(task, usual))


class Hungry:
    """A program that allocates part of the machine's free memory and keeps rewriting it."""

    def __init__(self) -> None:
        self._free = free_bytes()
        self.num_bytes = min(_MOST_BYTES, self._free // _PART)
        self._program = _begun(_HUNGRY, str(self.num_bytes))
        self._proof: str | None = None

    def has_bitten(self) -> str | None:
        """Return a proof that the program holds its memory; None before. Once found, the proof remains."""
        held = _resident_bytes(self._program.pid)
        if held >= self.num_bytes:
            free = f"{self._free / 1e6:.0f} MB that were free"
            self._proof = f"process {self._program.pid} holds {held / 1e6:.0f} MB, of {free}"
        return self._proof

    @property
    def is_there(self) -> bool:
        return self._program.poll() is None

    def leave(self) -> None:
        _end([self._program])


def waited_s(pid: int) -> float:
    """Return how long a process's threads were runnable without a core, in seconds; 0 if it has ended."""
    total_ns = 0
    for task in _tasks(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or the kernel does not count
            total_ns += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1])
    return total_ns / 1e9


def free_bytes() -> int:
    """Return the memory in bytes that the kernel can allocate without reclaiming it from other processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _tasks(pid: int) -> list[int]:
    """Return the thread ids of a process, including its own; empty if it has ended."""
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
