"""Read the process table about processes that a test has started, and their children."""

from __future__ import annotations

from pathlib import Path

from rendezvous.process_table import stat_of


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; ProcessLookupError if the process is gone."""
    if (stat := stat_of(pid)) is None:
        raise ProcessLookupError(pid)
    return stat.parent


def command_line_of(pid: int) -> list[str]:
    """Return a process's program and arguments; empty if it is gone."""
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [word.decode(errors="replace") for word in content.split(b"\0")[:-1]]
