"""Convert numbers between Arrow and numpy without a copy, and columns of any type to the few that are read.

pyarrow's own `to_numpy`, `array`, `scalar` and `fill_null` import pandas, half a second of every start.
"""

from __future__ import annotations

import re
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
