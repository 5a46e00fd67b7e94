"""When row groups are needed next: what the blocks of the coming steps say, one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.length_buckets import LengthBuckets
from elastic_train.core.order import Order
from elastic_train.data.needs import Needs


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 4),
    st.data(),
)
def test_the_next_need_is_the_first_step_whose_blocks_hold_the_row_group(
    group_rows: list[int],
    num_lanes: int,
    block: int,
    micro_batch: int,
    is_shuffled: bool,
    window_steps: int,
    data: st.DataObject,
) -> None:
    """Over any shapes and windows (0: none), from any step of any epoch; every row group is needed again in the next.

    A step may take any sample of its window, and so needs the row groups of all the window's blocks.
    """
    buckets = LengthBuckets(lambda ids: ids % 5, micro_batch, window_steps=window_steps) if window_steps else None
    order = Order(
        group_rows,
        num_lanes=num_lanes,
        seed=4,
        block_row_groups=block,
        is_shuffled=is_shuffled,
        arrangement=buckets,
    )
    size = micro_batch * (window_steps or 1)
    num_steps = order.num_steps(micro_batch)
    start = data.draw(st.integers(0, 2 * num_steps))
    expected: dict[int, int] = {}
    for step in range(start, (start // num_steps + 2) * num_steps):
        cursor = order.cursor_at(step, micro_batch)
        for lane in range(num_lanes):
            lo, hi = order.lane_bounds(lane)
            first = cursor.offset // size * size
            for offset in range(first, min(first + size, hi - lo) if cursor.offset < hi - lo else first):
                for group in order.epoch(cursor.epoch).block_at(lane, offset).groups.tolist():
                    expected.setdefault(group, step)
            for id_ in order.epoch(cursor.epoch).ids(lane, cursor.offset, cursor.offset + micro_batch).tolist():
                group = int(np.searchsorted(order.group_first_id, id_, side="right")) - 1
                assert expected[group] <= step, "what a step takes lies in row groups that it needs"
    needs = Needs(order, micro_batch)
    assert dict(enumerate(needs.after(start).tolist())) == expected
    assert needs.after(start).tolist() == needs.after(start).tolist(), "what is kept of an epoch is not used up"
