"""Convert numbers between Arrow and numpy without a copy, and columns of any type to the few that are read.

pyarrow's own `to_numpy`, `array`, `scalar` and `fill_null` import pandas, half a second of every start.

Columns of lists are truncated, and padded late. Padding turns a micro-batch's lists into one array in a tensor's shape,
as wide as its longest row. Arrow treats a row as a string of bytes and pads strings: one copy and fill per row, without
the interpreter's lock. Only then are numbers widened, into memory of Arrow's pool, which the next micro-batch reuses:
faulting in fresh pages costs more than filling them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.arrays import Int64s

_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy if it is one."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def numbers_of(column: pa.Array | pa.ChunkedArray, missing: float | None = None) -> npt.NDArray[Any]:
    """Return the values of an integer or float column; read-only, or a copy with `missing` in place of nulls."""
    array = whole(column)
    assert array.null_count == 0 or missing is not None, "a missing value is not a number"
    dtype = _dtype_of(array.type)
    if not len(array):
        return np.zeros(0, dtype=dtype)
    values = np.frombuffer(array.buffers()[1], dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)
    if missing is None or array.null_count == 0:
        return values
    return np.where(numbers_of(array.is_null().cast(pa.uint8())), np.asarray(missing, dtype=dtype), values)


@cache
def _dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype(_NAMES.get(str(kind), str(kind)))


def column_of(numbers: Int64s) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)
_LISTS = re.compile(r"(fixed_size_list|(?:large_)?list_view)(<.*>)(?:\[\d+\])?")
_DICTIONARY = re.compile(r"dictionary<values=(.*), indices=\w+, ordered=\d>")


def plain_name(kind: str) -> str:
    """Return the type name that a column of the given type is read as."""
    if (found := _DICTIONARY.fullmatch(kind)) is not None:
        return plain_name(found[1])
    if (found := _LISTS.fullmatch(kind)) is not None:
        return ("large_list" if found[1].startswith("large") else "list") + found[2]
    return {"string_view": "string", "binary_view": "binary"}.get(kind, kind)


def plain(table: Rows) -> Rows:
    """Return rows with plain column types; columns that have them are not touched.

    List views and fixed-size lists become lists, text and byte views become text and bytes, dictionaries become
    their values; other types stay. A manifest keeps the types of the files; `plain_name` gives the converted ones.
    """
    for place, field in enumerate(table.schema):
        if plain_name(str(field.type)) != str(field.type):
            table = table.set_column(place, field.name, _plain(whole(table.column(place))))
    return table


def without_nanoseconds(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with times in nanoseconds as integers: as objects they differ with pandas, or need it."""
    for place, field in enumerate(rows.schema):
        if getattr(field.type, "unit", None) == "ns":
            rows = rows.set_column(place, field.name, rows.column(place).cast(pa.int64()))
    return rows


def _plain(array: pa.Array) -> pa.Array:
    kind = array.type
    if pa.types.is_dictionary(kind):
        decoded = array.dictionary_decode()
        return decoded if plain_name(str(decoded.type)) == str(decoded.type) else _plain(decoded)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.string() if pa.types.is_string_view(kind) else pa.binary())
    return _as_lists(array)


def _as_lists(array: pa.Array) -> pa.Array:
    """Return lists of the values of list views or of lists of a fixed size; Arrow's own cast misreads sliced views."""
    import pyarrow.compute as pc  # takes long to import, and such columns are rare

    is_missing = array.is_null()
    lengths = numbers_of(pc.list_value_length(array), missing=0).astype(np.int64)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    is_large = pa.types.is_large_list_view(array.type)
    offsets = pa.Array.from_buffers(
        pa.int64() if is_large else pa.int32(),
        len(bounds),
        [None, pa.py_buffer(bounds.astype(np.int64 if is_large else np.int32))],
    )
    make = pa.LargeListArray if is_large else pa.ListArray
    return make.from_arrays(offsets, array.flatten(), mask=is_missing if array.null_count else None)


def pad_lists(column: pa.ChunkedArray, *, max_width: int, multiple: int = 1) -> tuple[Int64s, Int64s]:
    """Return (rows, width) numbers padded with 0, and (rows,) lengths; rows longer than `max_width` are cut there.

    The width is the longest row's, rounded up to a `multiple`, at least that and at most `max_width`.
    """
    lists = whole(column)
    offsets = numbers_of(lists.offsets).astype(np.int64)
    # The values of the rows around a slice are there, too, and may have nulls.
    values = numbers_of(lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])))
    offsets -= offsets[0]
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
