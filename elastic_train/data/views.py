"""Strings of bytes in any order, from several buffers, copied once.

Arrow's binary view names a string by its size, a buffer, and a place in it. To put strings in another order is to put
views of 16 bytes in another order; a cast to plain binary then copies what they name, one after the other, without the
interpreter's lock. Strings of up to 12 bytes lie in the view itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.mixing import Int64s

Views = npt.NDArray[np.int32]

INLINE = 12
MAX_BYTES = (1 << 31) - 1
"""A buffer may not be longer, since a view's place in it is an int32."""

_SIZE, _BUFFER, _AT = 0, 2, 3


def views_of(content: pa.Buffer, at: Int64s, sizes: Int64s) -> Views:
    """Return views of strings of the first buffer; shape (strings, 4). A long one's prefix, to compare by, is 0."""
    assert content.size <= MAX_BYTES, "views reach no further"
    views = np.zeros((len(at), 4), dtype=np.int32)
    views[:, _SIZE], views[:, _AT] = sizes, at
    short = np.flatnonzero(sizes <= INLINE)
    if len(short):
        octets = np.frombuffer(content, dtype=np.uint8) if content.size else np.zeros(1, dtype=np.uint8)
        places = np.arange(INLINE)
        inline = octets[np.minimum(at[short, None] + places, len(octets) - 1)]
        inline[places >= sizes[short, None]] = 0
        views.view(np.uint8)[short, -INLINE:] = inline
    return views


def move(views: Views, buffers: Int64s) -> None:
    """Have views of the first buffer name others, one for each."""
    views[:, _BUFFER] = np.where(views[:, _SIZE] > INLINE, buffers, views[:, _BUFFER])


def copy_strings(views: Views, buffers: Sequence[pa.Buffer], validity: pa.Buffer | None = None) -> pa.Array:
    """Copy the strings that the views name into one buffer, as large binary; `validity` has a bit for each."""
    of_views = [validity, pa.py_buffer(views), *buffers]
    return pa.Array.from_buffers(pa.binary_view(), len(views), of_views).cast(pa.large_binary())
