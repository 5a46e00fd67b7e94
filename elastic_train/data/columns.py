"""Columns of row groups, of which rows are taken in any order, and copied once where their type allows it.

Rows of lists of numbers, of text and of bytes are strings of bytes (see `views`); rows of numbers, times and the like
have one size. Arrow takes lists element by element, and only from one row group at a time. Columns of any other type,
nested ones say, it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.data.numbers import column_of, numbers_of
from elastic_train.data.views import MAX_BYTES, copy_strings, move, views_of
from elastic_train.mixing import Int64s

_BOUNDS = {pa.string(): np.int32, pa.binary(): np.int32, pa.large_string(): np.int64, pa.large_binary(): np.int64}
_NOTHING = pa.py_buffer(b"")


@dataclass(frozen=True, slots=True)
class Picks:
    """Which rows are taken of each of some row groups, and in which order: `order` is of them one after the other."""

    groups: Sequence[int]
    within: Sequence[Int64s]
    order: Int64s

    @classmethod
    def of(cls, first_id: Int64s, ids: Int64s) -> Picks:
        """Find the rows of ids, given the ids of all row groups' first rows."""
        groups = np.searchsorted(first_id, ids, side="right") - 1
        by_group = np.argsort(groups, kind="stable")
        sorted_ = groups[by_group]
        starts = np.flatnonzero(np.diff(sorted_, prepend=-1))
        rows, bounds = ids[by_group] - first_id[sorted_], [*starts.tolist(), len(ids)]
        order = np.empty_like(by_group)
        order[by_group] = np.arange(len(by_group))
        return cls(sorted_[starts].tolist(), [rows[lo:hi] for lo, hi in pairwise(bounds)], order)

    def ids(self, first_id: Int64s) -> Int64s:
        """Return the ids of the rows, from where they are taken."""
        of_groups = [first_id[group] + within for group, within in zip(self.groups, self.within, strict=True)]
        return np.concatenate(of_groups)[self.order]

    def take(self, of_groups: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Take what belongs to the rows."""
        taken = [items.take(within, 0) for items, within in zip(of_groups, self.within, strict=True)]
        return np.concatenate(taken).take(self.order, 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """A row group's column; `items` are views of the `content`, or values of one size, None for other types."""

    array: pa.Array
    items: npt.NDArray[Any] | None = None
    content: pa.Buffer | None = None
    is_valid: npt.NDArray[np.bool_] | None = None


def piece_of(array: pa.Array) -> Piece:
    """Look at a column of a row group."""
    kind = array.type
    if kind in _BOUNDS or (pa.types.is_list(kind) and _is_plain(array.values)):
        bounds, content = _strings_of(array)
        if content.size <= MAX_BYTES:
            return Piece(array, views_of(content, bounds[:-1], np.diff(bounds)), content, _is_valid(array))
    if pa.types.is_primitive(kind) and kind.bit_width % 8 == 0:
        dtype = np.dtype((np.void, kind.bit_width // 8))
        values = np.frombuffer(array.buffers()[1], dtype, count=len(array), offset=array.offset * dtype.itemsize)
        return Piece(array, values, None, _is_valid(array))
    return Piece(array)


def take(pieces: Sequence[Piece], picks: Picks) -> pa.Array:
    """Take rows of a column, of which there is a piece for each row group, into one array."""
    kind, items = pieces[0].array.type, [piece.items for piece in pieces if piece.items is not None]
    contents = [piece.content for piece in pieces if piece.content is not None]
    if len(items) < len(pieces) or 0 < len(contents) < len(pieces):
        taken = [piece.array.take(column_of(within)) for piece, within in zip(pieces, picks.within, strict=True)]
        return pa.concat_arrays(taken).take(column_of(picks.order))
    found, validity = picks.take(items), _validity(pieces, picks)
    if not contents:
        return pa.Array.from_buffers(kind, len(found), [validity, pa.py_buffer(found)])
    numbers = np.repeat(np.arange(len(pieces)), [len(within) for within in picks.within])
    move(found, numbers.take(picks.order))
    return _named(kind, copy_strings(found, contents, validity))


def _is_plain(values: pa.Array) -> bool:
    """Say whether values are numbers of whole bytes, none missing."""
    kind = values.type
    return (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not values.null_count


def _strings_of(array: pa.Array) -> tuple[Int64s, pa.Buffer]:
    """Return where each row's bytes begin, and the last one's end, in a buffer."""
    dtype = _BOUNDS.get(array.type)
    if dtype is None:
        values = array.values
        bounds = (numbers_of(array.offsets).astype(np.int64) + values.offset) * (values.type.bit_width // 8)
        return bounds, values.buffers()[1] or _NOTHING
    _, offsets, content = array.buffers()
    bounds = np.frombuffer(offsets, dtype, count=len(array) + 1, offset=array.offset * np.dtype(dtype).itemsize)
    return bounds.astype(np.int64), content or _NOTHING


def _named(kind: pa.DataType, strings: pa.Array) -> pa.Array:
    """Describe large binary as the text, or list of numbers, that it is."""
    validity, offsets, content = strings.buffers()
    bounds, content = np.frombuffer(offsets, np.int64, count=len(strings) + 1), content or _NOTHING
    width = 1 if kind in _BOUNDS else kind.value_type.bit_width // 8
    bounds = bounds // width
    assert bounds[-1] <= MAX_BYTES, "rows that are taken together are few"
    narrow = pa.py_buffer(bounds.astype(_BOUNDS.get(kind, np.int32)))
    if kind in _BOUNDS:
        return pa.Array.from_buffers(kind, len(strings), [validity, narrow, content], strings.null_count)
    values = pa.Array.from_buffers(kind.value_type, int(bounds[-1]), [None, content], 0)
    return pa.Array.from_buffers(kind, len(strings), [validity, narrow], strings.null_count, 0, [values])


def _is_valid(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return which rows are there; None if all are."""
    if not array.null_count:
        return None
    bits = np.frombuffer(array.is_valid().buffers()[1], dtype=np.uint8)
    return np.unpackbits(bits, count=len(array), bitorder="little").astype(bool)


def _validity(pieces: Sequence[Piece], picks: Picks) -> pa.Buffer | None:
    """Return a bit for each row that is taken; None if all are there."""
    if all(piece.is_valid is None for piece in pieces):
        return None
    masks = [np.ones(len(piece.array), dtype=bool) if piece.is_valid is None else piece.is_valid for piece in pieces]
    return pa.py_buffer(np.packbits(picks.take(masks), bitorder="little"))
