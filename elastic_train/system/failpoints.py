"""Failpoints: named places at which a fault can be planted while a job runs; one line of code each, no effect unless
armed.

ELASTIC_FAILPOINTS names a folder shared by the processes of a job or node. A file named after a place, with a kind as
content, arms it: at the n-th arrival of any process, or of the named one, the file is renamed to <place>.<pid>, and the
fault happens.

Kinds: kill (SIGKILL), stop (SIGSTOP), raise (RuntimeError), hang (in Python), hang-native (holding the interpreter's
lock, so that no other thread runs), slow (a second), full and eio (the operating system's errors), oom (torch's error
of a device without memory, a RuntimeError as for a lost peer).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

POINTS = (
    "data",
    "forward",
    "backward",
    "reduce",
    "exchange",
    "apply",
    "applied",
    "validate",
    "commit",
    "write",
    "sync",
    "record",
    "publish",
    "form",
    "restore",
    "hand-over",
)
KINDS = ("kill", "stop", "raise", "hang", "hang-native", "slow", "full", "eio", "oom")
VARIABLE = "ELASTIC_FAILPOINTS"
_FOR_EVER_S = 1_000_000
_SLOW_S = 1.0
_MORE_THAN_ANY_BYTES = 1 << 50

_UNREAD = Path()
_folder: Path | None = _UNREAD


def reach(name: str) -> None:
    """Mark a place: trigger the fault armed here, if any."""
    if _folder is not None:
        _look(_folder, name)


def _forget() -> None:
    """Reset the cached environment: a fork may get another one before it becomes a worker."""
    global _folder
    _folder = _UNREAD


os.register_at_fork(after_in_child=_forget)


def arm(folder: Path, name: str, kind: str, nth: int = 1, only: int | None = None) -> None:
    """Plant a fault for the n-th arrival at a place, from 1; with `only`, of the process with that pid."""
    assert name in POINTS and kind in KINDS, f"no {kind} at '{name}'; there are {KINDS} at {POINTS}"
    (folder / f"{name}.new").write_text(f"{kind} {nth}" if only is None else f"{kind} {nth} {only}")
    (folder / f"{name}.new").rename(folder / name)


def disarm(folder: Path, name: str) -> bool:
    """Remove a fault that has not happened; return True if there was one."""
    try:
        (folder / name).unlink()
    except FileNotFoundError:
        return False
    return True


def _look(folder: Path, name: str) -> None:
    global _folder
    if folder is _UNREAD:
        _folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
        reach(name)
        return
    assert name in POINTS, f"'{name}' is not in POINTS"
    kind = _take(folder, name)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raise":
        raise RuntimeError(f"planted at {name}")
    elif kind == "hang":
        time.sleep(_FOR_EVER_S)
    elif kind == "hang-native":
        ctypes.PyDLL(None).sleep(_FOR_EVER_S)
    elif kind == "slow":
        time.sleep(_SLOW_S)
    elif kind == "oom":
        _run_out_of_memory(name)
    elif kind is not None:
        raise OSError({"full": errno.ENOSPC, "eio": errno.EIO}[kind], f"planted at {name}")


def _run_out_of_memory(name: str) -> NoReturn:
    import torch  # already imported by whoever gets here

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # the allocator's own error, after it has given back what it keeps
        torch.empty(_MORE_THAN_ANY_BYTES, dtype=torch.uint8, device="cuda")
    raise torch.OutOfMemoryError(f"planted at {name}")


def _take(folder: Path, name: str) -> str | None:
    """Return the kind of a due fault and disarm it; before that, count down and return None."""
    try:
        descriptor = os.open(folder / name, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        kind, left, *only = os.pread(descriptor, 64, 0).decode().split()
        if only and int(only[0]) != os.getpid():
            return None
        if int(left) == 1:
            (folder / name).rename(folder / f"{name}.{os.getpid()}")
        content = " ".join([kind, str(int(left) - 1), *only]).encode()
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        return kind if int(left) == 1 else None
    except FileNotFoundError:  # another process took it after the open
        return None
    finally:
        os.close(descriptor)
