"""Late padding: lists of numbers become one tensor-shaped array per micro-batch, as wide as its longest row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from elastic_train.data.numbers import numbers_of
from elastic_train.mixing import Int64s


def pad_lists(column: pa.ChunkedArray, *, max_width: int, multiple: int = 1) -> tuple[Int64s, Int64s]:
    """Return (rows, width) numbers padded with 0, and (rows,) lengths; rows longer than `max_width` are cut there.

    The width is the longest row's, rounded up to a `multiple`, at least that and at most `max_width`.
    """
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    offsets, values = numbers_of(lists.offsets), numbers_of(lists.values)
    whole = np.diff(offsets)
    lengths = np.minimum(whole, max_width)
    longest = max(1, int(lengths.max(initial=0)))
    width = min(-(-longest // multiple) * multiple, max_width)
    small: type[np.signedinteger[Any]] = np.int16 if width <= np.iinfo(np.int16).max else np.int64  # faster to compare
    is_filled = np.arange(width, dtype=small) < lengths.astype(small)[:, None]
    padded = np.zeros((len(lengths), width), dtype=np.int64)
    if (whole <= max_width).all():
        padded[is_filled] = values[offsets[0] : offsets[-1]]
    else:
        padded[is_filled] = values[(offsets[:-1, None] + np.arange(width))[is_filled]]
    return padded, lengths.astype(np.int64)
