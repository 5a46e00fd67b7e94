"""Holes: samples that a run reports as unreadable, and their effect on exactly-once coverage.

Result and commits list them: ids [lo, hi), skipped from step `since` in `epoch` on, of which that epoch had already
applied `kept`. Exactly these samples, and no others, may be missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chaos.judge.evidence.applied import (
    Applied,
    counts_of,
    result_of,
    shape_of,
)
from chaos.judge.evidence.run_files import (
    Evidence,
    Line,
    items,
    whole,
)


@dataclass(frozen=True, slots=True)
class Hole:
    """The samples [lo, hi), skipped from step `since` on."""

    lo: int
    hi: int
    since: int
    epoch: int
    kept: tuple[tuple[int, int], ...]

    def missing(self, epoch: int) -> list[tuple[int, int]]:
        """Return the ids that a finished epoch lacks, as half-open ranges."""
        if epoch != self.epoch:
            return [(self.lo, self.hi)] if epoch > self.epoch else []
        edges = [self.lo, *(edge for pair in self.kept for edge in pair), self.hi]
        return [(lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True) if lo < hi]


def holes_of(claim: Line) -> list[Hole]:
    """Return the holes listed in a result or a commit's account."""
    return [_hole(hole) for hole in (items(claim, "holes") if "holes" in claim else [])]


def _hole(fields: object) -> Hole:
    assert isinstance(fields, dict), "a hole is a mapping"
    kept = tuple((int(pair[0]), int(pair[1])) for pair in items(fields, "kept") if isinstance(pair, list))
    lo, hi, since, epoch = (whole(fields, key) for key in ("lo", "hi", "since", "epoch"))
    return Hole(lo, hi, since, epoch, kept)


def left_out_of(line: Line) -> int:
    """Return how many positions of a step were skipped."""
    return whole(line, "num_left_out") if "num_left_out" in line else 0


def total_left_out(lineage: Sequence[Applied]) -> int:
    """Return how many positions the steps of a lineage skipped."""
    return sum(left_out_of(applied.lines[0]) for applied in lineage)


def num_missing(holes: Sequence[Hole], epochs: range) -> int:
    return sum(hi - lo for hole in holes for epoch in epochs for lo, hi in hole.missing(epoch))


def missing_times(holes: Sequence[Hole], epochs: range, rows: int) -> npt.NDArray[np.int64]:
    """Count in how many of these whole epochs each sample is missing; shape (rows,)."""
    times = np.zeros(rows, dtype=np.int64)
    for hole in holes:
        for epoch in epochs:
            for lo, hi in hole.missing(epoch):
                times[lo:hi] += 1
    return times


def coverage_counts(run: Evidence) -> tuple[int, int]:
    """Return the least and most applications of a sample per epoch outside holes, by witness or lineage."""
    shape = shape_of(run)
    is_counted = run.witness is not None and not result_of(run).get("skipped_steps")
    if is_counted and run.witness is not None and shape.is_at_epoch_end and run.witness.size == shape.rows:
        counts = run.witness + missing_times(holes_of(result_of(run)), shape.finished_epochs, shape.rows)
        return int(counts.min()) // shape.num_epochs, -(-int(counts.max()) // shape.num_epochs)
    places = counts_of(run)
    return min(int(count.min()) for count in places.values()), max(int(count.max()) for count in places.values())
