"""Counts of sums are those of the counter that adds them, in no more time for a million lanes."""

from __future__ import annotations

import itertools

import pytest

from elastic_train.core.lanes import Counter, Part, parts_of
from elastic_train.planning.arithmetic.layouts import Batch
from elastic_train.planning.arithmetic.seating import _dealt, _most_lanes, _replicated


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 5, 8, 11, 16, 23])
def test_sums_are_counted_as_they_are_added(num_lanes: int) -> None:
    """For every run of lanes: how many are there at most, beside the open one, and at the end."""
    for lo, hi in itertools.combinations(range(num_lanes + 1), 2):
        counter, aside, most = Counter[None](num_lanes, lambda left, right: None), 0, 0
        for leaf in (Part(0, lane) for lane in range(lo, hi)):
            aside = max(aside, len(counter.parts) - (leaf.sibling in counter.parts))  # a left sibling stays open
            counter.push(leaf, None)
            most = max(most, len(counter.parts))
        num_parts = len(parts_of(range(lo, hi), num_lanes))
        assert _replicated(range(lo, hi), Batch(num_lanes, 1)) == (aside, num_parts)
        assert _dealt(range(lo, hi), num_lanes, 2) == (2 * most - 1, 2 * num_parts)


def test_no_lane_is_looked_at_for_its_own_sake() -> None:
    """Weak scaling of 4,096 lanes goes up to four million: it took minutes."""
    num_lanes = 10**15
    assert _replicated(range(num_lanes), Batch(num_lanes, 1)) == (48, 1)
    assert len(_most_lanes(3, num_lanes)) == num_lanes // 3 + 1
