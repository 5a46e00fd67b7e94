"""The gradient's norm by grains: one number for one gradient, however it is cut, and on whatever device it is.

Every element is squared in float64, which is exact for all narrower floats. A grain's squares are added along a fixed
binary tree, in which there is no addition but of whole vectors, element by element: so it depends on no kernel's order,
no vector width and no number of threads. It costs more passes over memory than a kernel that adds as it likes. The
grains' sums are added exactly and rounded once, so their order does not matter.

Copies of a grain have equal sums: a difference between them is a rank that computes otherwise, seen before the step is
applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elastic_train.core.arrays import Int64s
from elastic_train.errors import WeightsDifferError
from elastic_train.shards.grains import GRAIN, Cut, Layout, bounds_of

Float64s = npt.NDArray[np.float64]

_BLOCK = {"cpu": 8 * GRAIN}
"""Elements that are squared at once: what stays in a CPU's cache; enough to keep a GPU busy with one operation."""
_BLOCK_ELSEWHERE = 256 * GRAIN
_NARROW = 256
"""Elements of a row from which on the grains of all lengths are added up together: few operations for many of them."""
_MANY = 16
"""Grains of one length that have a table of their own, in which nothing is filled up."""


def in_memory_order(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Return a tensor's elements in their memory order, 1-D; a copy unless they are stored in it."""
    return (tensor if cut is None else tensor.movedim(cut.dim, 0)).reshape(-1)


def split_grains(tensors: Iterable[tuple[Tensor, Cut | None]]) -> list[Tensor]:
    """Return the grains of tensors, each with its cut, in the layout's order: tensor by tensor."""
    return [
        grain
        for tensor, cut in tensors
        if tensor.numel()
        for grain in torch.split(in_memory_order(tensor, cut), lengths_of(tuple(tensor.shape), cut))
    ]


@cache
def lengths_of(shape: tuple[int, ...], cut: Cut | None) -> list[int]:
    """Return how many elements each grain of a tensor has."""
    return [hi - lo for lo, hi in pairwise(bounds_of(shape, cut))]


def grain_squares(grains: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each grain, float64, shape (grains,), on the CPU.

    Each grain is a vector of at most GRAIN elements, all of them on one device.
    """
    lengths = [grain.numel() for grain in grains]
    count = Counter(lengths)
    tables: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        has_own = length > _NARROW and count[length] >= _MANY
        tables.setdefault(length if has_own else _width_of(length), []).append(number)
    widths = sorted(tables, reverse=True)
    narrow: dict[int, list[Float64s]] = {}
    for width in widths:
        some = [grains[number] for number in tables[width]]
        rows = _narrowed(some, width) if width > _NARROW else [_short(some, width)]
        narrow.setdefault(min(width, _NARROW), []).extend(rows)
    sums = np.empty(len(grains))
    sums[[number for width in widths for number in tables[width]]] = _add_up(narrow)
    return torch.from_numpy(sums)


def _width_of(length: int) -> int:
    """Return the smallest power of two that is no less than a length."""
    return 1 << (length - 1).bit_length()


def _narrowed(grains: Sequence[Tensor], width: int) -> Iterator[Float64s]:
    """Yield tables of the grains' squares, a row each, folded to _NARROW on the device; rows are filled with zeros."""
    device = grains[0].device
    num_rows = max(1, _BLOCK.get(device.type, _BLOCK_ELSEWHERE) // width)
    scratch = torch.empty(min(num_rows, len(grains)), width, dtype=torch.float64, device=device)
    for lo in range(0, len(grains), num_rows):
        some = list(grains[lo : lo + num_rows])
        table, end, half = scratch[: len(some)], width, _width_of(width) // 2
        rows = list(table.unbind())
        for number, grain in enumerate(some):
            if grain.numel() < width:
                rows[number][grain.numel() :].zero_()
                rows[number] = rows[number][: grain.numel()]
        torch._foreach_copy_(rows, some)
        table.mul_(table)
        while end > _NARROW:
            table[:, : end - half].add_(table[:, half:end])
            end, half = half, half // 2
        yield table[:, :_NARROW].clone().cpu().numpy()


def _short(grains: Sequence[Tensor], width: int) -> Float64s:
    """Return the table of short grains' squares, a row each, filled up with zeros."""
    values: Float64s = torch.cat(list(grains)).double().cpu().numpy()
    lengths = np.array([grain.numel() for grain in grains])
    table = np.zeros((len(grains), width))
    table[np.arange(width) < lengths[:, None]] = values
    with np.errstate(over="ignore"):
        return np.square(table, out=table)


def _add_up(narrow: Mapping[int, Sequence[Float64s]]) -> Float64s:
    """Add up every row of all tables, by their widths; return the sums, those of the widest rows first."""
    widest = max(narrow, default=1)
    table = np.empty((0, 2 * widest))
    with np.errstate(over="ignore", invalid="ignore"):
        for width in (1 << bits for bits in reversed(range(widest.bit_length()))):
            table = np.concatenate([table[:, :width] + table[:, width:], *narrow.get(width, ())])
    return table[:, 0]


def total_norm(squares: Float64s) -> float:
    """Return the norm from all trained grains' sums, in any order, shape (grains,).

    Infinite or not a number where a gradient is.
    """
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


def norm_of_grains(layout: Layout, gathered: Tensor, holders: Iterable[tuple[int, Int64s]]) -> Tensor:
    """Return the norm, a float64, from a row of squares of each rank; see `squares_of_holders`."""
    return torch.tensor(total_norm(squares_of_holders(layout, gathered, holders)), dtype=torch.float64)


def squares_of_holders(layout: Layout, gathered: Tensor, holders: Iterable[tuple[int, Int64s]]) -> Float64s:
    """Return the squares of all trained grains from a row of each rank; `holders` are ranks and their grains.

    Every trained grain must be held by one of them. Raises WeightsDifferError if two copies of a grain have different
    gradients.
    """
    squares = np.full(layout.num_grains, -1.0)
    for rank, grains in holders:
        row = gathered[rank, : grains.size].numpy()
        known = squares[grains]
        other = (known != row) & (known != -1.0) & ~(np.isnan(known) & np.isnan(row))
        if other.any():
            name = layout.tensors[layout.tensor_of[grains[other][0]]].names[0]
            raise WeightsDifferError(
                f"rank {rank} and another copy's holder have different gradients of '{name}': memory or a "
                "connection is damaged. The last commit is intact: all ranks end, and the next start continues"
            )
        squares[grains] = row
    trained: Float64s = squares[layout.trained]
    assert not (trained == -1.0).any(), "some grains' gradients are held by nobody"
    return trained


def clip_factor(norm: float, limit: float) -> float:
    """Return what a gradient is multiplied by so that its norm is at most `limit`: 1.0 for one within it.

    As in `torch.nn.utils.clip_grad_norm_`, not a number for such a norm. Multiplying by it shows no cut.
    """
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor
