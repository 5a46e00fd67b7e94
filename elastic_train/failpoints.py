"""Named places at which a fault can be planted while a job runs: one line each in the code, and nothing unless armed.

ELASTIC_FAILPOINTS names a folder that all processes of a job share. Whoever writes a file there, named after a place
and holding a kind, arms it: the first process that comes to the place takes the file away (it is renamed to
<place>.<pid>), and the fault happens there.

Kinds: kill (SIGKILL), stop (SIGSTOP), raise (RuntimeError), hang (in Python), hang-native (holding the interpreter's
lock, so that no other thread of the process runs).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

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
    "record",
    "publish",
    "form",
    "restore",
    "hand-over",
)
KINDS = ("kill", "stop", "raise", "hang", "hang-native")
VARIABLE = "ELASTIC_FAILPOINTS"
_FOR_EVER_S = 1_000_000

_folder = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def reach(name: str) -> None:
    """Say that this process has come to a place."""
    if _folder is not None:
        _look(_folder, name)


def arm(folder: Path, name: str, kind: str) -> None:
    """Let the next process that comes to a place have a fault."""
    assert name in POINTS and kind in KINDS, f"no {kind} at '{name}'; there are {KINDS} at {POINTS}"
    (folder / f"{name}.new").write_text(kind)
    (folder / f"{name}.new").rename(folder / name)


def _look(folder: Path, name: str) -> None:
    assert name in POINTS, f"'{name}' is in no list"
    taken = folder / f"{name}.{os.getpid()}"
    try:
        (folder / name).rename(taken)
    except FileNotFoundError:
        return
    kind = taken.read_text()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raise":
        raise RuntimeError(f"planted at {name}")
    elif kind == "hang":
        time.sleep(_FOR_EVER_S)
    else:
        ctypes.PyDLL(None).sleep(_FOR_EVER_S)
