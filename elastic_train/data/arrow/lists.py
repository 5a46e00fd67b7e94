"""Columns of lists: row lengths, truncation, and late padding.

Padding turns a micro-batch's lists into one array in a tensor's shape, as wide as its longest row. Arrow treats a row
as a string of bytes and pads strings: one copy and fill per row, without the interpreter's lock. Only then are numbers
widened, into memory of Arrow's pool, which the next micro-batch reuses: faulting in fresh pages costs more than filling
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.arrays import Int64s
from elastic_train.data.arrow.numbers import numbers_of, whole


def pad_lists(column: pa.ChunkedArray, *, max_width: int, multiple: int = 1) -> tuple[Int64s, Int64s]:
    """Return (rows, width) numbers padded with 0, and (rows,) lengths; rows longer than `max_width` are cut there.

    The width is the longest row's, rounded up to a `multiple`, at least that and at most `max_width`.
    """
    lists = whole(column)
    offsets, values = numbers_of(lists.offsets).astype(np.int64), numbers_of(lists.values)
    lengths = offsets[1:] - offsets[:-1]
    longest = int(lengths.max(initial=1))
    if longest > max_width:
        lengths = np.minimum(lengths, max_width)
        offsets, values = _cut(offsets, values, lengths)
    width = min(-(-longest // multiple) * multiple, max_width)
    if not len(lengths):
        return np.zeros((0, width), dtype=np.int64), lengths
    padded = np.frombuffer(pa.allocate_buffer(len(lengths) * width * 8), dtype=np.int64).reshape(len(lengths), width)
    padded[...] = _pad(offsets, values, width)
    return padded, lengths


def _cut(offsets: Int64s, values: npt.NDArray[Any], lengths: Int64s) -> tuple[Int64s, npt.NDArray[Any]]:
    """Return offsets and values of rows truncated to the given lengths."""
    cut = np.concatenate(([0], np.cumsum(lengths)))
    return cut, values[np.arange(cut[-1]) + np.repeat(offsets[:-1] - cut[:-1], lengths)]


def _pad(offsets: Int64s, values: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """Return (rows, width) numbers from rows no longer than `width`."""
    import pyarrow.compute as pc  # slow to import, and not every task pads

    bounds = pa.py_buffer(offsets * values.itemsize)
    rows = pa.LargeStringArray.from_buffers(len(offsets) - 1, bounds, pa.py_buffer(values))
    padded = pc.ascii_rpad(rows, width=width * values.itemsize, padding="\0").buffers()[2]
    return np.frombuffer(padded, dtype=values.dtype, count=len(rows) * width).reshape(len(rows), width)


def lengths_of(column: pa.ChunkedArray) -> Int64s:
    """Return how many values each row of a list column has; shape (rows,)."""
    return np.diff(numbers_of(whole(column).offsets)).astype(np.int64)


def first_incomplete(column: pa.ChunkedArray) -> int | None:
    """Return the first row of a list column with a null among its values; None if there is none."""
    lists = whole(column)
    offsets = numbers_of(lists.offsets).astype(np.int64)
    within = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    if not within.null_count:
        return None
    place = int(numbers_of(within.is_null().cast(pa.uint8())).argmax()) + int(offsets[0])
    return int(np.searchsorted(offsets, place, side="right")) - 1


def truncate_lists(rows: pa.Table, name: str, longest: int) -> pa.Table:
    """Return the table with the lists of one column truncated to `longest` values."""
    import pyarrow.compute as pc  # slow to import, and few runs need it

    place, field = rows.column_names.index(name), rows.schema.field(name)
    cut: Sequence[pa.Array] = [pc.list_slice(chunk, 0, longest) for chunk in rows.column(name).chunks]
    return rows.set_column(place, field, pa.chunked_array(cut).cast(field.type))
