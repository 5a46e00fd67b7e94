"""Choose the lanes of a step to audit and the replicas that recompute them, and find the ranks that differ: pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from elastic_train.core.lanes import Assignment


class Audit(NamedTuple):
    """A lane to compute twice, its owner and the owner that recomputes it (the same one if there is no other)."""

    lane: int
    owner: int
    auditor: int


def audits_of(step: int, every: int, assigned: Assignment, num_crews: int = 1) -> list[Audit]:
    """Return the audits of a step: one for every `every` lanes, cycling through all lanes and all pairs of replicas.

    A step audits each lane at most once. A replica has `num_crews` owners; the one at the same position as the lane's
    owner recomputes it.
    """
    num_lanes, num_owners = sum(map(len, assigned)), len(assigned)
    num_replicas = num_owners // num_crews
    owner_of = {lane: owner for owner, lanes in enumerate(assigned) for lane in lanes}
    first, end = step * num_lanes // every, (step + 1) * num_lanes // every
    audits = []
    for number in range(first, end):
        lane = number % num_lanes
        owner, turn = owner_of[lane], number // num_lanes
        away = 1 + turn % (num_replicas - 1) if num_replicas > 1 else 0
        audits.append(Audit(lane, owner, (owner + away * num_crews) % num_owners))
    return audits


def others(had: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks whose value differs from the majority's, once per wrong value; without a majority, all ranks."""
    counts = Counter(value for _, value in had).most_common(2)
    is_clear = len(counts) < 2 or counts[0][1] > counts[1][1]
    return [rank for rank, value in had if not is_clear or value != counts[0][0]]
