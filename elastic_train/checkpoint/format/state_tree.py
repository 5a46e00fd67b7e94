"""The nested state and its leaves: what the file format keeps of a tree, what is recorded in addition, and pieces.

torch.distributed.checkpoint names a leaf by its path, turns mapping keys into text, and drops empty mappings. Without
the additions, a state after one optimizer step (parameters numbered 0, 1, ...) would come back with other keys, and
plain SGD's without any.

Pieces are a tensor of the state that no rank need hold whole.

Ranks hold *spans*: runs of elements in memory order, which is C order with the dimension of the cut moved first.
torch's format has boxes, with offsets and sizes per dimension. A span is divided into a few boxes that are themselves
runs of elements, so a box has the same bytes in file and memory; the file states that by the box's strides. A whole
tensor is such a box as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.errors import ConfigError
from elastic_train.placement.grains import Cut

Span = tuple[int, int]
"""Elements [lo, hi) of a tensor in memory order."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A leaf of the state that ranks hold in pieces. Equal on every rank except `held`.

    * `dtype`, `shape`: of the whole tensor; `cut` defines its memory order and grains;
    * `held`: this rank's live memory: 1-D, contiguous, hi - lo elements each; spans ascending and disjoint;
    * `written`: spans by writer, each within one that it holds; together they cover the tensor once. Those of weights
      (leaves below "model") are cut at grains;
    * `is_whole`: True for a moment of another shape than its weight's, of which a rank holds all or nothing; whoever
      writes the weight's first element writes it.
    """

    dtype: torch.dtype
    shape: torch.Size
    held: Mapping[Span, Tensor]
    written: Sequence[Sequence[Span]]
    cut: Cut | None = None
    is_whole: bool = False

    def memory(self, span: Span) -> Tensor:
        """Return this rank's live memory of a span, as a view of the held span that contains it."""
        for (lo, hi), tensor in self.held.items():
            if lo <= span[0] and span[1] <= hi:
                assert tensor.shape == (hi - lo,) and tensor.dtype == self.dtype, "held memory is of another kind"
                return tensor[span[0] - lo : span[1] - lo]
        raise AssertionError(f"this rank does not hold elements {span}")

    def overlapping(self, span: Span) -> Iterator[Span]:
        """Yield the overlaps of a span with the held ones."""
        for lo, hi in self.held:
            if max(lo, span[0]) < min(hi, span[1]):
                yield max(lo, span[0]), min(hi, span[1])


