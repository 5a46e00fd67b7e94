"""The permutation of row groups: a permutation, always the same, and every turn a sample of the whole dataset."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.order import stratified_order

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
