"""When row groups are needed next: what the blocks of the coming steps say, one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.needs import Needs
from elastic_train.order import Order


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.data(),
)
def test_the_next_need_is_the_first_step_whose_blocks_hold_the_row_group(
    group_rows: list[int], num_lanes: int, block: int, micro_batch: int, is_shuffled: bool, data: st.DataObject
) -> None:
    """Over any shapes, from any step of any epoch; every row group is needed again by the next epoch's end."""
    order = Order(group_rows, num_lanes=num_lanes, seed=4, block_row_groups=block, is_shuffled=is_shuffled)
    num_steps = order.num_steps(micro_batch)
    start = data.draw(st.integers(0, 2 * num_steps))
    expected: dict[int, int] = {}
    for step in range(start, (start // num_steps + 2) * num_steps):
        cursor = order.cursor_at(step, micro_batch)
        for lane in range(num_lanes):
            lo, hi = order.lane_bounds(lane)
            for offset in range(cursor.offset, min(cursor.offset + micro_batch, hi - lo)):
                for group in order.epoch(cursor.epoch).block_at(lane, offset).groups.tolist():
                    expected.setdefault(group, step)
    needs = Needs(order, micro_batch)
    assert dict(enumerate(needs.after(start).tolist())) == expected
    assert needs.after(start).tolist() == needs.after(start).tolist(), "what is kept of an epoch is not used up"
