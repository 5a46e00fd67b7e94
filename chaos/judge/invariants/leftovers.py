"""Invariant of leftovers: no process, lease, draft of a file or shared memory outlives a job.

The executor looked once after everything had ended (`left_behind`): null is what it could not see; a missing field is
something that cannot be left (a simulation has no shared memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    number,
)
from chaos.judge.findings import Unknown, Violated

_LAST_WRITE_S = 5.0
"""A process that a fault ends may leave the file that it was writing up to this long before."""


def cleanliness(run: Evidence) -> str:
    """No process, lease, draft of a file, or shared memory of the job outlived it."""
    ends = run.of("clean")
    if not ends:
        raise Unknown("it was not checked what outlived the job")
    found = list[str]()
    for looked in ends:
        for name, (what, check) in _CHECKS.items():
            if name in looked:
                if looked[name] is None:
                    raise Unknown(f"whether any {what} outlived the job could not be seen")
                check(run, looked)
                found += [what] if what not in found else []
    if not found:
        raise Unknown("it was not checked what outlived the job")
    return f"no {', '.join(found)} outlived the job"


def _absent(name: str, message: str) -> Callable[[Evidence, Line], None]:
    """Return a check that a list is empty; `message` is filled with its first entry, or all."""

    def check(run: Evidence, looked: Line) -> None:
        if left := items(looked, name):
            raise Violated(message.format(first=left[0], all=left))

    return check


def _drafts(run: Evidence, looked: Line) -> None:
    """Unfinished drafts of files, unless a fault hit their writer."""
    times = [number(fault, "t") for fault in run.of("fault")]
    for draft in items(looked, "drafts"):
        assert isinstance(draft, list), "a pair of path and time"
        path, written_at = str(draft[0]), float(str(draft[1]))
        if not any(written_at - 1.0 <= at <= written_at + _LAST_WRITE_S for at in times):
            raise Violated(f"{path} was left unfinished, and no fault hit the process that wrote it")


_CHECKS: Mapping[str, tuple[str, Callable[[Evidence, Line], None]]] = {
    "orphans": ("process", _absent("orphans", "processes {all} outlived the job")),
    "leases": ("lease", _absent("leases", "{first} outlived the job and the time to live of its lease")),
    "drafts": ("draft", _drafts),
    "shared_memory": ("shared memory", _absent("shared_memory", "shared memory {first} outlived the job")),
}
