"""Child processes that die with their parent, so that no worker survives its agent and no etcd its test.

`die_with_parent()` is for a process that can call it. Any other program is started through this file, `python -I -S
orphans.py PARENT_PID PROGRAM ARGS…`, which asks the kernel and then becomes the program: the request survives exec.
Linux only (PR_SET_PDEATHSIG); elsewhere both do nothing. The kernel watches the parent's *thread*: start such children
from a thread that lives as long as they should.

A function that runs in its own process is started as `BoundFunction(function)`.

`adopting()` makes this process the parent of descendants whose own parent ends (PR_SET_CHILD_SUBREAPER).
`keep_exit_codes()` has it hear how children end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def set_name(name: str) -> None:
    """Set this process's name in `ps` and /proc/PID/comm: at most 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of every descendant whose own parent ends meanwhile."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def keep_exit_codes() -> None:
    """Stop ignoring SIGCHLD, if whoever started this process did: the kernel would tell nobody how a child ended."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def bound_command(*command: str) -> list[str]:
    """Return the command line that runs `command` as a child that dies with this process."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]  # noqa: PTH100


class BoundFunction:
    """A function that dies with the process that started it with multiprocessing, by whatever start method.

    It can be pickled if the function can, and has its name.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.__qualname__ = function.__qualname__

    def __call__(self, *args: object) -> object:
        import multiprocessing  # here, because any program is started through this file, which has to be quick

        die_with_parent()
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            sys.exit(f"{self.__qualname__}: its parent process is gone, so it is not started")
        return self.function(*args)


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def _become(parent: int, command: list[str]) -> None:
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"{command[0]}: its parent process is gone, so it is not started")
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
