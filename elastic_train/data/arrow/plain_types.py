"""Convert columns of any type that Parquet delivers to the few types that the rest of this package reads.

List views and fixed-size lists become lists, text and byte views become text and bytes, dictionaries become their
values; other types stay. A manifest keeps the types of the files; `plain_name` gives the converted ones.
"""

from __future__ import annotations

import re
from typing import TypeVar

import numpy as np
import pyarrow as pa

from elastic_train.data.arrow.numbers import numbers_of, whole

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
    """Return rows with plain column types; columns that have them are not touched."""
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
