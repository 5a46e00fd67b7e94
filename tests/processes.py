"""What the process table says of processes that a test has started, or that those have."""

from __future__ import annotations

from rendezvous.process_table import stat_of


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; ProcessLookupError if the process is gone."""
    if (stat := stat_of(pid)) is None:
        raise ProcessLookupError(pid)
    return stat.parent
