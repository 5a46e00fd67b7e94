"""Numbers between Arrow and numpy, without a copy.

pyarrow's own `to_numpy`, `array`, `scalar` and `fill_null` import pandas, half a second of every start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.mixing import Int64s

_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def numbers_of(column: pa.Array | pa.ChunkedArray, missing: float | None = None) -> npt.NDArray[Any]:
    """Return the values of a column of integers or floats; read-only, or a copy with `missing` where there is none."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no or of several chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    assert array.null_count == 0 or missing is not None, "a missing value is no number"
    dtype = np.dtype(_NAMES.get(str(array.type), str(array.type)))
    if not len(array):
        return np.zeros(0, dtype=dtype)
    values = np.frombuffer(array.buffers()[1], dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)
    if missing is None or array.null_count == 0:
        return values
    return np.where(numbers_of(array.is_null().cast(pa.uint8())), np.asarray(missing, dtype=dtype), values)


def column_of(numbers: Int64s) -> pa.Array:
    """Return whole numbers as a column."""
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])
