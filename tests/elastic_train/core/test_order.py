"""The order: every sample once per epoch, whatever the sizes, and the same ids however a request is cut."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.core.mixture import epochs_at
from elastic_train.core.order import Cursor, Order, stratified_order

group_rows = st.lists(st.integers(1, 40), min_size=1, max_size=25)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Draw any order: any row groups, lanes (more than samples, too), seed, block and shuffling."""
    return Order(
        draw(group_rows),
        num_lanes=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**63 - 1)),
        block_row_groups=draw(st.integers(1, 30)),
        is_shuffled=draw(st.booleans()),
    )


def count_ids(order: Order, epoch: int) -> Counter[int]:
    """Count every id of an epoch over all lanes."""
    epoch_order = order.epoch(epoch)
    return Counter(
        int(sample) for lane in range(order.num_lanes) for sample in epoch_order.ids(lane, 0, order.num_samples + 1)
    )


@settings(deadline=None)
@given(orders(), st.integers(0, 5))
def test_every_sample_once(order: Order, epoch: int) -> None:
    """The invariant, at any sizes."""
    assert count_ids(order, epoch) == Counter(range(order.num_samples))


@settings(deadline=None)
@given(orders(), st.integers(0, 3), st.data())
def test_ids_do_not_depend_on_the_request_bounds(order: Order, epoch: int, data: st.DataObject) -> None:
    """[lo, hi) gives that slice of the lane, so any micro-batch and any resume reads the same order."""
    lane = data.draw(st.integers(0, order.num_lanes - 1))
    whole = order.epoch(epoch).ids(lane, 0, order.num_samples)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.size + 3), max_size=6)))
    bounds = [0, *cuts, whole.size + 3]
    pieces = [order.epoch(epoch).ids(lane, lo, hi) for lo, hi in itertools.pairwise(bounds)]
    assert np.concatenate(pieces).tolist() == whole.tolist()


@given(orders())
def test_lanes_differ_by_at_most_one_sample(order: Order) -> None:
    """Bounds touch, in order, and no lane is two samples longer than another."""
    bounds = [order.lane_bounds(lane) for lane in range(order.num_lanes)]
    assert [lo for lo, _ in bounds] == [0, *(hi for _, hi in bounds[:-1])]
    assert bounds[-1][1] == order.num_samples
    sizes = [hi - lo for lo, hi in bounds]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(group_rows, st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32))
def test_shuffling_stays_inside_its_block(rows: list[int], num_lanes: int, block: int, seed: int) -> None:
    """A lane's consecutive samples come from at most K whole row groups at a time, so few are open at once."""
    order = Order(rows, num_lanes=num_lanes, seed=seed, block_row_groups=block)
    group_of = np.repeat(np.arange(len(rows)), rows)
    for lane in range(num_lanes):
        groups = group_of[order.epoch(0).ids(lane, 0, order.num_samples)].tolist()
        seen: set[int] = set()
        while groups:
            current: set[int] = set()
            while groups and (groups[0] in current or len(current) < block):
                current.add(groups.pop(0))
            assert not current & seen, f"lane {lane} returns to a row group after leaving its block"
            seen |= current


@given(group_rows, st.integers(1, 8))
def test_unshuffled_is_file_order(rows: list[int], num_lanes: int) -> None:
    """Without shuffling, the lanes one after the other are the file."""
    order = Order(rows, num_lanes=num_lanes, seed=1, is_shuffled=False)
    lanes = [order.epoch(3).ids(lane, 0, order.num_samples) for lane in range(num_lanes)]
    assert np.concatenate(lanes).tolist() == list(range(order.num_samples))


@settings(deadline=None)
@given(orders(), st.integers(1, 9), st.integers(0, 500))
def test_a_cursor_and_its_step_are_inverse(order: Order, micro_batch: int, step: int) -> None:
    """cursor_at is the inverse of step_of, and advancing a cursor advances its step by one."""
    cursor = order.cursor_at(step, micro_batch)
    assert order.step_of(cursor, micro_batch) == step
    assert order.advance(cursor, micro_batch) == order.cursor_at(step + 1, micro_batch)


@settings(deadline=None)
@given(orders(), st.integers(1, 9))
def test_the_steps_of_an_epoch_cover_it(order: Order, micro_batch: int) -> None:
    """Walking the cursor from step to step through an epoch reads every sample once, and then the next epoch begins."""
    cursor, counts = Cursor(), Counter[int]()
    for _ in range(order.num_steps(micro_batch)):
        assert cursor.epoch == 0
        for lane in range(order.num_lanes):
            counts.update(order.epoch(0).ids(lane, cursor.offset, cursor.offset + micro_batch).tolist())
        cursor = order.advance(cursor, micro_batch)
    assert cursor == Cursor(1, 0)
    assert counts == Counter(range(order.num_samples))


