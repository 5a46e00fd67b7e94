"""Commits that no history records: their publisher died before it could write, or never knew that it had published.

One that lives on, in an hour in which nothing but kills happened, has written a line of every commit that it made.
"""

from __future__ import annotations

from chaos.judge.evidence.applied import formed_at
from chaos.judge.evidence.run_files import Evidence, Line, number, once, whole
from chaos.judge.evidence.spells import spells_of
from chaos.scenario.kinds import ends_processes, spares_others


def may_lack_a_line(run: Evidence, term: int, at: float) -> bool:
    """Say whether a term may have published a commit at a time without a line of it."""
    return term not in formed_at(run) or _last_of_rank_0(run).get(term, at) <= at or is_disturbed(run, at, at)


def is_disturbed(run: Evidence, since: float, until: float) -> bool:
    """Say whether an answer of the storage may have been lost in an interval: some fault did more than to end
    processes, or to affect one node alone."""
    spells = spells_of(run)
    lines: list[Line] = [
        line
        for line, begin, end in zip(spells.lines, spells.begins, spells.ends, strict=True)
        if begin <= until and end >= since
    ]
    return any(not ends_processes(line["kind"]) and not spares_others(line["kind"]) for line in lines)


@once
def _last_of_rank_0(run: Evidence) -> dict[int, float]:
    """Return when each term's rank 0 last wrote a line that comes after those of all earlier commits."""
    last: dict[int, float] = {}
    for line in [*run.of("commit"), *run.of("leave"), *run.of("end")]:
        if line.get("rank") == 0:
            last[whole(line, "term")] = max(last.get(whole(line, "term"), 0.0), number(line, "t"))
    return last
