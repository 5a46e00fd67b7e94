"""Steps whose update a run reports as skipped, because loss or gradient was not finite."""

from __future__ import annotations

import math

from chaos.judge.evidence.applied import Applied, lineage_of, result_of
from chaos.judge.evidence.run_files import Evidence, Line, items, number, whole


def skipped_steps(claim: Line) -> set[int]:
    """Return the steps without an update in a result or commit, counted from 1."""
    ranges = items(claim, "skipped_steps") if "skipped_steps" in claim else []
    return {step + 1 for pair in ranges if isinstance(pair, list) for step in range(pair[0], pair[1])}


def num_not_applied(run: Evidence) -> int:
    """Count the samples of lineage steps whose update was skipped, by the result."""
    skipped = skipped_steps(result_of(run))
    return sum(whole(one.lines[0], "num_samples") for one in lineage_of(run) if one.step in skipped) if skipped else 0


def is_empty(applied: Applied) -> bool:
    """Return True if a step had no sample, all being in unreadable row groups: its loss is None."""
    lines = applied.lines
    return bool(lines) and all(line.get("num_samples") == 0 and line.get("loss") is None for line in lines)


def is_finite(run: Evidence, applied: Applied) -> bool:
    """Return True if a step's loss and gradient were finite, by its ranks' records."""
    losses = [number(line, "loss") for line in applied.lines]
    said = [line for line in run.in_term("nonfinite", applied.term) if line["step"] == applied.step]
    return all(map(math.isfinite, (*losses, *(float(str(line[key])) for line in said for key in ("loss", "norm")))))
