"""Pieces: a tensor of the state that no rank need hold as a whole.

Ranks hold *spans*, runs of the tensor's elements in memory order: C order of its dimensions, but that the one along
which it may be cut comes first. torch's format knows boxes, which have offsets and sizes in every dimension. A span is
cut into a few boxes that are runs of elements themselves, so that what a file holds of a box, and what memory holds of
it, are the same bytes in the same order: a file says so by the box's strides. A whole tensor is such a box, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_train.placement.grains import Cut

Span = tuple[int, int]
"""Elements [lo, hi) of a tensor in memory order."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """A leaf of the state that ranks hold pieces of. Equal on every rank but for `held`.

    * `dtype`, `shape`: of the whole tensor, and `cut`, which says its memory order and its grains;
    * `held`: this rank's live memory: 1-D, contiguous, hi - lo elements each; spans ascending, apart;
    * `written`: by writer's place: the spans that it writes, each within one that it holds; over all writers they cover
      the tensor once. Those of weights (leaves below "model") are cut at grains.
    """

    dtype: torch.dtype
    shape: torch.Size
    held: Mapping[Span, Tensor]
    written: Sequence[Sequence[Span]]
    cut: Cut | None = None

    def memory(self, span: Span) -> Tensor:
        """Return this rank's live memory of a span, as a view of the held one that contains it."""
        for (lo, hi), tensor in self.held.items():
            if lo <= span[0] and span[1] <= hi:
                assert tensor.shape == (hi - lo,) and tensor.dtype == self.dtype, "held memory is of another kind"
                return tensor[span[0] - lo : span[1] - lo]
        raise AssertionError(f"elements {span} are in none of the spans that this rank holds")

    def overlapping(self, span: Span) -> Iterator[Span]:
        """Yield what is held of a span."""
        for lo, hi in self.held:
            if max(lo, span[0]) < min(hi, span[1]):
                yield max(lo, span[0]), min(hi, span[1])


def moved(sizes: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Return something of every dimension in memory order."""
    dim = 0 if cut is None else cut.dim
    return (*sizes[dim : dim + 1], *sizes[:dim], *sizes[dim + 1 :])


def moved_back(sizes: Sequence[int], cut: Cut | None) -> tuple[int, ...]:
    """Return something of every dimension in the tensor's own order."""
    dim = 0 if cut is None else cut.dim
    return (*sizes[1 : dim + 1], *sizes[:1], *sizes[dim + 1 :])


class Box(NamedTuple):
    """A box of a tensor, its dimensions in memory order, that is the run `span` of its elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


def boxes(shape: Sequence[int], span: Span) -> list[Box]:
    """Cut a span of a tensor into boxes, in order: at most 2 * dims - 1, none for an empty span.

    `shape` is in memory order.
    """
    lo, hi = span
    if lo >= hi:
        return []
    if not shape:
        return [Box((), (), span)]
    row = math.prod(shape[1:])
    first, last = -(-lo // row), hi // row  # the rows [first, last) are in the span as a whole
    if first > last:
        return _in_row(shape, last, span)
    found = _in_row(shape, first - 1, (lo, first * row))
    if first < last:
        offsets, sizes = (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        found.append(Box(offsets, sizes, (first * row, last * row)))
    return found + _in_row(shape, last, (last * row, hi))


def _in_row(shape: Sequence[int], number: int, span: Span) -> list[Box]:
    """Cut a span that lies within one row of a tensor."""
    start = number * math.prod(shape[1:])
    return [
        Box((number, *box.offsets), (1, *box.sizes), (start + box.span[0], start + box.span[1]))
        for box in boxes(shape[1:], (span[0] - start, span[1] - start))
    ]


def span_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Span | None:
    """Return the run of elements that a box is, empty if it has none; None if it is in several runs.

    The last element is where the run ends. All are in memory order.
    """
    if not math.prod(sizes):
        return 0, 0
    lo = last = 0
    for length, offset, size in zip(shape, offsets, sizes, strict=True):
        lo, last = lo * length + offset, last * length + offset + size - 1
    return (lo, last + 1) if last + 1 - lo == math.prod(sizes) else None


def hollowed(tree: object) -> object:
    """Return a state with a tensor without memory in place of all pieces, as torch's planner can read it."""
    if isinstance(tree, Pieces):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, Mapping):
        return {key: hollowed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [hollowed(value) for value in tree]
    return tree
