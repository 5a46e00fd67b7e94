"""What /proc says of processes that a test has started, or that those have."""

from __future__ import annotations

from rendezvous.process_table import command_of, is_alive, pids, stat_of

is_running = is_alive


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; ProcessLookupError if the process is gone."""
    if (stat := stat_of(pid)) is None:
        raise ProcessLookupError(pid)
    return stat.parent


def command_lines_below(pid: int) -> list[str]:
    """Return the command lines of a process's children, and of theirs."""
    return [" ".join(command_of(child)) for child in pids() if _is_below(child, pid)]


def _is_below(pid: int, ancestor: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and (stat.parent == ancestor or _is_below(stat.parent, ancestor))
