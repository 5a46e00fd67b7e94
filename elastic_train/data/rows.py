"""Rows of decoded row groups, taken in any order.

Arrow takes a list's rows element by element, but a binary value's bytes at once. A list of numbers without missing
elements is such bytes, so it is taken as binary and named a list again: same values, several times as fast for long
rows. Nothing is converted, only described differently.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from elastic_train.data.numbers import column_of, numbers_of
from elastic_train.mixing import Int64s


class Rows:
    """The rows of one row group, of any schema."""

    def __init__(self, table: pa.Table) -> None:
        table = table.combine_chunks()
        self.schema, self.nbytes = table.schema, table.nbytes
        self.columns = [_as_binary(column.chunk(0)) for column in table.columns]


def gather(rows_of: Callable[[int], Rows], first_id: Int64s, ids: Int64s) -> tuple[pa.Table, Int64s]:
    """Return the rows of the ids, in their order and in one chunk, and the ids of the places that they came from.

    `first_id` are the ids of all row groups' first rows; `rows_of` returns the rows of a row group by its number.
    """
    groups = np.searchsorted(first_id, ids, side="right") - 1
    by_group = np.argsort(groups, kind="stable")
    present, starts = np.unique(groups[by_group], return_index=True)
    taken, read_ids = [], np.empty_like(ids)
    for group, places in zip(present.tolist(), np.split(by_group, starts[1:]), strict=True):
        rows, within = rows_of(group), ids[places] - first_id[group]
        wanted = column_of(within)
        taken.append([column.take(wanted) for column in rows.columns])
        read_ids[places] = first_id[group] + within
    order = np.empty_like(by_group)
    order[by_group] = np.arange(len(by_group))
    is_in_order = len(taken) == 1 and bool((order[1:] > order[:-1]).all())
    wanted = column_of(order)
    columns = []
    for of_column, field in zip(zip(*taken, strict=True), rows.schema, strict=True):
        pieces = list(of_column)
        if len({piece.type for piece in pieces}) > 1:  # a row group with missing elements among others without
            pieces = [_as_list(piece, field.type) for piece in pieces]
        column = pa.concat_arrays(pieces)
        columns.append(_as_list(column if is_in_order else column.take(wanted), field.type))
    return pa.table(columns, schema=rows.schema), read_ids


def _as_binary(column: pa.Array) -> pa.Array:
    """Describe a list of numbers as the bytes that it is; leave any other column as it is."""
    if not (pa.types.is_list(column.type) and _is_plain(column.values)):
        return column
    width = column.type.value_type.bit_width // 8
    offsets = (numbers_of(column.offsets).astype(np.int64) + column.values.offset) * width
    validity = column.is_valid().buffers()[1] if column.null_count else None
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(column), [validity, pa.py_buffer(offsets), column.values.buffers()[1]]
    )


def _is_plain(values: pa.Array) -> bool:
    """Say whether values are numbers of whole bytes, none missing."""
    kind = values.type
    return (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not values.null_count


def _as_list(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Describe bytes as the list that they are; leave a column of the wanted type as it is."""
    if column.type == wanted:
        return column
    width = wanted.value_type.bit_width // 8
    validity, offsets, content = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64, count=len(column) + 1 + column.offset)[column.offset :] // width
    num_values = int(bounds[-1])
    values = pa.Array.from_buffers(wanted.value_type, num_values, [None, content if num_values else pa.py_buffer(b"")])
    return pa.Array.from_buffers(
        wanted, len(column), [validity, pa.py_buffer(bounds.astype(np.int32))], column.null_count, 0, [values]
    )
