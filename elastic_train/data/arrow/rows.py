"""Rows of decoded row groups, taken in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.data.arrow.columns import join, piece_of
from elastic_train.data.arrow.numbers import whole


class Rows:
    """The rows of one row group, of any schema."""

    def __init__(self, table: pa.Table) -> None:
        self.schema, self.num_rows = table.schema, table.num_rows
        self.nbytes = table.get_total_buffer_size()  # `nbytes` would wake Arrow's own memory pool, for milliseconds
        self.columns = [piece_of(whole(column)) for column in table.columns]


class Joined:
    """Several row groups, from which rows are taken by id.

    `first_id` are the ids of all row groups' first rows; `rows` the available row groups by number.
    """

    def __init__(self, first_id: Int64s, rows: Mapping[int, Rows]) -> None:
        groups = sorted(rows)
        side_by_side = [rows[group] for group in groups]
        self._first_id = first_id[groups]
        self._starts = np.cumsum([0, *(each.num_rows for each in side_by_side[:-1])])
        self._schema = side_by_side[0].schema
        self._columns = [join(pieces) for pieces in zip(*(each.columns for each in side_by_side), strict=True)]

    def take(self, ids: Int64s) -> tuple[pa.Table, Int64s]:
        """Return the rows of the ids, in order and in one chunk, and the ids of the places that they were read from."""
        to_first = self._first_id - self._starts
        numbers = group_of(self._first_id, ids)
        slots = ids - to_first.take(numbers)
        columns = [column.take(numbers, slots) for column in self._columns]
        read_from = group_of(self._starts, slots)
        return pa.Table.from_arrays(columns, schema=self._schema), slots + to_first.take(read_from)


def gather(rows_of: Callable[[int], Rows], first_id: Int64s, ids: Int64s) -> tuple[pa.Table, Int64s]:
    """Return the rows of the ids, and the ids of their places; `rows_of` returns a row group's rows."""
    return Joined(first_id, {group: rows_of(group) for group in groups_of(first_id, ids)}).take(ids)


def groups_of(first_id: Int64s, ids: Int64s) -> list[int]:
    """Return the row groups that hold the ids, distinct and ascending."""
    groups: list[int] = np.unique(group_of(first_id, ids)).tolist()
    return groups
