"""Convert numbers between Arrow and numpy without a copy.

pyarrow's own `to_numpy`, `array`, `scalar` and `fill_null` import pandas, half a second of every start.
"""

from __future__ import annotations

from functools import cache
from typing import Any

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
    """Return whole numbers as a column."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])
