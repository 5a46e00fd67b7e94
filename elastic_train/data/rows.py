"""Rows of decoded row groups, taken in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from elastic_train.data.columns import Picks, piece_of, take
from elastic_train.mixing import Int64s


class Rows:
    """The rows of one row group, of any schema."""

    def __init__(self, table: pa.Table) -> None:
        table = table.combine_chunks()
        self.schema, self.nbytes = table.schema, table.nbytes
        self.columns = [piece_of(column.chunk(0)) for column in table.columns]


def gather(rows_of: Callable[[int], Rows], first_id: Int64s, ids: Int64s) -> tuple[pa.Table, Int64s]:
    """Return the rows of the ids, in their order and in one chunk, and the ids of the places that they came from.

    `first_id` are the ids of all row groups' first rows; `rows_of` returns the rows of a row group by its number.
    """
    picks = Picks.of(first_id, ids)
    return take_rows([rows_of(group) for group in picks.groups], picks), picks.ids(first_id)


def take_rows(rows: Sequence[Rows], picks: Picks) -> pa.Table:
    """Return rows of some row groups, in one chunk."""
    columns = [take(pieces, picks) for pieces in zip(*(each.columns for each in rows), strict=True)]
    return pa.table(columns, schema=rows[0].schema)
