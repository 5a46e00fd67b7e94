"""The table of lanes: what every lane of a step has to say, gathered in one collective and added along the tree."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.core.lanes import lane_additions, owned_lanes
from elastic_train.parallel.group import Group


def gather_lane_table(
    group: Group, num_lanes: int, rows: Mapping[int, Sequence[float | int]]
) -> list[Sequence[float | int]]:
    """Return every lane's row, by lane, from the rows of each rank's own lanes, in one collective.

    All rows have one length, below 64. A float travels as its bits, an integer modulo 2^64 as it is; each row's first
    word says which is which, so that one rank's 0 and another's 0.0 cannot be taken for each other.
    """
    words = [[_kinds(row), *(_to_word(value) for value in row)] for _, row in sorted(rows.items())]
    most = -(-num_lanes // group.size)
    mine = torch.zeros((most, len(words[0])), dtype=torch.int64)
    mine[: len(words)] = torch.tensor(words)
    return _read_table(group.all_gather(mine), num_lanes, group.size)


def _read_table(gathered: Tensor, num_lanes: int, size: int) -> list[Sequence[float | int]]:
    """Return the rows of all lanes, of which the first word has been taken for what it says."""
    table = gathered.cpu().numpy()
    columns = table.reshape(-1, table.shape[-1])[_places(num_lanes, size)].T.copy()
    (kinds, *integers), (_, *floats) = (columns.view(kind).tolist() for kind in (np.uint64, np.float64))
    by_kind = {
        kind: list(zip(*(floats[c] if kind >> c & 1 else integers[c] for c in range(len(floats))), strict=True))
        for kind in set(kinds)
    }
    return [by_kind[kind][lane] for lane, kind in enumerate(kinds)]


@lru_cache(64)
def _places(num_lanes: int, size: int) -> npt.NDArray[np.int64]:
    """Return where every lane's row is among the gathered ones, of which each rank has as many as the largest."""
    most = -(-num_lanes // size)
    owned = (owned_lanes(rank, size, num_lanes) for rank in range(size))
    return np.array([rank * most + place for rank, lanes in enumerate(owned) for place in range(len(lanes))])


def tree_sum(values: Sequence[float]) -> float:
    """Add the lanes' values along the tree."""
    sums = list(values)
    for left, right in lane_additions(len(sums)):
        sums[left] += sums[right]
    return sums[0]


def _kinds(row: Sequence[float | int]) -> int:
    """Return a word whose bit c says that column c is a float."""
    return sum(isinstance(value, float) << column for column, value in enumerate(row))


def _to_word(value: float | int) -> int:
    """Return a value's 64 bits as a signed integer."""
    packed = struct.pack("<d", value) if isinstance(value, float) else (value & (1 << 64) - 1).to_bytes(8, "little")
    return int.from_bytes(packed, "little", signed=True)
