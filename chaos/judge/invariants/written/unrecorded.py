"""Commits that no history records: their publisher died first, or never learned that it had published.

A publisher that lives on, in an hour with no faults but kills, has written a line for every commit that it made.
"""

from __future__ import annotations

from chaos.judge.evidence.applied import formed_at
from chaos.judge.evidence.run_files import Evidence, Line, number, once, whole
from chaos.judge.evidence.spells import spells_of
from chaos.scenario.kinds import ends_processes, spares_others


def may_lack_a_line(run: Evidence, term: int, at: float) -> bool:
    """Return True if a term may have published a commit at this time without a line of it."""
    return term not in formed_at(run) or _last_of_rank_0(run).get(term, at) <= at or is_disturbed(run, at, at)


def is_disturbed(run: Evidence, since: float, until: float) -> bool:
    """Return True if a storage answer may have been lost in an interval: some fault did more than end processes or
    affect one node."""
    spells = spells_of(run)
    lines: list[Line] = [
        line
        for line, begin, end in zip(spells.lines, spells.begins, spells.ends, strict=True)
        if begin <= until and end >= since
    ]
    return any(not ends_processes(line["kind"]) and not spares_others(line["kind"]) for line in lines)


@once
def _last_of_rank_0(run: Evidence) -> dict[int, float]:
    """Return when each term's rank 0 last wrote a line that follows those of all earlier commits."""
    last: dict[int, float] = {}
    for line in [*run.of("commit"), *run.of("leave"), *run.of("end")]:
        if line.get("rank") == 0:
            last[whole(line, "term")] = max(last.get(whole(line, "term"), 0.0), number(line, "t"))
    return last
