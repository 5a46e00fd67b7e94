"""The observed process's side: start the observer, and send signs of life."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys

from elastic_train.system.hang_observer import program
from rendezvous.orphans import bound_command

DUMP_SIGNAL = signal.SIGRTMAX
ENDS_WITHIN_S = 1.0


class Observer:
    """A process that ends this one if `alive` is not called for too long; raise OSError if it cannot be started.

    It ends with this process, even a stopped one, or on `close`.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            bound_command(sys.executable, "-I", "-S", program.__file__, str(os.getpid()), str(_dump_at_a_signal())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        assert self._process.stdin is not None, "it was asked for"
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    def alive(self, limit_s: float) -> None:
        """Send a sign of life, with the most seconds until the next one."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the observer is stopped, or was killed
            os.write(self._pipe, f"{limit_s:.3f}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)


def _dump_at_a_signal() -> int:
    """Let a signal write all threads' stacks to stderr, and return its number; 0 if there is no stderr."""
    try:
        faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)
    except (ValueError, OSError, AttributeError, RuntimeError):
        return 0
    return int(DUMP_SIGNAL)
