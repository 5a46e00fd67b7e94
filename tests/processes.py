"""What /proc says of processes that a test has started, or that those have."""

from __future__ import annotations

import contextlib
from pathlib import Path


def parent_of(pid: int) -> int:
    """Return the process id of a live process's parent."""
    return int(_fields(pid)[1])


def is_running(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return _fields(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_lines_below(pid: int) -> list[str]:
    """Return the command lines of a process's children, and of theirs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ancestors = [parent_of(int(process.name))]
            while ancestors[-1] not in (0, pid):
                ancestors.append(parent_of(ancestors[-1]))
            if ancestors[-1] == pid:
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def _fields(pid: int) -> list[str]:
    """Return the fields after the program's name: state, parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
