"""Determine which samples a script has applied: each row's count per epoch, over the steps behind its end.

Only steps of the lineage count: steps that a later world did not continue are not in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.applied import Applied, lineage_of
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    whole,
)
from chaos.judge.findings import Unknown, Violated

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tally:
    """An epoch's rows that were applied more than once, or not at all."""

    epoch: int
    num_repeated: int
    num_skipped: int

    def __str__(self) -> str:
        return f"{self.num_repeated} rows repeated, {self.num_skipped} skipped"


def is_script(run: Evidence) -> bool:
    """Return True if a run is of a user's script, observed from outside."""
    return run.has("script")


def logs_ids(run: Evidence) -> bool:
    return run.has("step")


def kept_steps(run: Evidence) -> list[Applied]:
    """Return the lineage; raise Unknown if the script has no hook, or resumed from before the run."""
    if not logs_ids(run):
        raise Unknown("the script logs no steps; three lines make it: see chaos.hook")
    first = min((line for line in run.of("restore")), key=lambda line: whole(line, "term"))
    if whole(first, "step"):
        began = f"the run began at step {whole(first, 'step') + 1}, with the snapshot of an older one"
        raise Unknown(f"{began}: have the script keep its files in {{dir}}")
    return lineage_of(run)


def counts_of(run: Evidence) -> dict[int, Counts]:
    """Count how often each row was applied, for every epoch of the lineage; arrays of shape (rows,)."""
    counts: dict[int, Counts] = {}
    for line in _kept_lines(run):
        epoch, rows, of = whole(line, "epoch"), rows_of(line), whole(line, "of")
        if rows and not 0 <= min(rows) <= max(rows) < of:
            wrong = next(row for row in rows if not 0 <= row < of)
            raise Violated(f"step {line['step']} applied row {wrong} of a dataset that has {of}")
        np.add.at(counts.setdefault(epoch, np.zeros(of, np.int64)), rows, 1)
    return dict(sorted(counts.items()))


def tallies_of(run: Evidence) -> dict[int, Tally]:
    return {
        epoch: Tally(epoch, int((times > 1).sum()), int((times == 0).sum())) for epoch, times in counts_of(run).items()
    }


def where_applied(run: Evidence, epoch: int, row: int) -> str:
    """Return the steps in which a row of an epoch was applied, in words."""
    steps = [
        f"step {line['step']} (term {line['term']}, rank {line['rank']})"
        for line in _kept_lines(run)
        if line["epoch"] == epoch
        for applied in rows_of(line)
        if applied == row
    ]
    return " and ".join(steps) if steps else "no step"


def unreported(run: Evidence) -> str | None:
    """Describe the first step of the lineage that some of its ranks did not report; None if there is none."""
    for applied in kept_steps(run):
        world = whole(applied.lines[0], "world") if applied.lines else 0
        if len(applied.lines) != world or not world:
            where = f"step {applied.step} of term {applied.term} was reported by {len(applied.lines)} of {world} ranks"
            return f"{where}: a rank died before its line, or the script does not call the hook in every step"
    return None


def rows_of(line: Line) -> list[int]:
    rows = items(line, "ids")
    if not all(isinstance(row, int) for row in rows):
        raise TypeError(f"ids of step {line['step']} are not integers")
    return [row for row in rows if isinstance(row, int)]


def _kept_lines(run: Evidence) -> Iterator[Line]:
    for applied in kept_steps(run):
        yield from applied.lines