def moved(sizes: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Return per-dimension values in memory order."""
    dim = 0 if cut is None else cut.dim
    return (*sizes[dim : dim + 1], *sizes[:dim], *sizes[dim + 1 :])


def moved_back(sizes: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Return per-dimension values in the tensor's own order."""
    dim = 0 if cut is None else cut.dim
    return (*sizes[1 : dim + 1], *sizes[:1], *sizes[dim + 1 :])


class Box(NamedTuple):
    """A box of a tensor, dimensions in memory order, that covers the run `span` of elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


def boxes(shape: Sequence[int], span: Span) -> list[Box]:
    """Divide a span into boxes, in order: at most 2 * dims - 1, none for an empty span.

    `shape` is in memory order.
    """
    lo, hi = span
    if lo >= hi:
        return []
    if not shape:
        return [Box((), (), span)]
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # rows [first, last) are entirely in the span
    if first > last:
        return _in_row(shape, last, span)
    found = _in_row(shape, first - 1, (lo, first * row))
    if first < last:
        offsets, sizes = (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        found.append(Box(offsets, sizes, (first * row, last * row)))
    return found + _in_row(shape, last, (last * row, hi))


def _in_row(shape: Sequence[int], number: int, span: Span) -> list[Box]:
    """Divide a span that lies within one row of a tensor."""
    start = number * math.prod(shape[1:])
    return [
        Box((number, *box.offsets), (1, *box.sizes), (start + box.span[0], start + box.span[1]))
        for box in boxes(shape[1:], (span[0] - start, span[1] - start))
    ]


def span_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Span | None:
    """Return the run of elements that a box covers, empty if it has none; None if it is not a single run.

    All arguments are in memory order.
    """
    if not math.prod(sizes):
        return 0, 0
    lo = last = 0
    for length, offset, size in zip(shape, offsets, sizes, strict=True):
        lo, last = lo * length + offset, last * length + offset + size - 1
    return (lo, last + 1) if last + 1 - lo == math.prod(sizes) else None


def hollowed(tree: object) -> object:
    """Return a state with a meta tensor in place of all pieces, for torch's planner."""
    if isinstance(tree, Pieces):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, Mapping):
        return {key: hollowed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [hollowed(value) for value in tree]
    return tree


StatePath = tuple[str | int, ...]
"""Path of a leaf in a nested state: text for mapping keys, integers for list indices."""


def survey(tree: object, at: StatePath = ()) -> tuple[tuple[StatePath, ...], tuple[StatePath, ...]]:
    """Return the paths of mappings with integer keys, and of empty ones."""
    int_keyed = tuple(path for path, mapping in _mappings(tree, at) if mapping and _is_int_keyed(path, mapping))
    empty = tuple(path for path, mapping in _mappings(tree, at) if not mapping and path)
    return int_keyed, empty


def leaves_of(tree: object, at: StatePath = ()) -> Iterator[tuple[StatePath, object]]:
    """Yield every leaf with its path, as torch does; a list without tensors or mappings at any depth is one leaf.

    A tensor in pieces is a leaf.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves_of(value, (*at, str(key)))
    elif isinstance(tree, list) and _is_split(tree):
        for index, value in enumerate(tree):
            yield from leaves_of(value, (*at, index))
    else:
        yield at, tree


def _is_split(values: list[object]) -> bool:
    return any(
        isinstance(value, Mapping | Tensor | Pieces) or (isinstance(value, list) and _is_split(value))
        for value in values
    )


def fill(
    tree: dict[str, object],
    leaves: Mapping[StatePath, object],
    int_keyed: Sequence[StatePath],
    empty: Sequence[StatePath],
) -> None:
    """Put every leaf at its path, creating mappings and lists; other entries stay."""
    numbered = frozenset(int_keyed)
    for path in empty:
        _put(tree, path, {}, numbered)
    for path, value in leaves.items():
        _put(tree, path, value, numbered)


def _put(tree: dict[str, object], path: StatePath, value: object, numbered: frozenset[StatePath]) -> None:
    place: object = tree
    for depth, part in enumerate(path):
        key = int(part) if path[:depth] in numbered else part
        if depth == len(path) - 1:
            _set(place, key, value)
            return
        below = _get(place, key)
        if not isinstance(below, dict | list):
            below = [] if isinstance(path[depth + 1], int) else {}
            _set(place, key, below)
        place = below


def _get(place: object, key: str | int) -> object:
    if isinstance(place, list):
        return place[int(key)] if int(key) < len(place) else None
    assert isinstance(place, dict), f"'{key}' is not inside a container"
    return place.get(key)


def _set(place: object, key: str | int, value: object) -> None:
    if isinstance(place, list):
        place.extend([None] * (int(key) + 1 - len(place)))
        place[int(key)] = value
    else:
        assert isinstance(place, dict), f"'{key}' is not inside a container"
        place[key] = value


def _mappings(tree: object, at: StatePath) -> Iterator[tuple[StatePath, Mapping[object, object]]]:
    if isinstance(tree, Mapping):
        yield at, tree
        for key, value in tree.items():
            yield from _mappings(value, (*at, str(key)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _mappings(value, (*at, index))


def _is_int_keyed(path: StatePath, mapping: Mapping[object, object]) -> bool:
    kinds = {type(key) for key in mapping}
    if kinds not in ({str}, {int}):
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        shown = ".".join(str(part) for part in path)
        raise ConfigError(f"state '{shown}' has keys of type {names}; a checkpoint holds text or integer keys")
    return kinds == {int}
