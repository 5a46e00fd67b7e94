"""The totals of the lanes and ranks of one step, equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from elastic_train.core.coverage import CoverageSums
from elastic_train.insight.phases import RankFacts, facts_of
from elastic_train.parallel.step_tables import Row, StepTables, tree_sum
from elastic_train.tasks.task import mean_loss

_WORD = 1 << 64
_OF_SOURCES = 4 + len(RankFacts._fields)
"""Index of the sums of sources in a rank's row: after its coverage, flags and clock values."""
LEAVE, COMMIT, GROW, BUSY, GIVE_UP, UNREADABLE, BUFFERS, UNABLE, ABLE, STOP = (1 << bit for bit in range(10))
"""Flags in the table of ranks."""


@dataclass(frozen=True, slots=True)
class LaneSums:
    """Results of one lane's forward pass: loss sum, weight (NaN: do not divide), and checksum of integer buffers."""

    loss: float = 0.0
    weight: float = 0.0
    buffers: int = 0


@dataclass(frozen=True, slots=True)
class StepSums:
    """The totals of the lanes and ranks of one step, equal on every rank."""

    loss: float
    weight: float
    coverage: CoverageSums
    num_left_out: int
    num_truncated: int
    any_flags: int
    all_flags: int
    buffers: tuple[int, ...] = ()
    """Checksums of integer buffers, of the lanes with samples."""
    ranks: tuple[RankFacts, ...] = ()
    nonfinite_lanes: tuple[int, ...] = ()
    """Lanes whose loss is NaN or infinite."""
    sources: tuple[CoverageSums, ...] = ()
    """Sums of each source of a mixture, over its own ids."""

    @property
    def is_unreadable(self) -> bool:
        """True if a rank could not read a sample of the step, which then must not be applied."""
        return bool(self.any_flags & UNREADABLE)

    @property
    def divisor(self) -> float:
        return 1.0 if math.isnan(self.weight) else self.weight or 1.0

    @property
    def mean(self) -> float | None:
        """The step's loss, None if no sample has a target."""
        return mean_loss(self.loss, self.weight)


def fold(tables: StepTables) -> StepSums:
    """Add the lanes' rows, floats along the tree and integers in any order, and the ranks' coverage."""
    losses, weights, *integers = zip(*tables.lanes, strict=True)
    num_left_out, num_truncated, has_samples, buffers = ([int(value) for value in column] for column in integers)
    *coverage, flags = ([int(row[column]) for row in tables.ranks] for column in range(4))
    count, sum_a, sum_b = (sum(column) for column in coverage)
    return StepSums(
        tree_sum([float(loss) for loss in losses]),
        tree_sum([float(weight) for weight in weights]),
        CoverageSums(count, sum_a % _WORD, sum_b % _WORD),
        sum(num_left_out),
        sum(num_truncated),
        reduce(or_, flags),
        reduce(and_, flags),
        tuple(digest for digest, has in zip(buffers, has_samples, strict=True) if has),
        tuple(facts_of(row[4:_OF_SOURCES]) for row in tables.ranks),
        tuple(lane for lane, loss in enumerate(losses) if not math.isfinite(loss)),
        _sources_of([row[_OF_SOURCES:] for row in tables.ranks]),
    )


def _sources_of(rows: Sequence[Row]) -> tuple[CoverageSums, ...]:
    """Add the ranks' sums of each source: three numbers per source."""
    total = [sum(int(value) for value in column) for column in zip(*rows, strict=True)]
    return tuple(
        CoverageSums(total[at], total[at + 1] % _WORD, total[at + 2] % _WORD) for at in range(0, len(total), 3)
    )
