"""The tables of a step: the values of every lane and every rank, gathered in one collective.

Lanes belong to replicas, so one rank of a replica reports its lanes: its first, or the first of its last stage. Values
of a rank as a whole have their own row. Lane values are added along the lanes' tree, so sums do not depend on the
world.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.core.lanes import Assignment, lane_additions
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.parallel.group import Group

Row = Sequence[float | int]
WORD_BYTES = 8
_MASK = (1 << 64) - 1


class StepTables(NamedTuple):
    """Every lane's row, by lane, and every rank's, by rank."""

    lanes: list[Row]
    ranks: list[Row]


def gather_tables(
    group: Group, mesh: Mesh, assigned: Assignment, lanes: Mapping[int, Row], rank: Row = ()
) -> StepTables:
    """Return all lanes' and all ranks' rows, from this rank's rows, in one collective.

    `group` is the whole world, and `assigned` has the lanes of its owners. Lane rows have one length, rank rows
    another; floats must be among a row's first 64 values. Floats are sent as their bits, integers modulo 2^64; each
    row's first word marks the floats, so that 0 and 0.0 stay distinct.
    """
    own = _packed(rank)
    rows = [_packed(row) for _, row in sorted(lanes.items())]
    missing = max(map(len, assigned)) - len(rows)
    words = bytearray(b"".join([own, *rows, bytes(missing * len(rows[0]))]))
    gathered = group.all_gather(torch.frombuffer(words, dtype=torch.int64))
    return _read_tables(gathered, mesh, assigned, len(own) // WORD_BYTES)


def _read_tables(gathered: Tensor, mesh: Mesh, assigned: Assignment, rank_words: int) -> StepTables:
    """Return the gathered rows; each rank's own row comes first, then those of its replica's lanes."""
    words = gathered.cpu().numpy()
    most = max(map(len, assigned))
    lanes = words[:, rank_words:].reshape(mesh.size * most, -1)
    return StepTables(_rows(lanes[_places(assigned, mesh.cell)]), _rows(words[:, :rank_words]))


def _rows(words: npt.NDArray[np.int64]) -> list[Row]:
    """Decode rows of words; each row's first word marks its floats."""
    columns = words.T.copy()
    (kinds, *integers), (_, *floats) = (columns.view(kind).tolist() for kind in (np.uint64, np.float64))
    if not integers:
        return [() for _ in kinds]
    by_kind = {
        kind: list(zip(*(floats[c] if kind >> c & 1 else integers[c] for c in range(len(floats))), strict=True))
        for kind in set(kinds)
    }
    return [by_kind[kind][row] for row, kind in enumerate(kinds)]


@lru_cache(64)
def _places(assigned: Assignment, cell: Cell) -> npt.NDArray[np.int64]:
    """Return the index of every lane's row among the gathered ones; every rank sends equally many."""
    most = max(map(len, assigned))
    places = np.empty(sum(map(len, assigned)), dtype=np.int64)
    for owner, lanes in enumerate(assigned):
        rank = cell.speaker_of(owner)
        places[lanes.start : lanes.stop : lanes.step] = rank * most + np.arange(len(lanes))
    return places


def tree_sum(values: Sequence[float]) -> float:
    """Add the lanes' values along the tree."""
    sums = list(values)
    for left, right in lane_additions(len(sums)):
        sums[left] += sums[right]
    return sums[0]


def _packed(row: Row) -> bytes:
    """Return a row's 64-bit words; in the first one, bit c is set if column c is a float."""
    kinds = sum([1 << column for column, value in enumerate(row) if isinstance(value, float)])
    words = [value if isinstance(value, float) else value & _MASK for value in row]
    return _form(kinds, len(words)).pack(kinds, *words)


@lru_cache(64)
def _form(kinds: int, num_columns: int) -> struct.Struct:
    return struct.Struct("=Q" + "".join("d" if kinds >> column & 1 else "Q" for column in range(num_columns)))
