"""A column of several row groups, from which rows are taken in any order, copied once if their type allows it.

Rows of number lists, text and bytes are byte strings (`copy_strings`); rows of numbers, times etc. have a fixed size.
For both, only offsets and numbers are concatenated; content stays where it was decoded. Arrow would take lists element
by element, from one row group at a time; it is used for columns small enough to be joined first, and for other types,
such as nested ones.

`Rows` are rows of decoded row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.core.arrays import Int64s, group_of
from elastic_train.data.arrow.numbers import column_of, numbers_of, whole

SMALL_ROW = 64
"""Strings shorter than this on average are cheaper to join first."""

_BOUNDS = {pa.string(): np.int32, pa.binary(): np.int32, pa.large_string(): np.int64, pa.large_binary(): np.int64}
_NOTHING = pa.py_buffer(b"")

Mask = npt.NDArray[np.bool_]


class Column(Protocol):
    """A column of concatenated row groups."""

    def take(self, numbers: Int64s, slots: Int64s) -> pa.Array:
        """Take rows: `slots` index all rows, `numbers` give the row group of each."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One row group's column; as strings of bytes or numbers where possible."""

    array: pa.Array
    strings: Strings | None = None
    numbers: npt.NDArray[Any] | None = None


def piece_of(array: pa.Array) -> Piece:
    """Return the piece of a row group's column."""
    kind = array.type
    if kind in _BOUNDS or (pa.types.is_list(kind) and _is_plain(array.values)):
        return Piece(array, strings=Strings.of(array))
    if pa.types.is_primitive(kind) and kind.bit_width % 8 == 0:
        return Piece(array, numbers=_octets_of(array))
    return Piece(array)


def join(pieces: Sequence[Piece]) -> Column:
    """Concatenate a column's pieces, one per row group."""
    arrays, kind = [piece.array for piece in pieces], pieces[0].array.type
    strings = [piece.strings for piece in pieces if piece.strings is not None]
    numbers = [piece.numbers for piece in pieces if piece.numbers is not None]
    if len(strings) == len(pieces):
        if sum(each.size for each in strings) <= SMALL_ROW * sum(map(len, arrays)):
            return _Small(pa.concat_arrays(arrays))
        if all(each.content.size <= MAX_BYTES for each in strings):
            return _Strings(kind, strings, _validity_of(arrays))
    if len(numbers) == len(pieces):
        return _Numbers(kind, np.concatenate(numbers), _validity_of(arrays))
    return _Others(arrays)


@dataclass(frozen=True, slots=True)
class Strings:
    """An array as strings: row i is [offsets[i] + shift, offsets[i + 1] + shift), times `width`, of `content`."""

    offsets: npt.NDArray[Any]
    shift: int
    width: int
    content: pa.Buffer

    @classmethod
    def of(cls, array: pa.Array) -> Strings:
        dtype = _BOUNDS.get(array.type)
        if dtype is None:
            values = array.values
            content, width = values.buffers()[1] or _NOTHING, values.type.bit_width // 8
            return cls(numbers_of(array.offsets), values.offset, width, content)
        _, bounds, content = array.buffers()
        at = array.offset * np.dtype(dtype).itemsize
        return cls(np.frombuffer(bounds, dtype, len(array) + 1, at), 0, 1, content or _NOTHING)

    @property
    def size(self) -> int:
        return int(self.offsets[-1] - self.offsets[0]) * self.width


class _Strings:
    """Rows that are strings of bytes."""

    def __init__(self, kind: pa.DataType, strings: Sequence[Strings], is_valid: Mask | None) -> None:
        self._kind, self._is_valid, self._width = kind, is_valid, strings[0].width
        self._offsets = np.concatenate([each.offsets for each in strings])
        self._shifts = np.array([each.shift for each in strings], dtype=self._offsets.dtype)
        self._contents = [each.content for each in strings]

    def take(self, numbers: Int64s, slots: Int64s) -> pa.Array:
        places = slots + numbers  # every row group has one more offset than rows
        begins, ends = self._offsets.take(places), self._offsets.take(places + 1)
        at = begins + self._shifts.take(numbers) if self._shifts.any() else begins
        views = views_of(self._contents, numbers, at * self._width, (ends - begins) * self._width)
        return _named(self._kind, copy_strings(views, self._contents, _bits_of(self._is_valid, slots)))


class _Numbers:
    """Rows of one size."""

    def __init__(self, kind: pa.DataType, values: npt.NDArray[Any], is_valid: Mask | None) -> None:
        self._kind, self._values, self._is_valid = kind, values, is_valid

    def take(self, numbers: Int64s, slots: Int64s) -> pa.Array:
        found = pa.py_buffer(self._values.take(slots))
        return pa.Array.from_buffers(self._kind, len(slots), [_bits_of(self._is_valid, slots), found])


