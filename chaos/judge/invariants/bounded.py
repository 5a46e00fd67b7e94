"""Invariant of long-lived processes: worlds leak no files, threads or memory in them.

An abandoned world may hold some until its peers time out, and the first ones create what later ones reuse. So the
resources at one of a process's first worlds are compared with the least in its last ones, among worlds of one size, as
a rank has connections to all others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from chaos.judge.evidence.run_files import Evidence, once, part, whole
from chaos.judge.findings import Unknown, Violated

LEAST_WORLDS, FIRST, LASTS = 8, 2, 3
"""Fewest worlds of one size needed to judge a process; index of the first one compared; number of last ones."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """Growth per world, and in total, above which it is a leak."""

    name: str
    each: float
    altogether: int


LIMITS = {
    "fds": Limit(
        "open files", 0.5, 64
    ),  # the first rank has the stores of worlds that ended seconds ago: 60 in a storm
    "threads": Limit("threads", 0.25, 16),
    "rss": Limit("bytes of memory", 0.5 * MIB, 256 * MIB),
}


def bounded(run: Evidence) -> str:
    """No process that outlives its worlds holds more files, threads or memory with each."""
    rows = rows_of(run)
    if not rows:
        raise Unknown(f"no process has been in {LEAST_WORLDS} worlds of one size")
    for (pid, size), held in rows.items():
        for what, limit in LIMITS.items():
            values = [one[what] for one in held[FIRST:]]
            grown = min(values[-LASTS:]) - values[0]
            if grown > limit.altogether and grown > limit.each * (len(values) - 1):
                raise Violated(
                    f"process {pid} held {values[0]} {limit.name} at the beginning and {values[0] + grown} after "
                    f"{len(values) - 1} more worlds of {size} ranks"
                )
    return f"{len(rows)} processes, in up to {max(map(len, rows.values()))} worlds of one size"


@once
def rows_of(run: Evidence) -> dict[tuple[int, int], list[dict[str, int]]]:
    """Return the resources of each process at its worlds of each size, where there are enough."""
    rows: dict[tuple[int, int], list[dict[str, int]]] = defaultdict(list)
    for line in run.of("form"):
        if line.get("holds") and not line.get("again"):
            holds = part(line, "holds")
            rows[whole(line, "pid"), whole(line, "world")].append({what: whole(holds, what) for what in LIMITS})
    return {who: held for who, held in rows.items() if len(held) >= LEAST_WORLDS}


def is_put_to_the_test(run: Evidence) -> bool:
    """Return True if some process was in enough worlds and recorded its resources."""
    try:
        return bool(rows_of(run))
    except (KeyError, TypeError, ValueError):
        return False
