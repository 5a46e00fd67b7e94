"""Strings of bytes in any order, from several buffers, copied once.

Arrow's binary view names a string by its size, a buffer, and a place in it. To put strings in another order is to put
views of 16 bytes in another order; a cast to plain binary then copies what they name, one after the other, without the
interpreter's lock. The rows 2, 0 and 1, gathered from two row groups:

    row group 0, buffer 0              row group 1, buffer 1
    +---------------+---------------+  +---------------+
    | row 0         | row 1         |  | row 2         |    as decoded; never moved
    +---------------+---------------+  +---------------+
    at 0, 20 bytes   at 20, 30 bytes    at 0, 40 bytes

    views, 16 bytes each, in the order that is wanted:
    [40 bytes, buffer 1, at 0]  [20 bytes, buffer 0, at 0]  [30 bytes, buffer 0, at 20]

    the cast:
    +---------------+---------------+---------------+
    | row 2         | row 0         | row 1         |       one buffer; every byte was copied once
    +---------------+---------------+---------------+

Strings of up to 12 bytes are stored in the view itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.arrays import Int64s

Views = npt.NDArray[np.int32]
Ints = npt.NDArray[Any]

INLINE = 12
MAX_BYTES = (1 << 31) - 1
"""Maximum buffer size: a view's offset into it is an int32."""

_SIZE, _BUFFER, _AT = 0, 2, 3


def views_of(contents: Sequence[pa.Buffer], numbers: Int64s, at: Ints, sizes: Ints) -> Views:
    """Return views of strings in several buffers; shape (strings, 4). The prefix of long ones, used for comparisons, is
    0."""
    views = np.zeros((len(at), 4), dtype=np.int32)
    views[:, _SIZE], views[:, _BUFFER], views[:, _AT] = sizes, numbers, at
    if len(sizes) and sizes.min() <= INLINE:
        short = np.flatnonzero(sizes <= INLINE)
        for number in np.unique(numbers[short]).tolist():
            mine = short[numbers[short] == number]
            views.view(np.uint8)[mine, -INLINE:] = _inline(contents[number], at[mine], sizes[mine])
    return views


def _inline(content: pa.Buffer, at: Ints, sizes: Ints) -> npt.NDArray[np.uint8]:
    """Return the bytes of short strings, padded with zeros."""
    octets = np.frombuffer(content, dtype=np.uint8) if content.size else np.zeros(1, dtype=np.uint8)
    places = np.arange(INLINE)
    inline = octets[np.minimum(at[:, None] + places, len(octets) - 1)]
    inline[places >= sizes[:, None]] = 0
    return inline


def copy_strings(views: Views, buffers: Sequence[pa.Buffer], validity: pa.Buffer | None = None) -> pa.Array:
    """Copy the viewed strings into one buffer, as large binary; `validity` has a bit for each."""
    of_views = [validity, pa.py_buffer(views), *buffers]
    return pa.Array.from_buffers(pa.binary_view(), len(views), of_views).cast(pa.large_binary())