def test_golden_order() -> None:
    """Two epochs of a small order are as they were frozen."""
    order = Order([3, 1, 5, 2, 4, 7, 1], num_lanes=3, seed=5, block_row_groups=2)
    assert [order.epoch(0).ids(lane, 0, 99).tolist() for lane in range(3)] == [
        [6, 4, 5, 7, 8, 22, 9],
        [3, 10, 0, 16, 15, 1, 17, 2],
        [18, 14, 21, 12, 20, 11, 19, 13],
    ]
    assert [order.epoch(1).ids(lane, 0, 99).tolist() for lane in range(3)] == [
        [10, 22, 9, 4, 5, 6, 7],
        [3, 8, 13, 0, 12, 2, 11, 1],
        [15, 16, 18, 19, 17, 14, 21, 20],
    ]


def test_golden_place_in_a_large_order() -> None:
    """A place in the middle of 42 M samples is as it was frozen, and nothing of that size is made to find it."""
    order = Order([100_000] * 420, num_lanes=64, seed=1)
    tracemalloc.start()
    try:
        found = order.epoch(3).ids(17, 1000, 1006).tolist()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 42_000_000
    assert found == [30434026, 41233872, 41744111, 41797983, 41743723, 38704869]


def test_epochs_and_seeds_differ() -> None:
    """Another epoch or another seed is another order."""
    firsts = {
        (seed, epoch): tuple(Order([10] * 50, num_lanes=4, seed=seed).epoch(epoch).ids(0, 0, 20).tolist())
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(firsts.values())) == 4


@pytest.mark.parametrize(
    ("rows", "num_lanes", "block_row_groups"), [([], 1, 1), ([3, 0], 1, 1), ([3], 0, 1), ([3], 1, 0), ([[3]], 1, 1)]
)
def test_an_impossible_order_is_refused(rows: list[int], num_lanes: int, block_row_groups: int) -> None:
    """No row groups, an empty one, no lanes or an empty block cannot be ordered."""
    with pytest.raises(ValueError, match="at least"):
        Order(rows, num_lanes=num_lanes, seed=1, block_row_groups=block_row_groups)


def test_a_cursor_counts_from_zero() -> None:
    """A negative cursor is a programming error."""
    with pytest.raises(AssertionError):
        Cursor(-1, 0)
    with pytest.raises(AssertionError):
        Cursor(0, -1)


keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 20), keys)
def test_it_is_a_permutation(num_groups: int, num_lanes: int, block_row_groups: int, key: int) -> None:
    """With fewer row groups than lanes, lanes of unequal length, and blocks that are cut short, too."""
    groups = stratified_order(num_groups, num_lanes, block_row_groups, key)
    assert sorted(groups.tolist()) == list(range(num_groups))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), keys)
def test_a_turn_has_one_row_group_of_each_run_of_neighbours(
    num_lanes: int, block_row_groups: int, num_turns: int, key: int
) -> None:
    """The n-th blocks of all lanes: their row groups in file order are in the first, second, ... run of `num_turns`."""
    groups = stratified_order(num_lanes * block_row_groups * num_turns, num_lanes, block_row_groups, key)
    for turn in groups.reshape(num_lanes, num_turns, block_row_groups).transpose(1, 0, 2).reshape(num_turns, -1):
        assert (np.sort(turn) // num_turns).tolist() == list(range(num_lanes * block_row_groups))


@pytest.mark.heavy
def test_every_row_group_comes_to_every_place() -> None:
    """Also where the last turns are short: nothing is always early, late, or the same lane's."""
    for num_groups, num_lanes, block_row_groups in ((8, 2, 2), (7, 2, 2), (11, 3, 2)):
        seen = np.zeros((num_groups, num_groups), dtype=np.int64)
        for key in range(60 * num_groups):
            seen[np.arange(num_groups), stratified_order(num_groups, num_lanes, block_row_groups, key)] += 1
        assert seen.min() > 20 and seen.max() < 180, seen


def test_golden_permutation() -> None:
    """As it was frozen: a change here would reorder every stored run."""
    assert stratified_order(11, 3, 2, 5).tolist() == [0, 6, 4, 1, 7, 2, 9, 8, 10, 3, 5]
    assert stratified_order(21_000, 64, 8, 1)[:6].tolist() == [20561, 7606, 20718, 18639, 14034, 10009]


def test_epochs_are_counted_in_steps() -> None:
    """Ten samples in two lanes of two are three steps an epoch."""
    order = Order(np.array([10]), num_lanes=2, seed=1)
    epochs = [epochs_at(order, order.cursor_at(step, 2), 2) for step in (0, 1, 3, 5)]
    assert epochs == [0, 1 / 3, 1, 5 / 3]
