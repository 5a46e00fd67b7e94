"""Arrays of ids: which group holds an id, and ids as ranges."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.arrays import group_of, ranges_of
from elastic_train.core.order import first_ids


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_every_id_is_found_in_its_group(group_rows: list[int]) -> None:
    """Ids that number the rows of groups are found there, many at a time or one by one."""
    first_id, expected = first_ids(np.array(group_rows)), np.repeat(np.arange(len(group_rows)), group_rows)
    assert group_of(first_id, np.arange(sum(group_rows))).tolist() == expected.tolist()
    assert [group_of(first_id, id_) for id_ in range(sum(group_rows))] == expected.tolist()


@given(st.sets(st.integers(0, 40)))
def test_ranges_hold_exactly_the_ids(ids: set[int]) -> None:
    """The ranges of ids hold all of them and no other, ascending, and no two of them touch."""
    ranges = ranges_of(np.array(sorted(ids, reverse=True), dtype=np.int64))
    assert [id_ for lo, hi in ranges for id_ in range(lo, hi)] == sorted(ids)
    assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
