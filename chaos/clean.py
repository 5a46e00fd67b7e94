"""Invariant of what a job leaves behind: no process, no lease, no draft of a file, no shared memory.

The executor looked once everything had ended (`left_behind`); a look that was not made is not claimed.
"""

from __future__ import annotations

from chaos.evidence import Evidence, Line, items, number
from chaos.findings import Unknown, Violated

_LAST_WRITE_S = 5.0
"""A process that a fault ends or stops may leave the file that it was at: one written so shortly before."""


def cleanliness(run: Evidence) -> str:
    """No process, lease, draft of a file, or shared memory of the job outlived it."""
    ends = run.of("clean")
    if not ends:
        raise Unknown("nobody looked for what outlived the job")
    looked = ends[-1]
    found = [check(run, looked) for name, check in _CHECKS.items() if looked.get(name) is not None]
    return f"no {', '.join(found)} outlived the job"


def _orphans(run: Evidence, looked: Line) -> str:
    orphans = items(looked, "orphans")
    if orphans:
        raise Violated(f"processes {orphans} outlived the job")
    return "process"


def _leases(run: Evidence, looked: Line) -> str:
    leases = items(looked, "leases")
    if leases:
        raise Violated(f"{leases[0]} outlived the job and the time to live of its lease")
    return "lease"


def _drafts(run: Evidence, looked: Line) -> str:
    """Drafts of files that nobody finished, unless a fault came upon their writer."""
    times = [number(fault, "t") for fault in run.of("fault")]
    for draft in items(looked, "drafts"):
        assert isinstance(draft, list), "a pair of path and time"
        path, written_at = str(draft[0]), float(str(draft[1]))
        if not any(written_at - 1.0 <= at <= written_at + _LAST_WRITE_S for at in times):
            raise Violated(f"{path} was left unfinished, and no fault came upon whoever wrote it")
    return "draft"


def _shared_memory(run: Evidence, looked: Line) -> str:
    segments = items(looked, "shared_memory")
    if segments:
        raise Violated(f"shared memory {segments[0]} outlived the job")
    return "shared memory"


_CHECKS = {"orphans": _orphans, "leases": _leases, "drafts": _drafts, "shared_memory": _shared_memory}