class _Small:
    """Rows of few bytes, joined."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array

    def take(self, numbers: Int64s, slots: Int64s) -> pa.Array:
        return self._array.take(column_of(slots))


class _Others:
    """Rows of any type, taken from each row group by Arrow, then reordered."""

    def __init__(self, arrays: Sequence[pa.Array]) -> None:
        self._arrays, self._starts = arrays, np.cumsum([0, *map(len, arrays)])

    def take(self, numbers: Int64s, slots: Int64s) -> pa.Array:
        by_number = np.argsort(numbers, kind="stable")
        places, bounds = slots.take(by_number), np.searchsorted(numbers.take(by_number), range(len(self._arrays) + 1))
        taken = [
            array.take(column_of(places[lo:hi] - start))
            for array, start, lo, hi in zip(self._arrays, self._starts, bounds, bounds[1:], strict=False)
        ]
        order = np.empty_like(by_number)
        order[by_number] = np.arange(len(by_number))
        return pa.concat_arrays(taken).take(column_of(order))


def _is_plain(values: pa.Array) -> bool:
    """Return True if values are numbers of whole bytes, without nulls."""
    kind = values.type
    return (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not values.null_count


def _octets_of(array: pa.Array) -> npt.NDArray[Any]:
    """Return fixed-size values as plain bytes."""
    size = array.type.bit_width // 8
    dtype = np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype((np.void, size))
    return np.frombuffer(array.buffers()[1], dtype, count=len(array), offset=array.offset * size)


def _named(kind: pa.DataType, strings: pa.Array) -> pa.Array:
    """Relabel large binary as the text or number list that it is."""
    validity, offsets, content = strings.buffers()
    bounds, content = np.frombuffer(offsets, np.int64, count=len(strings) + 1), content or _NOTHING
    assert bounds[-1] <= MAX_BYTES, "rows that are taken together are few"
    width = 1 if kind in _BOUNDS else kind.value_type.bit_width // 8
    narrow = (bounds // width if width > 1 else bounds).astype(_BOUNDS.get(kind, np.int32))
    if kind in _BOUNDS:
        return pa.Array.from_buffers(kind, len(strings), [validity, pa.py_buffer(narrow), content], strings.null_count)
    values = pa.Array.from_buffers(kind.value_type, int(narrow[-1]), [None, content], 0)
    return pa.Array.from_buffers(kind, len(strings), [validity, pa.py_buffer(narrow)], strings.null_count, 0, [values])


def _validity_of(arrays: Sequence[pa.Array]) -> Mask | None:
    """Return a mask of non-null rows; None if all are."""
    if not any(array.null_count for array in arrays):
        return None
    bits = [np.frombuffer(array.is_valid().buffers()[1], dtype=np.uint8) for array in arrays]
    masks = [np.unpackbits(each, count=len(array), bitorder="little") for each, array in zip(bits, arrays, strict=True)]
    return np.concatenate(masks).astype(bool)


def _bits_of(is_valid: Mask | None, slots: Int64s) -> pa.Buffer | None:
    return None if is_valid is None else pa.py_buffer(np.packbits(is_valid.take(slots), bitorder="little"))


Views = npt.NDArray[np.int32]
Ints = npt.NDArray[Any]

INLINE = 12
MAX_BYTES = (1 << 31) - 1
"""Maximum buffer size: a view's offset into it is an int32."""

_SIZE, _BUFFER, _AT = 0, 2, 3


def views_of(contents: Sequence[pa.Buffer], numbers: Int64s, at: Ints, sizes: Ints) -> Views:
    """Return views of strings in several buffers; shape (strings, 4). Long ones have the prefix 0, for comparisons."""
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
    """Copy the viewed strings into one buffer, as large binary; `validity` has a bit for each.

    Arrow's binary view names a string by its size, a buffer, and a place in it. To put strings in another order is
    to put views of 16 bytes in another order; a cast to plain binary then copies what they name, one after the
    other, without the interpreter's lock. The rows 2, 0 and 1, gathered from two row groups:

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
    of_views = [validity, pa.py_buffer(views), *buffers]
    return pa.Array.from_buffers(pa.binary_view(), len(views), of_views).cast(pa.large_binary())


class Rows:
    """The rows of one row group, of any schema."""

    def __init__(self, table: pa.Table) -> None:
        self.schema, self.num_rows = table.schema, table.num_rows
        self.nbytes = table.get_total_buffer_size()  # `nbytes` would wake Arrow's own memory pool, for milliseconds
        self.columns = [piece_of(whole(column)) for column in table.columns]


class Joined:
    """Several row groups, from which rows are taken by id.

    `first_id` are the ids of all row groups' first rows; `rows` the available row groups by number.
    """

    def __init__(self, first_id: Int64s, rows: Mapping[int, Rows]) -> None:
        groups = sorted(rows)
        side_by_side = [rows[group] for group in groups]
        self._first_id = first_id[groups]
        self._starts = np.cumsum([0, *(each.num_rows for each in side_by_side[:-1])])
        self._schema = side_by_side[0].schema
        self._columns = [join(pieces) for pieces in zip(*(each.columns for each in side_by_side), strict=True)]

    def take(self, ids: Int64s) -> tuple[pa.Table, Int64s]:
        """Return the rows of the ids, in order and in one chunk, and the ids of the places that they were read from."""
        to_first = self._first_id - self._starts
        numbers = group_of(self._first_id, ids)
        slots = ids - to_first.take(numbers)
        columns = [column.take(numbers, slots) for column in self._columns]
        read_from = group_of(self._starts, slots)
        return pa.Table.from_arrays(columns, schema=self._schema), slots + to_first.take(read_from)


def gather(rows_of: Callable[[int], Rows], first_id: Int64s, ids: Int64s) -> tuple[pa.Table, Int64s]:
    """Return the rows of the ids, and the ids of their places; `rows_of` returns a row group's rows."""
    return Joined(first_id, {group: rows_of(group) for group in groups_of(first_id, ids)}).take(ids)


def groups_of(first_id: Int64s, ids: Int64s) -> list[int]:
    """Return the row groups that hold the ids, distinct and ascending."""
    groups: list[int] = np.unique(group_of(first_id, ids)).tolist()
    return groups
