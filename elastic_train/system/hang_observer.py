"""End the process that started this one if it is silent for too long although it could run.

Run as a program, with only the standard library: `python -I -S hang_observer.py PARENT SIGNAL`. Each line of standard
input is a sign of life, with the most seconds until the next. Silence is counted in small steps, and not while the
parent is stopped. If this process is stopped as well, as in a job suspended by its scheduler, the step counts with its
usual length: a job resumed after an hour continues where it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

STEP_S = 1.0
MOST_STEP_S = 2.0
"""Most seconds that a step counts: if more passed, this process did not run."""
DUMPS_WITHIN_S = 2.0
MOST_BYTES = 1 << 16
"""Size of a pipe: everything written meanwhile is read at once."""


def watch(parent: int, dump: int) -> None:
    """Count silence until it is too long, or the parent has ended or closed the pipe."""
    silent_s, limit_s = 0.0, float("inf")
    while os.getppid() == parent:
        began = time.monotonic()
        if select.select([0], [], [], STEP_S)[0]:
            said = os.read(0, MOST_BYTES).split()
            if not said:
                return
            silent_s, limit_s = 0.0, float(said[-1])
        elif not _is_stopped(parent):
            silent_s += min(MOST_STEP_S, time.monotonic() - began)
        if silent_s > limit_s:
            _end(parent, dump, silent_s)
            return


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib takes longer than all else to import
            return file.read().rpartition(b")")[2].split()[0] in b"Tt"
    except OSError:
        return False  # it has ended


def _end(pid: int, dump: int, silent_s: float) -> None:
    """Let a process write its stacks, if it still can, and kill it."""
    with contextlib.suppress(OSError):  # stderr is closed
        sys.stderr.write(
            f"error: no thread of process {pid} could run for {silent_s:.0f} s: native code hangs that holds the "
            "interpreter's lock; the process is ended; the stacks of its threads:\n"
        )
        sys.stderr.flush()
    if dump:
        os.kill(pid, dump)
        time.sleep(DUMPS_WITHIN_S)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # requests to leave are not for this process
    watch(int(sys.argv[1]), int(sys.argv[2]))
