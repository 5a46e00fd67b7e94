"""The totals of the lanes and ranks of one step, equal on every rank, from tables gathered in one collective.

Lanes belong to replicas, so one rank of a replica reports its lanes: its first, or the first of its last stage. Values
of a rank as a whole have their own row. Lane values are added along the lanes' tree, so sums do not depend on the
world.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.core.accounting import CoverageSums
from elastic_train.core.lanes import Assignment, tree_sum
from elastic_train.core.mesh import Cell, Mesh
from elastic_train.insight.phases import RankFacts, facts_of
from elastic_train.parallel.group import Group
from elastic_train.tasks.task import mean_loss

_WORD = 1 << 64
_OF_SOURCES = 4 + len(RankFacts._fields)
"""Index of the sums of sources in a rank's row: after its coverage, flags and clock values."""
LEAVE, COMMIT, GROW, BUSY, GIVE_UP, UNREADABLE, BUFFERS, UNABLE, ABLE, STOP = (1 << bit for bit in range(10))
"""Flags in the table of ranks."""


@dataclass(frozen=True, slots=True)
class LaneSums:
    """Results of one lane's forward pass: loss sum, weight (NaN: do not divide), and checksum of integer buffers."""

    loss: float = 0.0
    weight: float = 0.0
    buffers: int = 0


@dataclass(frozen=True, slots=True)
class StepSums:
    """The totals of the lanes and ranks of one step, equal on every rank."""

    loss: float
    weight: float
    coverage: CoverageSums
    num_left_out: int
    num_truncated: int
    any_flags: int
    buffers: tuple[int, ...] = ()
    """Checksums of integer buffers, of the lanes with samples."""
    ranks: tuple[RankFacts, ...] = ()
    nonfinite_lanes: tuple[int, ...] = ()
    """Lanes whose loss is NaN or infinite."""
    sources: tuple[CoverageSums, ...] = ()
    """Sums of each source of a mixture, over its own ids."""

    @property
    def is_unreadable(self) -> bool:
        """True if a rank could not read a sample of the step, which then must not be applied."""
        return bool(self.any_flags & UNREADABLE)

    @property
    def divisor(self) -> float:
        return 1.0 if math.isnan(self.weight) else self.weight or 1.0

    @property
    def mean(self) -> float | None:
        """The step's loss, None if no sample has a target."""
        return mean_loss(self.loss, self.weight)


def fold(tables: StepTables) -> StepSums:
    """Add the lanes' rows, floats along the tree and integers in any order, and the ranks' coverage."""
    losses, weights, *integers = zip(*tables.lanes, strict=True)
    num_left_out, num_truncated, has_samples, buffers = ([int(value) for value in column] for column in integers)
    *coverage, flags = ([int(row[column]) for row in tables.ranks] for column in range(4))
    count, sum_a, sum_b = (sum(column) for column in coverage)
    return StepSums(
        tree_sum([float(loss) for loss in losses]),
        tree_sum([float(weight) for weight in weights]),
        CoverageSums(count, sum_a % _WORD, sum_b % _WORD),
        sum(num_left_out),
        sum(num_truncated),
        reduce(or_, flags),
        tuple(digest for digest, has in zip(buffers, has_samples, strict=True) if has),
        tuple(facts_of(row[4:_OF_SOURCES]) for row in tables.ranks),
        tuple(lane for lane, loss in enumerate(losses) if not math.isfinite(loss)),
        _sources_of([row[_OF_SOURCES:] for row in tables.ranks]),
    )


def _sources_of(rows: Sequence[Row]) -> tuple[CoverageSums, ...]:
    """Add the ranks' sums of each source: three numbers per source."""
    total = [sum(int(value) for value in column) for column in zip(*rows, strict=True)]
    return tuple(
        CoverageSums(total[at], total[at + 1] % _WORD, total[at + 2] % _WORD) for at in range(0, len(total), 3)
    )


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


def _packed(row: Row) -> bytes:
    """Return a row's 64-bit words; in the first one, bit c is set if column c is a float."""
    kinds = sum([1 << column for column, value in enumerate(row) if isinstance(value, float)])
    words = [value if isinstance(value, float) else value & _MASK for value in row]
    return _form(kinds, len(words)).pack(kinds, *words)


@lru_cache(64)
def _form(kinds: int, num_columns: int) -> struct.Struct:
    return struct.Struct("=Q" + "".join("d" if kinds >> column & 1 else "Q" for column in range(num_columns)))
