"""The side of the observed process: it starts the observer, and gives signs of life."""

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
    """A process that ends this one if `alive` is not called for too long; OSError if it cannot be started.

    It ends with this process, even while it is stopped, or with `close`.
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
        """Give a sign of life, and say for how many seconds there may be none from now on."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is stopped, or was killed
            os.write(self._pipe, f"{limit_s:.3f}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_WITHIN_S)


def _dump_at_a_signal() -> int:
    """Have the signal write all threads' stacks to stderr, and return it; 0 if there is nowhere to write to."""
    try:
        faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=False)
    except (ValueError, OSError, AttributeError, RuntimeError):
        return 0
    return int(DUMP_SIGNAL)
