"""Triton kernel that squares and sums grains along their tree in one pass over memory (Tillet et al. 2019).

It follows the tree of `devices.squares`, so both give the same bits. Each function adds two halves of a tree; the
compiler inlines them and groups the loads. Short grains are padded with zeros, which changes no sum of squares.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton looks up what annotations name, and may not be given anything but types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _square(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    place = row * width + lane
    value = tl.load(start + place, mask=place < numel, other=0.0).to(tl.float64)
    return value * value


@triton.jit  # type: ignore[untyped-decorator]
def _two(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _square(start, numel, lane, row, width) + _square(start, numel, lane, row + 128, width)


@triton.jit  # type: ignore[untyped-decorator]
def _four(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _two(start, numel, lane, row, width) + _two(start, numel, lane, row + 64, width)


@triton.jit  # type: ignore[untyped-decorator]
def _eight(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _four(start, numel, lane, row, width) + _four(start, numel, lane, row + 32, width)


@triton.jit  # type: ignore[untyped-decorator]
def _sixteen(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _eight(start, numel, lane, row, width) + _eight(start, numel, lane, row + 16, width)


@triton.jit  # type: ignore[untyped-decorator]
def _thirty_two(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _sixteen(start, numel, lane, row, width) + _sixteen(start, numel, lane, row + 8, width)


@triton.jit  # type: ignore[untyped-decorator]
def _sixty_four(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _thirty_two(start, numel, lane, row, width) + _thirty_two(start, numel, lane, row + 4, width)


@triton.jit  # type: ignore[untyped-decorator]
def _half(start, numel, lane, row: tl.constexpr, width: tl.constexpr):
    return _sixty_four(start, numel, lane, row, width) + _sixty_four(start, numel, lane, row + 2, width)


@triton.jit  # type: ignore[untyped-decorator]
def fold_squares(places, out, width: tl.constexpr, dtype: tl.constexpr):
    """Fold the squares of grain number `program_id(0)`, 256 rows of `width` elements, into one row of `out`.

    `places`: int64, shape (grains, 2): each grain's address, of elements of `dtype`, and its length.
    """
    grain = tl.program_id(0).to(tl.int64)
    start = tl.load(places + 2 * grain).to(tl.pointer_type(dtype))
    numel = tl.load(places + 2 * grain + 1)
    lane = tl.arange(0, width)
    total = _half(start, numel, lane, 0, width) + _half(start, numel, lane, 1, width)
    tl.store(out + grain * width + lane, total)
