"""The account of a mixture's samples: coverage sums for each source, and their expected values.

A source's sums are over its own ids, so that one pass adds what its manifest says; they are never reset. A source's
epoch ends at slightly different positions in each lane. So its sums are compared with the closed form of all whole
passes, plus the samples that some lanes have applied beyond those, which follow from the order, minus what holes have
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastic_train.core.accounting import Hole
from elastic_train.core.arrays import Int64s, group_of
from elastic_train.core.coverage import CoverageSums
from elastic_train.core.mixture.dealing import Mixture
from elastic_train.core.order import Cursor
from elastic_train.errors import CoverageError


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A commit's record of a source: its samples, their share of positions, and the sums of those applied."""

    name: str
    share: int
    num_samples: int
    manifest_digest: str
    coverage: CoverageSums


def sums_of_sources(ids: Int64s, first_id: Int64s) -> tuple[CoverageSums, ...]:
    """Return each source's sums over its samples among `ids`, which are numbered through all sources."""
    numbers = group_of(first_id, ids)
    own = ids - first_id.take(numbers)
    return tuple(CoverageSums.of_ids(np.compress(numbers == number, own)) for number in range(len(first_id)))


def expected_sums_of(
    order: Mixture, number: int, whole: CoverageSums, place: int, holes: Sequence[Hole]
) -> CoverageSums:
    """Return a source's expected sums when every lane has applied its positions [0, place).

    `whole` is the closed form of one pass of the source, `holes` are those in effect, of all sources.
    """
    num_passes, first_id = int(order.num_passes(place)[number]), int(order.first_id[number])
    own = [hole for hole in holes if order.source_of_group(hole.group) == number]
    total = whole * num_passes
    for hole in own:
        total -= CoverageSums.of_range(hole.lo - first_id, hole.hi - first_id) * (num_passes - hole.epoch)
        for lo, hi in hole.applied_before:
            total += CoverageSums.of_range(lo - first_id, hi - first_id)
    for ids in order.ahead(number, num_passes, place):
        is_left_out = np.zeros(len(ids), dtype=bool)
        for hole in own:
            is_left_out |= (ids >= hole.lo - first_id) & (ids < hole.hi - first_id)
        total += CoverageSums.of_ids(ids[~is_left_out])
    return total


def check_passes(
    order: Mixture,
    sources: Sequence[tuple[str, CoverageSums]],
    before: Cursor,
    after: Cursor,
    holes: Sequence[Hole],
    found: Sequence[CoverageSums],
) -> None:
    """Raise CoverageError if a source whose pass ended with a step did not apply each sample once per pass.

    `sources` are their names and closed forms of one pass. The step is the one between the two cursors, `holes` are
    those in effect after it, `found` each source's sums then.
    """
    num_passes = order.num_passes(after.offset)
    for number in np.flatnonzero(num_passes > order.num_passes(before.offset)).tolist():
        name, whole = sources[number]
        expected = expected_sums_of(order, number, whole, after.offset, holes)
        if found[number] != expected:
            raise CoverageError(
                f"the samples of source '{name}' were not applied once in each of its {num_passes[number]} epochs: "
                f"{found[number]} were counted, {expected} are expected, so some were repeated or left out. The step "
                "that ended the last epoch was not applied, and no commit has it. This is a defect of the program or "
                "of a machine's memory, not of the data: `elastic-train audit --forensic` names the samples if "
                "run.forensic was set; to train on, remove this epoch's commits and start again from the one before"
            )
