"""Permute an epoch's row groups at random, such that row groups mixed at a time come from everywhere.

All lanes read their first blocks at about the same time, then their second ones: a *turn*. The row groups of a turn are
a stratified sample of the dataset (Cochran: Sampling Techniques, 1977, chapter 5): the row groups in file order are cut
into as many consecutive runs as a turn has positions, and every turn gets one of each run. The key decides which, and
at which position. So files sorted by something the loss depends on, such as a label or source, give every turn their
overall mix.
"""

from __future__ import annotations

import numpy as np

from elastic_train.core.arrays import Int64s
from elastic_train.core.keyed_random import derive, mix64_array, permute

_SHORT, _DEAL, _PLACE = 1, 2, 3  # separate the keys


def stratified_order(num_groups: int, num_lanes: int, block_row_groups: int, key: int) -> Int64s:
    """Return the permuted row groups, shape (num_groups,), which consecutive lanes divide about evenly."""
    turns = _turns(num_groups, num_lanes, block_row_groups)
    sizes = np.bincount(turns)  # none is larger than the one before
    # The last turns have fewer positions, so only as many runs have a row group for them.
    num_runs = int(sizes[0])
    ranks = permute(np.arange(num_runs, dtype=np.int64), num_runs, derive(key, _SHORT))
    lengths = np.searchsorted(-sizes, -ranks, side="left")
    runs = np.repeat(np.arange(num_runs), lengths)
    dealt = _sorted_by(runs, derive(key, _DEAL))
    turn_of_group = np.empty(num_groups, dtype=np.int64)
    turn_of_group[dealt] = np.arange(num_groups) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    groups = np.empty(num_groups, dtype=np.int64)
    groups[np.argsort(turns, kind="stable")] = _sorted_by(turn_of_group, derive(key, _PLACE))
    return groups


def _turns(num_groups: int, num_lanes: int, block_row_groups: int) -> Int64s:
    """Return the turn in which each position of the line is read, as if all row groups had equal size."""
    places = np.arange(num_groups, dtype=np.int64)
    lanes = places * num_lanes // num_groups
    firsts = -(-lanes * num_groups // num_lanes)
    turns: Int64s = (places - firsts) // block_row_groups
    return turns


def _sorted_by(classes: Int64s, key: int) -> Int64s:
    """Return [0, n) sorted by class, within a class as drawn by the key.

    The sorted words consist of class, draw and a unique number, so every sort algorithm gives the same result.
    """
    count = classes.size
    num_bits = np.uint64(count.bit_length())
    numbers = np.arange(count, dtype=np.uint64)
    draws = mix64_array(numbers ^ np.uint64(key)) >> (num_bits + num_bits) << num_bits
    words = np.sort((classes.astype(np.uint64) << (np.uint64(64) - num_bits)) | draws | numbers)
    return (words & ((np.uint64(1) << num_bits) - np.uint64(1))).astype(np.int64)
