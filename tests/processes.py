"""What /proc says of processes that a test has started, or that those have."""

from __future__ import annotations

from pathlib import Path


def parent_of(pid: int) -> int:
    """Return the process id of a live process's parent."""
    return int(_fields(pid)[1])


def name_of(pid: int) -> str:
    """Return a live process's own name, as `ps` shows it."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def is_running(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return _fields(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _fields(pid: int) -> list[str]:
    """Return the fields after the program's name: state, parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
