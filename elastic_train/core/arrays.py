"""Integer arrays used throughout the package, and common functions of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges [lo, hi), in ascending order."""


@overload
def group_of(first_id: Int64s, ids: int) -> int: ...
@overload
def group_of(first_id: Int64s, ids: Int64s) -> Int64s: ...
def group_of(first_id: Int64s, ids: Int64s | int) -> Int64s | int:
    """Return the number of the group that holds each id; the shape of `ids`.

    Groups are consecutive runs of ids: `first_id` has the first id of each, ascending, shape (groups,). Ids must not be
    below the first; the last group is unbounded.
    """
    groups = np.searchsorted(first_id, ids, side="right") - 1
    return int(groups) if isinstance(ids, int) else groups


def ranges_of(ids: Int64s) -> Ranges:
    """Return distinct ids as half-open ranges, in order."""
    ranges: list[tuple[int, int]] = []
    for id_ in sorted(ids.tolist()):
        if ranges and ranges[-1][1] == id_:
            ranges[-1] = (ranges[-1][0], id_ + 1)
        else:
            ranges.append((id_, id_ + 1))
    return tuple(ranges)


def filled(items: Iterable[T], size_of: Callable[[T], int], room: int) -> Iterator[list[T]]:
    """Yield groups of adjacent items, each as large as the room allows, or a single item."""
    some: list[T] = []
    left = room
    for item in items:
        size = size_of(item)
        if some and size > left:
            yield some
            some, left = [], room
        some.append(item)
        left -= size
    if some:
        yield some
