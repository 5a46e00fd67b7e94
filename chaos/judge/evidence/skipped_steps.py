"""Steps whose update a run says that it left out, because the loss or the gradient was not finite."""

from __future__ import annotations

import math

from chaos.judge.evidence.applied import Applied, lineage_of, result_of
from chaos.judge.evidence.run_files import Evidence, Line, items, number, whole


def skipped_steps(claim: Line) -> set[int]:
    """Return the steps that a result, or a commit, says were applied without their update; counted from 1."""
    ranges = items(claim, "skipped_steps") if "skipped_steps" in claim else []
    return {step + 1 for pair in ranges if isinstance(pair, list) for step in range(pair[0], pair[1])}


def num_not_applied(run: Evidence) -> int:
    """Count the samples of the lineage's steps whose update the result says was left out."""
    skipped = skipped_steps(result_of(run))
    return sum(whole(one.lines[0], "num_samples") for one in lineage_of(run) if one.step in skipped) if skipped else 0


def is_empty(applied: Applied) -> bool:
    """Say whether a step had no sample, as all of them lie in row groups that cannot be read: its loss is no number."""
    lines = applied.lines
    return bool(lines) and all(line.get("num_samples") == 0 and line.get("loss") is None for line in lines)


def is_finite(run: Evidence, applied: Applied) -> bool:
    """Say whether a step's loss and gradient were finite, as the ranks that applied it wrote down."""
    losses = [number(line, "loss") for line in applied.lines]
    said = [line for line in run.in_term("nonfinite", applied.term) if line["step"] == applied.step]
    return all(map(math.isfinite, (*losses, *(float(str(line[key])) for line in said for key in ("loss", "norm")))))
